"""How long exports take: 160 records of 45 tensors with values, in each format in turn."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from benchmarks.store.data import Numbers, batch, meta
from comgra_decl.export import export_run
from comgra_decl.query import open_run
from comgra_decl.store import RunWriter

RECORDS, SLOTS = 160, 45
SHAPE = (2, 64)
FORMATS = ("csv", "npz", "zarr")
_ROUNDS, _COMMIT = 3, 8


def measure(folder: Path) -> dict[str, float]:
    """Write such a run; return the median seconds of its export for each format."""
    _write(folder / "run")
    run = open_run(folder / "run")
    spent: dict[str, list[float]] = {format_: [] for format_ in FORMATS}
    for number in range(_ROUNDS):
        for format_ in FORMATS:
            start = time.perf_counter()
            export_run(run, folder / f"{format_}-{number}", format_)
            spent[format_].append(time.perf_counter() - start)
    return {format_: float(np.median(seconds)) for format_, seconds in spent.items()}


def _write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = Numbers(SLOTS)
    writer = RunWriter.create(folder, meta())
    for first in range(0, RECORDS, _COMMIT):
        records = batch(numbers, first, _COMMIT)
        records.values = [
            {slot: rng.standard_normal(SHAPE, np.float32) for slot in range(SLOTS)}
            for _ in range(_COMMIT)
        ]
        writer.commit([records])
    writer.close()
