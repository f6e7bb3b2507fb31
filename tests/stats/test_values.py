"""Values keep their dtype; helpers name dtypes and convert tensors to numpy."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

from comgra_decl.stats import dtype_name, to_numpy

from .recording import ready, reducer

DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.int64: "int64",
    torch.uint16: "uint16",
    torch.bool: "bool",
    torch.complex64: "complex64",
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_numpy_keeps_dtype_and_every_value(dtype: torch.dtype) -> None:
    x = (torch.arange(12).view(3, 4) % 5).to(dtype)
    array = to_numpy(x.T)
    assert str(array.dtype) == dtype_name(x) == DTYPES[dtype]
    assert array.shape == (4, 3)
    np.testing.assert_array_equal(array.astype(np.complex128), x.T.to(torch.complex128).numpy())
    x.zero_()
    assert array.any()


def test_to_numpy_of_unusual_tensors() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    np.testing.assert_array_equal(to_numpy(z.conj()), [1 - 2j, 3 + 4j])
    np.testing.assert_array_equal(to_numpy(z.conj().imag), [-2, 4])
    np.testing.assert_array_equal(to_numpy(torch.ones(2, requires_grad=True) * 3), [3, 3])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        half = z.to(torch.complex32)
    assert to_numpy(half).dtype == np.complex64
    assert to_numpy(torch.ones(1).bfloat16()).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("elements", [4, 20_000])
def test_values_of_the_first_samples(elements: int) -> None:
    by = reducer(sample_count=3)
    x = torch.randn(5, elements).bfloat16()
    by.add(x, batch_dim=0, values=True)
    by.add(x.T, batch_dim=1, values=True)
    by.add(x, batch_dim=0, values=False)
    by.add(x[:2], batch_dim=0, values=True)
    by.add(x, batch_dim=None, values=True)
    by.add(torch.tensor(2.5), batch_dim=None, values=True)
    by.add(torch.zeros(0, 3), batch_dim=0, values=True)
    values = ready(by.finish()).values
    assert sorted(values) == [0, 1, 3, 4, 5, 6]
    np.testing.assert_array_equal(values[0], to_numpy(x[:3]))
    np.testing.assert_array_equal(values[1], to_numpy(x[:3]))
    np.testing.assert_array_equal(values[3], to_numpy(x[:2]))
    np.testing.assert_array_equal(values[4], to_numpy(x[None]))
    assert values[5].tolist() == [2.5]
    assert values[6].shape == (0, 3)
    assert values[0].dtype == ml_dtypes.bfloat16


def test_values_of_one_step_do_not_show_up_in_the_next() -> None:
    by = reducer()
    by.add(torch.ones(2), batch_dim=None, values=True)
    assert by.finish().values
    by.add(torch.ones(2), batch_dim=None)
    assert not by.finish().values
