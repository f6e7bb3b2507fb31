"""The compiled kernel: used where possible, harmless where not, and exact at every length."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest
import torch

from comgra_decl.records import Raw
from comgra_decl.stats import kernel
from comgra_decl.stats.sums import compiled, exact

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
LENGTHS = [*range(1, 35), 63, 64, 65, 511, 512, 513, 527, 528, 529, 1024, 4095, 4096, 4097, 5000]


def raw(x: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    out = np.full((*x.shape[:-1], 8), np.nan)
    assert compiled(x, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_is_one_where_llvmlite_is(dtype: torch.dtype) -> None:
    pytest.importorskip("llvmlite")
    assert kernel.kernel_for(dtype) is not None
    assert kernel.kernel_for(dtype) is kernel.kernel_for(dtype)
    assert kernel.kernel_for(torch.int32) is None


@pytest.mark.parametrize("failing", [ImportError, OSError, RuntimeError])
def test_there_is_none_where_llvmlite_fails(
    monkeypatch: pytest.MonkeyPatch, failing: type[Exception]
) -> None:
    real = builtins.__import__

    def fail(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("llvmlite"):
            raise failing(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", fail)
    assert kernel.kernel_for.__wrapped__(torch.float32) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_of_rows(dtype: torch.dtype) -> None:
    for n in LENGTHS:
        x = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n)).to(dtype)
        x[0, 0, n // 2] = 0
        x[1, 2, 0] = -7
        found, expected = raw(x), exact(x).numpy()
        for column in (Raw.MIN, Raw.MAX, Raw.NONZERO, Raw.NONFINITE):
            np.testing.assert_array_equal(found[..., column], expected[..., column])
        np.testing.assert_allclose(found[..., Raw.ABS_SUM], expected[..., Raw.ABS_SUM], rtol=1e-6)
        for rows in (found, expected):  # their pivots may differ by rounding
            rows[..., Raw.SQUARES] -= rows[..., Raw.SUM] ** 2 / n
            rows[..., Raw.SUM] += n * rows[..., Raw.PIVOT]
        scale = expected[..., Raw.ABS_SUM].max()
        np.testing.assert_allclose(
            found[..., Raw.SUM], expected[..., Raw.SUM], rtol=1e-6, atol=1e-6 * scale
        )
        np.testing.assert_allclose(
            found[..., Raw.SQUARES], expected[..., Raw.SQUARES], rtol=2e-6, atol=1e-6
        )


@pytest.mark.parametrize("where", [0, 15, 16, 33, 600, 4100, 4999])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30, 1e-30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_that_float32_cannot_square(
    dtype: torch.dtype, value: float, where: int
) -> None:
    x = torch.zeros(1, 4, 5000, dtype=dtype)
    x[0, 2, where] = value
    np.testing.assert_allclose(raw(x), exact(x).numpy(), rtol=1e-12)


def test_only_the_rows_and_results_given_are_touched() -> None:
    memory = torch.full((3, 5, 40), torch.nan)
    x = memory[:, 1:3]
    x.copy_(torch.randn(3, 2, 40))
    out = np.full((3, 6, 8), -5.0)
    assert compiled(x, out[:, 2:4])
    assert (out[:, :2] == -5).all()
    assert (out[:, 4:] == -5).all()
    np.testing.assert_array_equal(out[:, 2:4, Raw.MAX], x.amax(-1).numpy())


def test_sums_of_many_equal_numbers_do_not_drift() -> None:
    x = torch.full((1, 1, 1_000_001), 0.1)
    x[..., 0] = 0.3
    found = raw(x)[0, 0]
    exactly = x.double()
    mean = found[Raw.PIVOT] + found[Raw.SUM] / x.numel()
    assert mean == pytest.approx(exactly.mean().item(), rel=1e-9)
    assert found[Raw.ABS_SUM] == pytest.approx(exactly.sum().item(), rel=1e-6)
