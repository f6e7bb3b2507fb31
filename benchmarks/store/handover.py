"""Measure the cost of handing steps to the writer, for the training and for the writer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.store.data import Numbers, batch, meta
from comgra_decl.records import Layout, RawStep, StepBatch, StepInfo
from comgra_decl.store import Reader, RunWriter, WriterThread

SLOTS = 300


def measure(folder: Path, *, steps: int = 2000, pause: float = 0.005) -> dict[str, Any]:
    """Hand over a step every few milliseconds; return microseconds per `put` and CPU usage."""
    numbers = Numbers(SLOTS)
    errors: list[BaseException] = []
    made = batch(numbers, 0, 128)

    def transform(raws: list[RawStep]) -> list[StepBatch]:
        return [_batch(made, raw.info) for raw in raws]

    thread = WriterThread(
        lambda: RunWriter.create(folder / "run", meta()),
        transform=transform,
        commit_interval=0.5,
        queue_bytes=64 << 20,
        on_error=errors.append,
    )
    spent = []
    for step in range(steps):
        raw = _raw(step)
        start = time.perf_counter()
        thread.put(raw)
        spent.append(1e6 * (time.perf_counter() - start))
        time.sleep(pause)
    thread.close(60)
    assert not errors, errors
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    usage = dict(Reader(folder / "run").head["usage"])
    return {
        "steps": steps,
        "median": float(np.median(spent)),
        "p99": float(np.quantile(spent, 0.99)),
        "files": len(files),
        "bytes_per_step": sum(path.stat().st_size for path in files) / steps,
        "raw_bytes_per_step": made.nbytes / 128,
        "usage": usage,
    }


def _raw(step: int) -> RawStep:
    none = np.zeros(0, np.int64)
    layout = Layout(none.astype(np.int32), none, none, none, none, none, none.astype(bool))
    info = StepInfo(step=step, time=float(step), type="train", mode="train")
    return RawStep(info, layout, np.zeros((SLOTS * 8, 8)))


def _batch(made: StepBatch, info: StepInfo) -> StepBatch:
    at = info.step % 128
    return StepBatch(
        steps=[info],
        slots=made.slots,
        aggregates=made.aggregates[at : at + 1],
        samples=made.samples[at : at + 1],
        counts=None,
        ranges=None,
        values=[{}],
        kpis=[{}],
        new_slots=made.new_slots if info.step == 0 else [],
        new_structures=[],
    )
