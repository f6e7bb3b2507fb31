r"""Singular values of matrices, without a full decomposition where possible.

A sample with two or more value dims is read as a matrix, with its first dim as rows and all others
as columns, as in spectral normalisation of convolution weights (T. Miyato et al., "Spectral
normalization for generative adversarial networks", ICLR 2018). The statistics are NaN for other
samples, and for matrices that are empty or contain NaN or infinite values. With singular values s1
>= s2...

    singular_value   s1
    stable_rank      sum(s^2) / s1^2                     of a zero matrix: NaN
    effective_rank   exp(-sum(p log p)), p = s / sum(s)  of a zero matrix: NaN

The stable rank (M. Rudelson and R. Vershynin, "Sampling from large matrices", J. ACM 54, 2007) and
the effective rank (O. Roy and M. Vetterli, "The effective rank: a measure of effective
dimensionality", EUSIPCO 2007) both lie between 1 and the rank.

s1 is computed by the Lanczos method on A A^H (G. H. Golub and C. F. Van Loan, "Matrix
computations", chapter 10), with every vector orthogonalised against all previous ones. It always
starts from the same vector, so the result depends only on the matrix. It depends neither on a
random number generator nor, as with a warm start, on earlier records. The method approaches s1^2
from below. It stops once an eigenvalue is certain to lie within a relative 1e-3 of the estimate,
which means 5e-4 of s1, or after 48 steps. In practice, the error is quadratic in that bound, that
is, below 1e-5 unless s1 and s2 are nearly equal. On an accelerator, the method always takes 24
steps, because a check would wait for the device. On the host, matrices whose smaller side is at
most 64 are decomposed, which is faster.

The effective rank needs all singular values. They are the square roots of the eigenvalues of the
smaller Gram matrix in float64. Singular values below 1e-8 s1 are therefore inexact and are ignored.
The effective rank is NaN for a matrix whose smaller side is above 1024.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Finish = Callable[[Floats], Floats]
"""Computes the columns of statistics on the host, from data on a device."""

MOST_STEPS = 48
DEVICE_STEPS = 24
MOST_SIDE = 1024
_SMALL_SIDE = 64
_LOOK_EVERY = 4
_TOLERANCE = 1e-3
_IN_RANGE = 1e-12, 1e12  # norms whose squares and fourth powers fit float32


def as_matrices(x: Tensor) -> Tensor | None:
    """Return [samples, ...] as matrices [samples, m, n], m <= n; None if they are not matrices."""
    if x.dim() < 3 or x.numel() == 0:
        return None
    matrices = x.flatten(2)
    return matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT


def in_range(a: Tensor, *, host: bool) -> tuple[Tensor, Tensor]:
    """Return matrices, scaled so that no product overflows or underflows, and the scale.

    Matrices on the host are copied only if necessary. NaN and infinite values are preserved.
    """
    if host:
        norm = torch.linalg.vector_norm(a, dim=(1, 2)).numpy()
        if ((norm > _IN_RANGE[0]) & (norm < _IN_RANGE[1])).all():
            return a, torch.ones(len(a), dtype=torch.float64)
        a = a.to(torch.complex128 if a.is_complex() else torch.float64)
    scale = a.abs().amax((1, 2))
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return a / scale[:, None, None], scale.to(torch.float64)


class Lanczos:
    """The largest eigenvalue of A A^H for each of s matrices A [s, m, n], m <= n."""

    def __init__(self, a: Tensor) -> None:
        self._a, self._adjoint = a, a.mH
        start = _start(a.shape[1], a.dtype, a.device)
        self._basis = a.new_empty((len(a), min(MOST_STEPS, a.shape[1]), a.shape[1]))
        self._basis[:, 0] = start
        shape = len(a), 2, self._basis.shape[1]
        self._tridiagonal = torch.zeros(shape, dtype=torch.float64, device=a.device)
        self._vector = start.expand(len(a), -1).unsqueeze(2)
        self._steps = 0
        self._rounding = 30 * torch.finfo(a.dtype).eps

    def step(self) -> None:
        """Perform one step without waiting for the device."""
        k = self._steps
        w = self._a @ (self._adjoint @ self._vector)
        adjoint = self._basis[:, : k + 1].conj()
        basis = adjoint.mH
        shares = adjoint @ w
        w = torch.baddbmm(w, basis, shares, alpha=-1)
        w = torch.baddbmm(w, basis, adjoint @ w, alpha=-1)  # once is not accurate enough
        beta = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        self._tridiagonal[:, 0, k] = shares[:, k, 0].real
        self._tridiagonal[:, 1, k] = beta[:, 0, 0]
        self._steps = k + 1
        if self._steps < self._basis.shape[1]:
            # only rounding is left: the start vector's subspace is exhausted
            over = beta <= self._rounding * self._tridiagonal[:, 0].amax(1)[:, None, None]
            self._tridiagonal[:, 1, k].masked_fill_(over[:, 0, 0], 0.0)
            self._vector = torch.where(over, 0.0, w / torch.where(over, 1.0, beta))
            self._basis[:, self._steps] = self._vector[:, :, 0]

    @property
    def exhausted(self) -> bool:
        """Whether further steps cannot improve the result."""
        return self._steps >= self._basis.shape[1]

    def tridiagonal(self) -> Tensor:
        """Return diagonals and off-diagonals so far, float64 [s, 2, steps]."""
        return self._tridiagonal[:, :, : self._steps]


@lru_cache(maxsize=64)
def _start(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an irregular start vector that is unlikely to be orthogonal to a matrix."""
    numbers = torch.arange(1, length + 1, dtype=torch.float64)
    vector = torch.cos(numbers * numbers * 0.7071067811865476) + 0.25
    unit: Tensor = vector / torch.linalg.vector_norm(vector)
    return unit.to(dtype).to(device)


def largest(tridiagonal: Floats) -> tuple[Floats, Floats]:
    """Return the largest eigenvalues [s] and bounds of their distance to one of A A^H."""
    s, _, k = tridiagonal.shape
    matrices = np.zeros((s, k, k))
    i = np.arange(k)
    matrices[:, i, i] = tridiagonal[:, 0]
    matrices[:, i[1:], i[:-1]] = tridiagonal[:, 1, :-1]
    finite = np.isfinite(matrices).all((1, 2))
    matrices[~finite] = 0.0
    values, vectors = np.linalg.eigh(matrices)  # eigh reads the lower half
    residual = np.abs(vectors[:, -1, -1] * tridiagonal[:, 1, -1])
    return np.where(finite, values[:, -1], np.nan), residual


def top_square(a: Tensor) -> Floats:
    """Return the squares of the largest singular values [s] of matrices on the host."""
    if a.shape[1] <= _SMALL_SIDE:
        wide = a.to(_wide(a))
        gram = (wide @ wide.mH).resolve_conj().numpy()
        finite = np.isfinite(gram).all((1, 2))
        values = np.linalg.eigvalsh(np.where(finite[:, None, None], gram, 0.0))[:, -1]
        return np.where(finite, values, np.nan)
    lanczos = Lanczos(a)
    while True:
        for _ in range(_LOOK_EVERY):
            if not lanczos.exhausted:
                lanczos.step()
        value, residual = largest(lanczos.tridiagonal().numpy())
        if lanczos.exhausted or not (residual > _TOLERANCE * value).any():
            return value


def measure_top(x: Tensor, *, host: bool = True) -> tuple[Tensor, Finish] | None:
    """Return the data for `singular_value` and `stable_rank` [samples, 2]; None if not matrices.

    Args:
        x: [samples, ...] of at least 32 bits.
        host: whether waiting for a result is free.
    """
    a = as_matrices(x)
    if a is None:
        return None
    a, scale = in_range(a, host=host)
    squares = torch.linalg.vector_norm(a, dim=(1, 2), dtype=_wide(a)).square()
    if host:
        top = torch.from_numpy(top_square(a))
        packed = torch.stack((scale, squares, top), 1)
        return packed, _finish_top
    lanczos = Lanczos(a)
    for _ in range(min(DEVICE_STEPS, a.shape[1])):
        lanczos.step()
    packed = torch.cat((scale[:, None], squares[:, None], lanczos.tridiagonal().flatten(1)), 1)
    return packed, _finish_lanczos


def _wide(a: Tensor) -> torch.dtype:
    return torch.complex128 if a.is_complex() else torch.float64


def _finish_lanczos(packed: Floats) -> Floats:
    top, _ = largest(packed[:, 2:].reshape(len(packed), 2, -1))
    return _finish_top(np.column_stack((packed[:, :2], top)))


def _finish_top(packed: Floats) -> Floats:
    scale, squares, top = packed.T
    with np.errstate(all="ignore"):
        rank = np.where(top > 0, squares / top, np.nan)
        value = np.sqrt(np.maximum(top, 0.0)) * scale
    value[~np.isfinite(squares)] = np.nan
    return np.column_stack((value, np.where(np.isfinite(squares), np.maximum(rank, 1.0), np.nan)))


def measure_effective_rank(x: Tensor, *, host: bool = True) -> tuple[Tensor, Finish] | None:
    """Return the Gram matrices for `effective_rank` [samples, 1]."""
    a = as_matrices(x)
    if a is None or a.shape[1] > MOST_SIDE:
        return None
    a = in_range(a, host=host)[0].to(_wide(a))
    gram = a @ a.mH
    if gram.is_complex():  # use a real matrix with the same eigenvalues, each twice
        real, imag = gram.real, gram.imag
        upper, lower = torch.cat((real, -imag), 2), torch.cat((imag, real), 2)
        return torch.cat((upper, lower), 1).flatten(1), _finish_complex_rank
    return gram.flatten(1), _finish_rank


def _finish_rank(gram: Floats) -> Floats:
    side = int(np.sqrt(gram.shape[1]))
    matrices = gram.reshape(len(gram), side, side)
    finite: NDArray[np.bool_] = np.asarray(np.isfinite(matrices).all((1, 2)))
    squares = np.linalg.eigvalsh(np.where(finite[:, None, None], matrices, 0.0))
    squares[squares < squares[:, -1:] * 1e-16 * side] = 0.0
    values = np.sqrt(squares)
    with np.errstate(all="ignore"):
        p = values / values.sum(1, keepdims=True)
        entropy = -np.sum(np.where(p > 0, p * np.log(p), 0.0), 1)
        rank = np.where(finite & (values[:, -1] > 0), np.exp(entropy), np.nan)
    return rank[:, None]


def _finish_complex_rank(gram: Floats) -> Floats:
    return _finish_rank(gram) / 2
