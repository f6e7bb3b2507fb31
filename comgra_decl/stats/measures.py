r"""Opt-in statistics, computed from the tensor itself instead of its raw sums.

Each is one number per sample. For complex numbers, magnitudes are used, as for all statistics,
except singular values (`spectral`). With the n values x of a sample:

    negative_fraction  share of x < 0, which excludes NaN
    kurtosis           mean((x - mean)^4) / mean((x - mean)^2)^2     3 for a normal distribution,
                       large if there are a few large outliers. NaN if all values are equal, or if
                       any is NaN or infinite
    q01 ... q99        quantiles 0.01 ... 0.99 of x, interpolated linearly as in `numpy.quantile`.
                       If there are more than 4096 values, 4096 evenly spaced ones are used. NaN if
                       any of these is NaN

For a sample without values, all of these statistics are NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from comgra_decl.stats.sampling import sample_stride
from comgra_decl.stats.spectral import Finish, measure_effective_rank, measure_top
from comgra_decl.stats.support import real, work_dtype

SAMPLED = 4096
"""Maximum number of values per sample used for quantiles."""


class Measure(Protocol):
    """Computes some statistics of a tensor; runs within `quiet()`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the statistics."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Finish | None] | None:
        """Measure a tensor.

        Args:
            x: [samples, ...], without gradient, of any dtype that can be reduced; not written to.

        Returns:
            float64 [samples, c] on the tensor's device, newly allocated, and a function that turns
            these into the columns of `names` on the host (None: they already are the columns). None
            if the measure does not apply.
        """


class Simple:
    """A statistic that is a formula over the values of each sample."""

    def __init__(self, name: str, formula: Callable[[Tensor], Tensor]) -> None:
        self.names = (name,)
        self._formula = formula

    def __call__(self, x: Tensor) -> tuple[Tensor, Finish | None] | None:
        """See `Measure`."""
        rows = as_real_rows(x)
        if rows.numel() == 0:
            return None
        return self._formula(rows).to(torch.float64)[:, None], None


def as_real_rows(x: Tensor) -> Tensor:
    """Return [samples, elements] in the precision used for its dtype's statistics."""
    return real(x).flatten(1).to(work_dtype(x.dtype)) if x.dim() > 1 else real(x)[:, None]


def negative_fraction(rows: Tensor) -> Tensor:
    """Return the share of negative numbers [samples]."""
    return (rows < 0).sum(1, dtype=torch.float64) / rows.shape[1]


def kurtosis(rows: Tensor) -> Tensor:
    """Return the kurtosis [samples] in float64; see the module."""
    centred = rows - rows.mean(1, dtype=torch.float64).to(rows.dtype)[:, None]
    # scale by the largest deviation, so that no power overflows or underflows
    squares = (centred / centred.abs().amax(1, keepdim=True)).square_()
    second = squares.mean(1, dtype=torch.float64)
    return squares.square_().mean(1, dtype=torch.float64) / second.square()


class Quantiles:
    """Quantiles of each sample's values, computed with one sort."""

    def __init__(self, quantiles: Mapping[str, float]) -> None:
        self.names = tuple(quantiles)
        self._quantiles = tuple(quantiles.values())

    def __call__(self, x: Tensor) -> tuple[Tensor, Finish | None] | None:
        """See `Measure`."""
        if x.numel() == 0:
            return None
        rows = real(x).flatten(1) if x.dim() > 1 else real(x)[:, None]
        stride, _ = sample_stride(rows.shape[1], rows.shape[1] or 1, SAMPLED)
        ordered = self._sorted(rows[:, ::stride].to(work_dtype(x.dtype))).to(torch.float64)
        last = ordered.shape[1] - 1
        columns = []
        for quantile in self._quantiles:
            place = quantile * last
            low, high = ordered[:, int(place)], ordered[:, min(int(place) + 1, last)]
            share = place - int(place)
            between = low * (1 - share) + high * share if share else low
            columns.append(torch.where(low == high, low, between))
        table = torch.stack(columns, 1)
        return torch.where(ordered[:, -1:].isnan(), torch.nan, table), None

    def _sorted(self, rows: Tensor) -> Tensor:
        if rows.device.type == "cpu":  # several times faster than torch.sort
            return torch.from_numpy(np.sort(rows.numpy(), axis=1))
        return rows.sort(1).values  # also sorts NaN last


class Top:
    """The largest singular value and the stable rank."""

    names = ("singular_value", "stable_rank")

    def __call__(self, x: Tensor) -> tuple[Tensor, Finish | None] | None:
        """See `Measure`."""
        return measure_top(_wide_enough(x), host=x.device.type == "cpu")


class EffectiveRank:
    """The effective rank."""

    names = ("effective_rank",)

    def __call__(self, x: Tensor) -> tuple[Tensor, Finish | None] | None:
        """See `Measure`."""
        return measure_effective_rank(_wide_enough(x), host=x.device.type == "cpu")


def _wide_enough(x: Tensor) -> Tensor:
    """Convert to at least 32 bits, which linear algebra needs."""
    if x.is_complex():
        return x.to(torch.complex64) if x.dtype == torch.complex32 else x
    return x.to(work_dtype(x.dtype))


class FunctionError(Exception):
    """A custom function failed or returned an invalid statistic; the message gives the reason."""


class Function:
    """A custom function, called with a copy; the states of random generators are restored.

    Args:
        name: name of the statistic.
        function: maps [samples, ...] to [samples].
        arguments: passed to it by name.
        whole: whether it returns one number for all samples.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        *,
        whole: bool = False,
    ) -> None:
        self.names = (name,)
        self._function, self._arguments = function, arguments
        self._whole = whole

    def __call__(self, x: Tensor) -> tuple[Tensor, Finish | None] | None:
        """See `Measure`. Raises FunctionError if the function fails."""
        copy = x.clone(memory_format=torch.contiguous_format)
        if copy.dim() == 1:
            copy = copy.unsqueeze(1)
        with _random_numbers_as_they_were(copy.device):
            try:
                answer = self._function(copy, **self._arguments)
            except Exception as error:
                raise FunctionError(f"it raised {type(error).__name__}: {error}") from error
        column = _checked(answer, x, 1 if self._whole else len(x))
        return (column.expand(len(x), 1) if self._whole else column), None


def _checked(answer: Any, x: Tensor, number: int) -> Tensor:
    """Return a function's result as a column float64 [number, 1]."""
    if isinstance(answer, bool | int | float) and number == 1:
        answer = torch.tensor([answer], dtype=torch.float64)
    if not isinstance(answer, Tensor):
        raise FunctionError(
            f"it returned {type(answer).__name__} instead of a tensor of {number} numbers"
        )
    if answer.is_complex() or answer.numel() != number or answer.dim() > 1:
        raise FunctionError(
            f"it returned a tensor of shape {tuple(answer.shape)} and dtype "
            f"{str(answer.dtype).removeprefix('torch.')} instead of {number} numbers, "
            f"for {len(x)} samples"
        )
    return answer.detach().reshape(-1, 1).to(device=x.device, dtype=torch.float64, copy=True)


@contextmanager
def _random_numbers_as_they_were(device: torch.device) -> Iterator[None]:
    """Restore the random generators of Python, numpy, torch and the tensor's device."""
    module: Any = getattr(torch, device.type, None)
    away = device.type != "cpu" and hasattr(module, "get_rng_state")
    python, numpy_, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    there = module.get_rng_state(device) if away else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)
        torch.set_rng_state(host)
        if there is not None:
            module.set_rng_state(there, device)
