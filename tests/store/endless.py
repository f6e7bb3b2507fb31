"""Writes an endless run, each of whose numbers follows from its record, until it is killed.

`python -m tests.store.endless FOLDER` prints the number of acknowledged records after each commit.
With `--merging`, it merges four files at a time, after every commit.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import StepBatch, StepInfo
from comgra_decl.store import RunWriter, merging
from comgra_decl.store.layout import RecordColumn
from comgra_decl.store.view import View
from tests.store.truth import meta_of, slot_info

SLOTS = 40


def numbers(first: int, count: int, *shape: int) -> NDArray[np.float32]:
    """Returns numbers [count, *shape] that encode record and position."""
    size = int(np.prod(shape))
    records = np.arange(first, first + count)[:, None]
    return ((records * 31 + np.arange(size)) % 65_521).astype(np.float32).reshape(count, *shape)


def batch_of(first: int, count: int) -> StepBatch:
    """Creates the records [first, first + count)."""
    infos = [
        StepInfo(step=first + i, time=float(first + i), type="train", mode="train", samples=[i])
        for i in range(count)
    ]
    return StepBatch(
        steps=infos,
        slots=np.arange(SLOTS, dtype=np.int32),
        aggregates=numbers(first, count, SLOTS, 3, 3),
        samples=numbers(first, count, SLOTS, 2, 3),
        counts=numbers(first, count, SLOTS, 4).astype(np.uint32),
        ranges=numbers(first, count, SLOTS, 2),
        rows=np.arange(SLOTS),
        values=[{0: numbers(first + i, 1, 2, 50)[0]} for i in range(count)],
        kpis=[{"loss": float(first + i)} for i in range(count)],
        new_slots=[slot_info(number) for number in range(SLOTS)] if first == 0 else [],
        new_structures=[],
    )


def check(view: View, first: int = 0) -> None:
    """Compares all records from `first` on with their expected values, bit for bit."""
    if not view.n:
        return
    count = view.n - first
    expected = numbers(first, count, SLOTS, 3, 3).reshape(count, SLOTS, 9)
    rows = np.broadcast_to(np.arange(SLOTS)[:, None], (count, SLOTS, 1))
    ranges = numbers(first, count, SLOTS, 2)
    heat = view.heat("agg")
    assert np.array_equal(heat[first:], np.concatenate([expected, rows, 0 * rows, ranges], 2))
    assert np.array_equal(view.heat("smp")[first:], numbers(first, count, SLOTS, 2, 3))
    assert np.array_equal(view.heat("hist")[first:], numbers(first, count, SLOTS, 4))
    steps = view.records[first:, RecordColumn.STEP]
    assert np.array_equal(steps, np.arange(first, view.n))
    for record in {first, view.n - 1, *range(first, view.n, 37)}:
        value = view.value(record, 0)
        assert value is not None
        assert np.array_equal(value, numbers(record, 1, 2, 50)[0])
        assert np.array_equal(view.row("agg", record, slice(0, SLOTS)), heat[record])


MANY = 2000  # records; checkers of all of them must be able to keep up


def main(folder: Path, *, merges: bool = False) -> None:
    """Commits groups of growing and shrinking size until killed."""
    merging.FAN = 4
    writer = RunWriter.create(folder, meta_of())
    first = turn = 0
    while True:
        count = (1, 3, 1, 140, 17)[turn % 5]
        writer.commit([batch_of(first, count)])
        first, turn = first + count, turn + 1
        sys.stdout.write(f"{first}\n")
        sys.stdout.flush()
        while merges and writer.merge_files(wait=True):
            pass
        if first > MANY:
            time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), merges="--merging" in sys.argv)
