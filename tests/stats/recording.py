"""Passes tensors through the reducer and `finalise`, as a recorded step would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from comgra_decl.records import STATISTICS, Layout, RawStep, StepBatch, StepInfo
from comgra_decl.stats import Reduced, Reducer, finalise

from .oracle import over_batch, rows_of, statistics_of

Tensors = list[tuple[torch.Tensor, int | None]]


def reducer(**options: Any) -> Reducer:
    """Returns a reducer, without histograms unless the options request them."""
    return Reducer(**({"histogram_elements": None, "sample_count": 4} | options))


def reduce(tensors: Tensors, by: Reducer | None = None) -> Reduced:
    """Returns one step of tensors (each with its batch dim), ready to be read."""
    by = by or reducer()
    for number, (tensor, batch_dim) in enumerate(tensors):
        assert by.add(tensor, batch_dim=batch_dim) == number
    return ready(by.finish())


def ready(reduced: Reduced) -> Reduced:
    """Waits for the contents of a step."""
    if reduced.wait is not None:
        reduced.wait()
    return reduced


def layout_of(reduced: Reduced) -> Layout:
    """Returns a layout with one slot per reduced tensor."""
    number = len(reduced.starts)
    return Layout(
        slots=np.arange(number, dtype=np.int32),
        tensors=np.arange(number),
        starts=reduced.starts,
        rows=reduced.rows,
        samples=reduced.samples,
        elements=reduced.elements,
        batched=reduced.batched,
    )


def raw_step(reduced: Reduced, layout: Layout | None = None, step: int = 0) -> RawStep:
    """Returns the record of a reduced step."""
    return RawStep(
        info=StepInfo(step=step, time=0.0, type="train", mode="train"),
        layout=layout or layout_of(reduced),
        raw=reduced.raw,
        aggregates=reduced.aggregates,
        histogram_values=reduced.histogram_values,
        histogram_starts=reduced.histogram_starts,
        wait=reduced.wait,
    )


def batch_of(reduced: Reduced, *, samples: int = 4, bins: int | None = None) -> StepBatch:
    """Returns what is stored for one step."""
    (batch,) = finalise(
        [raw_step(reduced)],
        statistics=STATISTICS,
        sample_count=samples,
        bins=None if bins is None else (bins, "linear"),
    )
    return batch


@dataclass
class Tolerance:
    """How far statistics may differ from the oracle's."""

    relative: float = 2e-6
    std: float = 1e-5

    def of(self, name: str, rows: NDArray[np.float64]) -> tuple[float, float]:
        """Returns the relative and absolute tolerances for a statistic of these rows."""
        finite = rows[np.isfinite(rows)]
        if name in ("min", "max", "abs_max", "nonfinite") or not finite.size:
            return 1e-7, 0.0
        if name == "std":
            return self.std, self.std * float(finite.std()) + 1e-7 * float(np.abs(finite).max())
        if name == "mean":  # for numbers around zero, it is as exact as they are
            return self.relative, self.relative * float(np.abs(finite).mean())
        return self.relative, 1e-7 if name == "zero_fraction" else 0.0


def check(
    tensors: Tensors, reduced: Reduced | None = None, tolerance: Tolerance | None = None
) -> None:
    """Compares every statistic of every sample, and its aggregates, with the oracle."""
    tolerance = tolerance or Tolerance()
    reduced = reduced or reduce(tensors)
    most = max([int(n) for n in reduced.rows] + [1])
    batch = batch_of(reduced, samples=most)
    for i, (tensor, batch_dim) in enumerate(tensors):
        rows = rows_of(tensor, batch_dim)
        kept = int(reduced.rows[i])  # the others are only aggregated
        assert reduced.samples[i] == rows.shape[0]
        assert reduced.elements[i] == rows.shape[1]
        assert reduced.batched[i] == (batch_dim is not None)
        for s, (name, expected) in enumerate(statistics_of(rows).items()):
            assert name == STATISTICS[s]
            where = f"{name} of tensor {i}, {tuple(tensor.shape)} {tensor.dtype}"
            relative, slack = tolerance.of(name, rows)
            close(batch.samples[0, i, :kept, s], expected[:kept], relative, slack, where)
            assert np.isnan(batch.samples[0, i, kept:]).all()
            if len(rows):
                slack += relative * np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
                aggregates = batch.aggregates[0, i, s]
                close(aggregates, over_batch(expected), relative, slack, f"over batch: {where}")


def close(
    found: NDArray[np.float32],
    expected: NDArray[np.float64],
    relative: float,
    slack: float,
    where: str,
) -> None:
    """Asserts equality, up to rounding where rounding may occur."""
    with np.errstate(over="ignore"):
        expected32 = expected.astype(np.float32)
    np.testing.assert_allclose(found, expected32, rtol=relative, atol=slack, err_msg=where)
