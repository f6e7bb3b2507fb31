"""Singular values and ranks of matrices, compared with a full decomposition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from comgra_decl.stats.quiet import quiet
from comgra_decl.stats.spectral import measure_effective_rank, measure_top

Floats = NDArray[np.float64]


def top(x: torch.Tensor, *, host: bool = True) -> Floats:
    """Returns the singular value and the stable rank [samples, 2]."""
    with quiet():
        found = measure_top(x, host=host)
    assert found is not None
    packed, finish = found
    return finish(packed.numpy())


def effective(x: torch.Tensor) -> Floats:
    """Returns the effective rank [samples]."""
    with quiet():
        found = measure_effective_rank(x)
    assert found is not None
    packed, finish = found
    return finish(packed.numpy())[:, 0]


def truth(x: torch.Tensor) -> Floats:
    """Returns singular value, stable rank and effective rank [samples, 3]."""
    rows = []
    for sample in x.numpy().astype(np.complex128):
        s = np.linalg.svd(sample.reshape(len(sample), -1), compute_uv=False)
        p = s[s > 0] / s.sum()
        rows.append((s[0], (s**2).sum() / s[0] ** 2, np.exp(-(p * np.log(p)).sum())))
    return np.array(rows)


SHAPES = [(1, 5, 7), (3, 7, 5), (1, 1, 9), (1, 9, 1), (2, 100, 80), (1, 300, 70), (1, 8, 3, 3, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("host", [True, False])
def test_equal_to_a_full_decomposition(
    shape: tuple[int, ...], dtype: torch.dtype, host: bool
) -> None:
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    expected = truth(x)
    # an accelerator takes a fixed number of steps, and this is the hardest matrix
    tolerance = 1e-4 if host else 5e-3
    np.testing.assert_allclose(top(x, host=host), expected[:, :2], rtol=2 * tolerance)
    np.testing.assert_allclose(effective(x), expected[:, 2], rtol=1e-5)


@pytest.mark.parametrize("side", [8, 200])
def test_matrices_with_few_different_singular_values(side: int) -> None:
    eye = torch.eye(side)
    low = torch.outer(torch.arange(1.0, side + 1), torch.ones(side))
    two = torch.diag(torch.tensor([3.0, 4.0] + [0.0] * (side - 2)))
    x = torch.stack((eye, low, two))
    expected = truth(x)
    np.testing.assert_allclose(expected[:, 1], [side, 1, 25 / 16])
    np.testing.assert_allclose(top(x), expected[:, :2], rtol=1e-5)
    np.testing.assert_allclose(effective(x), [side, 1, expected[2, 2]], rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e25, 1e37])
@pytest.mark.parametrize("host", [True, False])
def test_no_scale_overflows_or_vanishes(scale: float, host: bool) -> None:
    x = torch.randn(2, 90, 100, generator=torch.Generator().manual_seed(2)) * scale
    expected = truth(x)
    tolerance = 1e-4 if host else 5e-3
    np.testing.assert_allclose(top(x, host=host), expected[:, :2], rtol=2 * tolerance)
    np.testing.assert_allclose(effective(x), expected[:, 2], rtol=1e-5)


@pytest.mark.parametrize("side", [4, 90])
@pytest.mark.parametrize("host", [True, False])
def test_a_matrix_with_a_nan_has_no_number_and_its_neighbours_do(side: int, host: bool) -> None:
    x = torch.randn(4, side, side, generator=torch.Generator().manual_seed(3))
    expected = truth(x)
    x[1, 0, 2], x[2, 1, 1] = torch.nan, torch.inf
    for found in (top(x, host=host), effective(x)[:, None]):
        assert np.isnan(found[1:3]).all()
        assert np.isfinite(found[[0, 3]]).all()
    np.testing.assert_allclose(top(x)[0], expected[0, :2], rtol=2e-4)


@pytest.mark.parametrize("side", [4, 90])
def test_a_matrix_of_zeros_has_norm_zero_and_no_rank(side: int) -> None:
    found = top(torch.zeros(1, side, side))
    assert found[0, 0] == 0
    assert np.isnan(found[0, 1])
    assert np.isnan(effective(torch.zeros(1, side, side)))


def test_what_is_no_matrix_has_none() -> None:
    assert measure_top(torch.ones(3, 4)) is None
    assert measure_top(torch.ones(3)) is None
    assert measure_top(torch.ones(3, 0, 4)) is None
    assert measure_effective_rank(torch.ones(1, 1100, 1100)) is None


def test_the_same_matrix_gives_the_same_number_whatever_came_before() -> None:
    x, y = torch.randn(2, 1, 200, 300).unbind()
    first = top(x)
    top(y)
    state = torch.get_rng_state()
    np.testing.assert_array_equal(top(x), first)
    assert torch.equal(torch.get_rng_state(), state)
