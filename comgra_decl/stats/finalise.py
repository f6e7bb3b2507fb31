"""Turn raw sums of recorded steps into stored records; runs on the writer thread.

The writer thread shares the interpreter with the training code, so it must run very little Python
per step. Consecutive steps with the same layout therefore share one set of array operations.
"""

from __future__ import annotations

from itertools import groupby
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from comgra_decl.bins import Spacing
from comgra_decl.records import AGGREGATES, RAW_STATISTICS, Layout, RawStep, StepBatch
from comgra_decl.stats.histogram import Counter
from comgra_decl.stats.statistics import FORMULAS, Floats, aggregate, row_statistics

_ELEMENTS = 1 << 17  # rows times statistics per pass, so that intermediate arrays stay in the cache


def finalise(
    steps: list[RawStep],
    *,
    statistics: tuple[str, ...],
    sample_count: int,
    bins: tuple[int, Spacing] | None,
    extra: tuple[str, ...] = (),
) -> list[StepBatch]:
    """Return the batches to store, one for each series of steps with the same layout object.

    Waits for pending results from the training thread or a device.

    Args:
        steps: in the order they were recorded.
        statistics: names in stored order: those with a formula (module `statistics`), then `extra`.
        sample_count: number of samples recorded individually, which are the first in the batch. A
            tensor without a batch dimension is a single sample 0.
        bins: histogram bins and their spacing, or None for no histograms.
        extra: names of the columns of `RawStep.extra`; NaN for steps without them.
    """
    batches = []
    for (layout, _), group in groupby(steps, key=_form):
        members = list(group)
        for step in members:
            if step.wait is not None:
                step.wait()
                step.wait = None
        batches.append(_batch(layout, members, (statistics, extra), sample_count, bins))
    return batches


def _form(step: RawStep) -> tuple[Layout, bool]:
    return step.layout, step.histogram_values is not None


def _batch(
    layout: Layout,
    steps: list[RawStep],
    names: tuple[tuple[str, ...], tuple[str, ...]],
    sample_count: int,
    bins: tuple[int, Spacing] | None,
) -> StepBatch:
    plan = _plan(layout)
    chosen = _chosen(steps, sample_count)
    aggregates, samples = plan.reduce(steps, names, sample_count, chosen)
    counts, ranges = plan.count(steps, bins)
    return StepBatch(
        steps=[s.info for s in steps],
        slots=layout.slots,
        aggregates=aggregates,
        samples=samples,
        counts=counts,
        ranges=ranges,
        values=[s.values for s in steps],
        kpis=[s.kpis for s in steps],
        new_slots=[slot for s in steps for slot in s.new_slots],
        new_structures=[s.structure for s in steps if s.structure is not None],
        documents={name: doc for s in steps for name, doc in s.documents.items()},
        rows=layout.samples[layout.tensors],
        shapes=layout.shapes,
    )


def _chosen(steps: list[RawStep], count: int) -> NDArray[np.int64] | None:
    """Return the chosen indices [k, count], -1 for none; None if no samples were chosen."""
    if not count or all(step.chosen is None for step in steps):
        return None
    places = np.tile(np.arange(count), (len(steps), 1))
    for i, step in enumerate(steps):
        if step.chosen is not None:
            places[i] = -1
            places[i, : len(step.chosen)] = step.chosen
    return places


class _Plan:
    """Precomputed data of a layout, shared by all steps with this layout."""

    def __init__(self, layout: Layout) -> None:
        starts, rows = layout.starts, layout.rows
        self.tensors = layout.tensors
        self._starts, self._rows, self._batched = starts, rows, layout.batched
        self.rows = int((starts + rows).max(initial=0))
        filled = np.flatnonzero(rows)
        self._order = filled[np.argsort(starts[filled], kind="stable")]
        first = starts[self._order]
        bounds = np.stack((first, first + rows[self._order]), -1).ravel()
        self._bounds = bounds[:-1] if len(bounds) and bounds[-1] == self.rows else bounds
        self._owner = np.zeros(self.rows, np.intp)
        self._elements = np.ones(self.rows)
        for i, tensor in enumerate(self._order):
            span = slice(starts[tensor], starts[tensor] + rows[tensor])
            self._owner[span] = i
            self._elements[span] = layout.elements[tensor]
        self._counters: dict[tuple[int, Spacing], tuple[NDArray[np.int64], Counter]] = {}

    def reduce(
        self,
        steps: list[RawStep],
        names: tuple[tuple[str, ...], tuple[str, ...]],
        sample_count: int,
        chosen: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return aggregates [k, n, statistics, 3] and samples [k, n, sample_count, statistics].

        `names` are the statistics and the columns of `RawStep.extra`. `chosen` [k, sample_count]
        are indices in the batch, -1 for none; None: the first ones.
        """
        k, n, count = len(steps), len(self.tensors), len(names[0])
        aggregates = np.full((k, n, count, len(AGGREGATES)), np.nan, np.float32)
        samples = np.full((k, n, sample_count, count), np.nan, np.float32)
        size = max(1, _ELEMENTS // max(1, self.rows * count))
        with np.errstate(over="ignore"):  # see the statistics module
            for start in range(0, k, size):
                span = slice(start, start + size)
                some = None if chosen is None else chosen[span]
                table = self._table(steps[span], *names)
                self._reduce(table, names[0], aggregates[span], samples[span], some)
            for found, step in zip(aggregates, steps, strict=True):
                for tensor, of_all in step.aggregates.items():
                    found[self.tensors == tensor] = _of(of_all, *names)
        return aggregates, samples

    def _table(
        self, steps: list[RawStep], names: tuple[str, ...], extra: tuple[str, ...]
    ) -> Floats:
        """Return the statistics of all samples, of shape [statistics, k, rows]."""
        raw = np.empty((RAW_STATISTICS, len(steps), self.rows))
        for i, step in enumerate(steps):
            raw[:, i] = step.raw[: self.rows].T
        columns = [extra.index(name) for name in names if name in extra]
        if not columns:
            return row_statistics(raw, self._elements, names)
        more = np.full((len(columns), len(steps), self.rows), np.nan)
        for i, step in enumerate(steps):
            if step.extra is not None:
                more[:, i] = step.extra[: self.rows, columns].T
        with_formula = names[: len(names) - len(columns)]
        return np.concatenate((row_statistics(raw, self._elements, with_formula), more))

    def _reduce(
        self,
        table: Floats,
        names: tuple[str, ...],
        aggregates: NDArray[np.float32],
        samples: NDArray[np.float32],
        chosen: NDArray[np.int64] | None,
    ) -> None:
        tensors = np.full((len(AGGREGATES), *table.shape[:2], len(self._rows)), np.nan)
        for i, name in enumerate(names):
            if name == "nonfinite":
                tensors[:, i] = 0.0
        if len(self._order):
            tensors[..., self._order] = aggregate(table, self._bounds, self._owner)
        aggregates[...] = tensors.take(self.tensors, axis=-1).transpose(2, 3, 1, 0)
        if chosen is not None:
            self._pick(table, samples, chosen)
            return
        has, row = self._sample_rows(samples.shape[2])
        if has.any():
            picked = table.take(row, axis=-1).transpose(1, 2, 3, 0)
            np.copyto(samples, picked, where=has[None, :, :, None], casting="same_kind")

    def _sample_rows(self, count: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return which samples have a row, and its index (0 if none), both [n, count]."""
        number = np.arange(count)
        has = number < self._rows[self.tensors, None]
        return has, np.where(has, self._starts[self.tensors, None] + number, 0)

    def _pick(self, table: Floats, samples: NDArray[np.float32], chosen: NDArray[np.int64]) -> None:
        """Fill in the chosen samples; a tensor without a batch dim is a single sample 0."""
        batched, rows = self._batched[self.tensors, None], self._rows[self.tensors, None]
        for i, places in enumerate(chosen):
            number = np.where(batched, places, np.arange(len(places)))
            has = (number >= 0) & (number < rows)
            row = np.where(has, self._starts[self.tensors, None] + number, 0)
            picked = table[:, i].take(row, axis=-1).transpose(1, 2, 0)
            np.copyto(samples[i], picked, where=has[..., None], casting="same_kind")

    def count(
        self, steps: list[RawStep], bins: tuple[int, Spacing] | None
    ) -> tuple[NDArray[np.uint32] | None, NDArray[np.float32] | None]:
        """Return counts [k, n, bins] and ranges [k, n, 2]; None without histograms."""
        starts = steps[0].histogram_starts
        values = [s.histogram_values for s in steps if s.histogram_values is not None]
        if bins is None or starts is None or not values:
            return None, None
        known, counter = self._counters.get(bins, (None, None))
        if counter is None or known is not starts:
            counter = Counter(starts, *bins)
            self._counters[bins] = starts, counter
        counts, ranges = counter(values)
        return counts.take(self.tensors, axis=1), ranges.take(self.tensors, axis=1)


def _of(aggregates: Floats, names: tuple[str, ...], extra: tuple[str, ...]) -> Floats:
    """Return the aggregates of the named statistics: formulas first, then measures."""
    places = {name: i for i, name in enumerate((*FORMULAS, *extra))}
    found = np.full((len(places), len(AGGREGATES)), np.nan)
    found[: len(aggregates)] = aggregates
    return found[[places[name] for name in names]]


_plans: WeakKeyDictionary[Layout, _Plan] = WeakKeyDictionary()


def _plan(layout: Layout) -> _Plan:
    plan = _plans.get(layout)
    if plan is None:
        plan = _plans[layout] = _Plan(layout)
    return plan
