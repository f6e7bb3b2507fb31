"""Realistic runs without training: a small transformer with random tensors.

Every tensor can be drawn again (`FakeRun.tensor`), so tests can compare the contents of a run with
results of numpy for the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import STATISTICS, SlotInfo, StepBatch, StepInfo, Structure
from comgra_decl.store import RunMeta, RunWriter
from tests.support.fake_model import (
    BATCH,
    DIM,
    facts_of,
    module_documents,
    modules_of,
    report_of,
    slots_of,
    spec_of,
    structures_of,
)
from tests.support.fake_statistics import Reduced, reduce_all, sample_indices

EVAL_EVERY = 10  # training records per evaluation record


class FakeRun:
    """Writes a synthetic run step by step through the real writer."""

    def __init__(
        self,
        path: str | Path,
        *,
        nodes: Sequence[str] | None = None,
        layers: int = 2,
        samples: int = 4,
        bins: int = 32,
        values: bool = True,
        seed: int = 0,
        nonfinite_from: int | None = None,
        start: float | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        """Create the run.

        Args:
            path: folder of the run.
            nodes: keep only these module paths (and input, loss); None keeps all.
            layers: transformer blocks.
            samples: recorded samples per slot.
            bins: histogram bins.
            values: store raw values of module outputs.
            seed: seed of all tensors.
            nonfinite_from: step from which one module's output contains a NaN.
            start: Unix time of the first record; None for a minute ago.
            config: further settings of the program.
        """
        self.path = Path(path)
        self.values = values
        self.seed = seed
        self.nonfinite_from = nonfinite_from
        self.modules = [m for m in modules_of(layers) if nodes is None or m.path in nodes]
        self.slots = slots_of(self.modules)
        self.structures = structures_of(self.modules, self.slots)
        self.meta = RunMeta(
            statistics=STATISTICS,
            sample_count=samples,
            bins=bins,
            spec=spec_of(samples, bins),
            config={"model": {"layers": layers, "dim": DIM}, "optimizer": {"lr": 3e-4}}
            | (config or {}),
            facts=facts_of(),
            started=time.time() - 60 if start is None else start,
        )
        self.writer = RunWriter.create(self.path, self.meta)
        self.step = 0  # the next training step
        self._known: set[int] = set()
        self._stored: set[str] = set()

    def write(self, steps: int = 1, *, commit: int = 8, evals: bool = True) -> None:
        """Append training steps and evaluations after every tenth; `commit` records per commit."""
        wanted: list[tuple[int, str]] = []
        for _ in range(steps):
            wanted.append((self.step, "train"))
            self.step += 1
            if evals and self.step % EVAL_EVERY == 0:
                wanted.append((self.step, "eval"))
        for first in range(0, len(wanted), commit):
            part = wanted[first : first + commit]
            self.writer.commit(self.batches(part))

    def close(self) -> None:
        """Mark the run as finished."""
        self.writer.close()

    def present(self, step: int, kind: str) -> list[SlotInfo]:
        """Return the slots of a record: evaluations lack gradients, the first five steps `aux`."""
        return [
            slot
            for slot in self.slots
            if (kind == "train" or (slot.key.pass_ == "forward" and slot.kind != "parameter"))
            and (slot.key.node != "aux" or step >= 5)
        ]

    def tensor(self, slot: SlotInfo, step: int, kind: str = "train") -> NDArray[np.float32]:
        """Draw a slot's tensor of one record; every call returns the same tensor."""
        rng = np.random.default_rng([self.seed, slot.id, step, kind == "eval"])
        depth = slot.id / max(1, len(self.slots))
        if slot.kind == "loss":
            level = 0.6 + 2.4 * np.exp(-step / 25) + 0.05 * rng.normal()
            return np.array(level + 0.1 * (kind == "eval"), np.float32)
        spread, centre = 0.5 + depth, 0.4 * np.sin(step / 9 + 7 * depth)
        if slot.key.pass_ != "forward":
            spread, centre = 1e-2 * np.exp(-3 * depth - step / 60), 0.0
        elif slot.kind == "parameter":
            fixed = np.random.default_rng([self.seed, slot.id]).normal(size=slot.shape)
            return (0.2 * fixed + 0.002 * step * np.sign(fixed)).astype(np.float32)
        tensor = rng.normal(centre, spread, slot.shape)
        if slot.module_class == "ReLU":
            tensor = np.maximum(tensor, 0)
        if self._broken(slot, step):
            tensor.flat[3] = np.nan
        return tensor.astype(np.float32)

    def _broken(self, slot: SlotInfo, step: int) -> bool:
        late = self.nonfinite_from is not None and step >= self.nonfinite_from
        return late and slot.key.node.endswith("mlp.fc2")

    def batches(self, records: Sequence[tuple[int, str]]) -> list[StepBatch]:
        """Return the batch of each (step, type)."""
        slots = [self.present(step, kind) for step, kind in records]
        tensors = [
            [self.tensor(slot, step, kind) for slot in present]
            for (step, kind), present in zip(records, slots, strict=True)
        ]
        count, bins = self.meta.sample_count, self.meta.bins or 0
        parts = iter(reduce_all([*chain(*tensors)], [*chain(*slots)], count=count, bins=bins))
        return [
            self._batch(step, kind, present, drawn, [*islice(parts, len(present))])
            for (step, kind), present, drawn in zip(records, slots, tensors, strict=True)
        ]

    def _batch(
        self,
        step: int,
        kind: str,
        slots: list[SlotInfo],
        tensors: list[NDArray[np.float32]],
        parts: list[Reduced],
    ) -> StepBatch:
        new = [slot for slot in self.slots if slot.id not in self._known and self._due(slot, slots)]
        structure = self.structures[step >= 5]
        batch = StepBatch(
            steps=[self._info(step, kind, structure)],
            slots=np.array([slot.id for slot in slots], np.int32),
            aggregates=np.stack([part[0] for part in parts])[None],
            samples=np.stack([part[1] for part in parts])[None],
            counts=np.stack([part[2] for part in parts])[None],
            ranges=np.stack([part[3] for part in parts])[None],
            values=[self._values(slots, tensors)],
            kpis=[self._kpis(slots, tensors, step)],
            new_slots=new,
            new_structures=[structure] if structure.hash not in self._stored else [],
            documents=self._documents() if not self._known else {},
        )
        self._known |= {slot.id for slot in new}
        self._stored.add(structure.hash)
        return batch

    def _due(self, slot: SlotInfo, present: list[SlotInfo]) -> bool:
        """Whether to announce a slot: ids are dense, so also if a later slot is present."""
        return slot.id <= max(other.id for other in present)

    def _info(self, step: int, kind: str, structure: Structure) -> StepInfo:
        return StepInfo(
            step=step,
            time=self.meta.started + 0.05 * step,
            type=kind,
            mode=kind,
            structure=structure.hash,
            batch_size=BATCH,
            samples=sample_indices(BATCH, self.meta.sample_count),
            cost=1.5e-3,
        )

    def _values(self, slots: list[SlotInfo], tensors: list[NDArray[Any]]) -> dict[int, Any]:
        if not self.values:
            return {}
        picked = sample_indices(BATCH, self.meta.sample_count)
        return {
            slot.id: tensor[picked]
            for slot, tensor in zip(slots, tensors, strict=True)
            if slot.key.pass_ == "forward" and slot.kind in ("computed", "input")
        }

    def _kpis(
        self, slots: list[SlotInfo], tensors: list[NDArray[Any]], step: int
    ) -> dict[str, float]:
        kpis = {"lr": 3e-4 * min(1.0, (step + 1) / 20)}
        for slot, tensor in zip(slots, tensors, strict=True):
            if slot.kind == "loss":
                kpis["loss"] = float(tensor)
        return kpis

    def _documents(self) -> dict[str, Any]:
        return {"modules": module_documents(self.modules), "report": report_of(self.slots)}


def make_run(
    path: str | Path,
    *,
    nodes: Sequence[str] | None = None,
    steps: int = 40,
    close: bool = True,
    **options: Any,
) -> Path:
    """Write a complete synthetic run and return its folder.

    Args:
        path: folder of the run.
        nodes: keep only these module paths (and input, loss).
        steps: number of training steps; an evaluation record follows every tenth.
        close: whether to mark it as finished; otherwise it is live while this process runs.
        options: further options of `FakeRun`.
    """
    run = FakeRun(path, nodes=nodes, **options)
    run.write(steps)
    if close:
        run.close()
    return run.path
