"""Convert batches to the dense arrays written by one commit, [records, padded slots, ...]."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import AGGREGATES, StepBatch, StepInfo

from .layout import KPI_CHUNK, MISSING_BITS, SYSTEM_COLUMNS, RecordColumn, round_up
from .logs import Names
from .meta import RunMeta

Families = dict[str, NDArray[Any]]
"""Dense array by family name ("kpi", "agg", "smp", "hist"); the first axis is the record."""

MISSING = np.uint64(MISSING_BITS).view(np.float64)


def stack(
    batches: Sequence[StepBatch],
    shapes: Sequence[NDArray[np.float32]],
    *,
    width: int,
    meta: RunMeta,
) -> Families:
    """Stack the statistics of all batches; NaN (counts: 0) where a batch lacks a slot.

    Args:
        batches: consecutive batches, each with its own slots.
        shapes: shape codes of their slots [slots], if the run stores them.
        width: slot columns, a multiple of the chunk width, so that whole chunks are written.
        meta: run metadata with statistics, samples and bins.

    Returns:
        "agg" [k, width, columns], and "smp" [k, width, samples, statistics] and
        "hist" [k, width, bins] if the run has them.
    """
    shape = (sum(len(batch.steps) for batch in batches), width)
    flat = len(meta.statistics) * len(AGGREGATES)
    families: Families = {"agg": np.full((*shape, len(meta.columns)), np.nan, np.float32)}
    if meta.sample_count:
        inner = (meta.sample_count, len(meta.statistics))
        families["smp"] = np.full((*shape, *inner), np.nan, np.float32)
    if meta.bins:
        families["hist"] = np.zeros((*shape, meta.bins), meta.counts_dtype)
    columns = {name: at for at, name in enumerate(meta.columns)}
    for number, (at, where, batch) in enumerate(_placed(batches)):
        k, n = batch.aggregates.shape[:2]
        families["agg"][at, where, :flat] = batch.aggregates.reshape(k, n, flat)
        if meta.counts_rows and batch.rows is not None:
            families["agg"][at, where, columns["rows"]] = batch.rows
        if meta.tells_shapes:
            families["agg"][at, where, columns["shape"]] = shapes[number]
        if meta.sample_count:
            families["smp"][at, where] = batch.samples
        if meta.bins and batch.counts is not None:
            _check_counts(batch.counts, families["hist"].dtype)
            families["hist"][at, where] = batch.counts
            families["agg"][at, where, -2:] = batch.ranges
    return families


def _check_counts(counts: NDArray[np.uint32], dtype: np.dtype[Any]) -> None:
    highest = counts.max(initial=0)
    assert highest <= np.iinfo(dtype).max, f"a histogram count of {highest} does not fit {dtype}"


def _placed(
    batches: Iterable[StepBatch],
) -> Iterator[tuple[slice, slice | NDArray[np.int32], StepBatch]]:
    """Yield each batch's position: records and slots (a slice if possible, for faster copying)."""
    start = 0
    for batch in batches:
        slots, end = batch.slots, start + len(batch.steps)
        first, count = (int(slots[0]), len(slots)) if len(slots) else (0, 0)
        consecutive = np.array_equal(slots, np.arange(first, first + count))
        yield slice(start, end), slice(first, first + count) if consecutive else slots, batch
        start = end


def record_columns(batches: Sequence[StepBatch], names: Names) -> NDArray[np.float64]:
    """Return the "kpi" family [k, columns]: numeric facts, followed by the KPIs by code.

    KPIs missing from a record are set to `MISSING`. The caller fills the columns WIDTH, FACTS and
    FORM.
    """
    infos = [info for batch in batches for info in batch.steps]
    kpis = [values for batch in batches for values in batch.kpis]
    coded = [dict(zip(names.codes("kpi", values), values.values(), strict=True)) for values in kpis]
    columns = round_up(SYSTEM_COLUMNS + names.size("kpi"), KPI_CHUNK)
    table = np.zeros((len(infos), columns))
    table[:, SYSTEM_COLUMNS:] = MISSING
    _fill_facts(table, infos, names)
    table[:, RecordColumn.KPIS] = columns
    for row, values in zip(table, coded, strict=True):
        for code, value in values.items():
            row[SYSTEM_COLUMNS + code] = value
    return table


def _fill_facts(table: NDArray[np.float64], infos: list[StepInfo], names: Names) -> None:
    table[:, RecordColumn.STEP] = [info.step for info in infos]
    table[:, RecordColumn.TIME] = [info.time for info in infos]
    table[:, RecordColumn.COST] = [info.cost for info in infos]
    table[:, RecordColumn.TYPE] = names.codes("type", (info.type for info in infos))
    table[:, RecordColumn.MODE] = names.codes("mode", (info.mode for info in infos))
    table[:, RecordColumn.STRUCTURE] = [
        -1 if info.structure is None else names.code("structure", info.structure) for info in infos
    ]
    table[:, RecordColumn.TAGS] = [_tags_code(info, names) for info in infos]
    table[:, RecordColumn.BATCH_SIZE] = [
        -1 if info.batch_size is None else info.batch_size for info in infos
    ]


def _tags_code(info: StepInfo, names: Names) -> int:
    tags = info.extra.get("tags")
    return 1 + names.code("tags", json.dumps(list(tags))) if tags else 0


def runs_of(values: Sequence[Any]) -> list[list[Any]]:
    """Run-length encodes values that rarely change, as [[offset of the first, value], ...]."""
    runs: list[list[Any]] = []
    for offset, value in enumerate(values):
        if not runs or runs[-1][1] != value:
            runs.append([offset, value])
    return runs
