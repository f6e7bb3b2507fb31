"""Runs to view: a transformer's nodes, slots and graph, with random numbers.

The real writer writes them. The run with pictures is a real training.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import comgra_decl
from benchmarks.nets import Gpt, next_token_loss
from comgra_decl.records import (
    AGGREGATES,
    SAMPLE,
    STATISTICS,
    Axis,
    SlotInfo,
    StepBatch,
    StepInfo,
    StoredPreview,
)
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
_AXES = (
    Axis(SAMPLE, "first", BATCH),
    Axis("channel", "first", 64),
    Axis("height", "mean", 32),
    Axis("width", "mean", 32),
)
_EXTENT = (-3.0, 3.0)  # of every histogram


@dataclass(frozen=True)
class Shape:
    """A run to create: name, transformer blocks, recorded steps, and what it contains.

    With `previews`, each of the last 100 or so records has a preview of every output.
    """

    name: str
    layers: int
    steps: int
    histograms: bool = True
    previews: bool = False


SHAPES = (  # 308 nodes, 1,020 boxes when all scopes are open, 134 slots, and 308 nodes
    Shape("nodes-300", layers=25, steps=1_000),
    Shape("nodes-1000", layers=92, steps=100),
    Shape("steps-100000", layers=2, steps=100_000, histograms=False),
    Shape("previews-300", layers=25, steps=1_000, previews=True),
)
PICTURED = "pictures-300"
EVERY = 25
"""Steps between the records of the probe in the run with pictures."""

_PICTURED_STEPS = 1_000
_PICTURED_SPEC = (
    f"schedule.first={_PICTURED_STEPS}",
    "preview.every=1",
    f"probes.sequences={{samples: {{count: 4}}, schedule: {{every: {EVERY}}}}}",
    f"run={{group: group, name: {PICTURED}}}",
    "rules=off",
)


def made_pictures(folder: Path, *, steps: int = _PICTURED_STEPS) -> Path:
    """Return the root that contains only the run with pictures, recorded if necessary.

    It is a real training of a transformer with 30 blocks, with the preset `language`: a preview of
    every tensor in each of 1,000 records, and all pictures of its probe in every 25th.
    """
    root = folder / PICTURED
    done = root / "done"
    if done.exists():
        return root
    torch.manual_seed(0)
    model = Gpt(tokens=64, width=32, blocks=30, heads=4, context=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with comgra_decl.trace("language", root=root, overrides=_PICTURED_SPEC):
        for _ in range(steps):
            text = torch.randint(0, 64, (8, 17))
            optimizer.zero_grad()
            next_token_loss(model(text[:, :-1]), text[:, 1:]).backward()
            optimizer.step()
    done.touch()
    return root


def made(folder: Path, shape: Shape) -> Path:
    """Return the root that contains only the run of that shape, written if necessary."""
    root = folder / shape.name
    done = root / "done"
    if not done.exists():
        _write(root / "group" / shape.name, shape)
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
        if shape.previews:
            batch.values = [{} for _ in range(count)]
        for info in batch.steps:
            info.structure = structure.hash
            if shape.previews and first + count == shape.steps:
                info.previews = numbers.previews()
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

    def previews(self) -> dict[int, StoredPreview]:
        """Return a preview of 4096 bytes for each output, as if it were larger."""
        draw = self._rng.standard_normal
        return {s.id: StoredPreview(_AXES, draw((1, 16, 8, 8), np.float32)) for s in self._valued}

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
