"""Runs to view: a transformer's nodes, slots and graph, with random numbers.

The real writer writes them, without raw tensors, which no pane shows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.viewer import trained
from comgra_decl.records import AGGREGATES, STATISTICS, SlotInfo, StepBatch, StepInfo
from comgra_decl.store import RunMeta, RunWriter
from tests.support.fake_model import (
    BATCH,
    facts_of,
    module_documents,
    modules_of,
    report_of,
    slots_of,
    spec_of,
    structures_of,
)

SAMPLES, BINS = 4, 32
_COMMIT = 128  # records
_EXTENT = (-3.0, 3.0)  # of every histogram


@dataclass(frozen=True)
class Shape:
    """A run to create: name, transformer blocks, recorded steps, and whether it has histograms."""

    name: str
    layers: int
    steps: int
    histograms: bool = True


SHAPES = (
    Shape("nodes-300", layers=25, steps=1_000),
    Shape("nodes-1000", layers=92, steps=100),
    Shape("steps-100000", layers=2, steps=100_000, histograms=False),
    Shape("pictures", layers=0, steps=0),
)
"""The shapes: 308 nodes, 1,020 boxes when all scopes are open, 134 slots; the last one is not
synthetic, see `trained`."""


def made(folder: Path, shape: Shape) -> Path:
    """Return the root that contains only the run of that shape, written if necessary."""
    root = folder / shape.name
    done = root / "done"
    if not done.exists():
        if shape.layers:
            _write(root / "group" / shape.name, shape)
        else:
            trained.write(root / "group")
        done.touch()
    return root


def _write(path: Path, shape: Shape) -> None:
    modules = modules_of(shape.layers)
    slots = slots_of(modules)
    bins = BINS if shape.histograms else None
    meta = RunMeta(
        statistics=STATISTICS,
        sample_count=SAMPLES,
        bins=bins,
        spec=spec_of(SAMPLES, BINS),
        config={"layers": shape.layers},
        facts=facts_of(),
        started=time.time() - shape.steps,
    )
    writer = RunWriter.create(path, meta)
    structure = structures_of(modules, slots)[1]
    numbers = _Numbers(slots)
    for first in range(0, shape.steps, _COMMIT):
        count = min(_COMMIT, shape.steps - first)
        batch = numbers.batch(first, count, started=meta.started, histograms=bins is not None)
        for info in batch.steps:
            info.structure = structure.hash
        if first == 0:
            batch.new_slots, batch.new_structures = slots, [structure]
            batch.documents = {"modules": module_documents(modules), "report": report_of(slots)}
        writer.commit([batch])
    writer.close()


class _Numbers:
    """Statistics with individual levels, a slow drift, and noise."""

    def __init__(self, slots: list[SlotInfo]) -> None:
        self._rng = np.random.default_rng(0)
        self._slots = slots
        width = len(AGGREGATES) + SAMPLES
        shape = (len(slots), len(STATISTICS), width)
        self._level = self._rng.lognormal(-2, 2, shape).astype(np.float32)
        self._valued = [s for s in slots if s.key.pass_ == "forward" and s.kind == "computed"]

    def batch(self, first: int, count: int, *, started: float, histograms: bool) -> StepBatch:
        """Return `count` records from step `first` on."""
        noise = self._rng.standard_normal((count, *self._level.shape), np.float32)
        drift = 1 + np.sin(np.arange(first, first + count, dtype=np.float32) / 40) / 4
        numbers = self._level * (drift[:, None, None, None] + noise / 20)
        numbers[:, :, STATISTICS.index("nonfinite")] = 0
        split, slots = len(AGGREGATES), len(self._slots)
        counts = ranges = None
        if histograms:
            counts = self._rng.poisson(40, (count, slots, BINS)).astype(np.uint32)
            ranges = np.tile(np.array(_EXTENT, np.float32), (count, slots, 1))
        return StepBatch(
            steps=[_info(first + i, started) for i in range(count)],
            slots=np.arange(slots, dtype=np.int32),
            aggregates=np.ascontiguousarray(numbers[..., :split]),
            samples=np.ascontiguousarray(numbers[..., split:].transpose(0, 1, 3, 2)),
            counts=counts,
            ranges=ranges,
            values=[self._values() if histograms else {} for _ in range(count)],
            kpis=[{"loss": 3 / (1 + (first + i) / 100)} for i in range(count)],
            new_slots=[],
            new_structures=[],
        )

    def _values(self) -> dict[int, NDArray[Any]]:
        draw = self._rng.standard_normal
        return {s.id: draw((SAMPLES, *s.shape[1:]), np.float32) for s in self._valued}


def _info(step: int, started: float) -> StepInfo:
    return StepInfo(
        step=step,
        time=started + step,
        type="train",
        mode="train",
        batch_size=BATCH,
        samples=list(range(SAMPLES)),
    )
