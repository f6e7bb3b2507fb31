"""Measure reading parts of a large tensor: the time, and the bytes read from disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from benchmarks.store.data import Numbers, batch, meta
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.database import new_context

SHAPE = (2500, 4000)
"""1e7 floats, of one sample."""

PARTS: dict[str, Any] = {
    "one row": np.s_[1234],
    "a tenth": np.s_[:250],
    "all of it": ...,
}


def measure(folder: Path) -> dict[str, dict[str, float]]:
    """Write a record with such a tensor; return milliseconds and megabytes read for its parts."""
    rng = np.random.default_rng(0)
    value = rng.standard_normal(SHAPE, np.float32)
    record = batch(Numbers(2), 0, 1)
    record.values = [{0: value[None]}]
    writer = RunWriter.create(folder / "run", meta())
    writer.commit([record])
    writer.close()
    return {name: _read(folder / "run", value, part) for name, part in PARTS.items()}


def _read(run: Path, value: Any, part: Any) -> dict[str, float]:
    """Return the median of five reads, each bypassing all caches of comgra_decl."""
    spent, size = [], 0.0
    for _ in range(5):
        view = Reader(run, context=new_context(cache_bytes=0, copy_threads=2)).view
        before, start = _bytes_read(), time.perf_counter()
        found = view.value(0, 0, 0, part)
        spent.append(1e3 * (time.perf_counter() - start))
        size = (_bytes_read() - before) / 1e6
        assert found is not None
        assert np.array_equal(found, value[part])
    return {"ms": float(np.median(spent)), "megabytes": size}


def _bytes_read() -> int:
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(int(value["value"]) for metric in found for value in metric["values"])
