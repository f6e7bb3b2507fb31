"""Hooks without a store: the records of a traced program, kept in a list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.hooks import HookManager
from comgra_decl.records import Raw, RawStep, SlotInfo, SlotKey, Structure
from comgra_decl.spec import load_spec

EVERYTHING = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": ["output", "output_grad", "parameter", "parameter_grad"],
            "values": True,
        }
    },
    "schedule": {"first": 1_000_000},
}


class Recording:
    """The records of one traced program."""

    def __init__(self) -> None:
        self.steps: list[RawStep] = []
        self.faults: list[BaseException] = []

    @property
    def slots(self) -> dict[SlotKey, SlotInfo]:
        return {info.key: info for step in self.steps for info in step.new_slots}

    @property
    def structures(self) -> list[Structure]:
        return [step.structure for step in self.steps if step.structure is not None]

    @property
    def report(self) -> dict[str, Any]:
        return [s.documents["report"] for s in self.steps if "report" in s.documents][-1]

    def of(self, type_: str) -> list[RawStep]:
        return [step for step in self.steps if step.info.type == type_]

    def nodes(self, step: int = 0) -> set[str]:
        ids = set(self.steps[step].layout.slots.tolist())
        return {key.node for key, info in self.slots.items() if info.id in ids}

    def has(self, node: str, role: str = "output", **where: Any) -> bool:
        return self._position(node, role, **where) is not None

    def rows(self, node: str, role: str = "output", **where: Any) -> NDArray[np.float64]:
        """Return the raw rows of one slot in one record: one row per sample."""
        step = self.steps[where.get("step", 0)]
        if step.wait is not None:  # normally done by the writer thread
            step.wait()
            step.wait = None
        position = self._position(node, role, **where)
        assert position is not None, f"no {node} {role} {where} in {sorted(self.slots)}"
        tensor = step.layout.tensors[position]
        start = step.layout.starts[tensor]
        return step.raw[start : start + step.layout.samples[tensor]]

    def total(self, node: str, role: str = "output", **where: Any) -> float:
        """Return the sum over all elements of one slot in one record."""
        step = self.steps[where.get("step", 0)]
        rows = self.rows(node, role, **where)
        position = self._position(node, role, **where)
        elements = step.layout.elements[step.layout.tensors[position]]
        return float((rows[:, Raw.SUM] + rows[:, Raw.PIVOT] * elements).sum())

    def value(self, node: str, role: str = "output", **where: Any) -> NDArray[Any]:
        step = self.steps[where.pop("step", 0)]
        key = SlotKey(node, role, where.get("iteration", 0), where.get("pass_", "forward"))
        return step.values[self.slots[key].id]

    def _position(self, node: str, role: str, **where: Any) -> int | None:
        key = SlotKey(node, role, where.get("iteration", 0), where.get("pass_", "forward"))
        info = self.slots.get(key)
        found = self.steps[where.get("step", 0)].layout.slots == (-1 if info is None else info.id)
        return int(np.flatnonzero(found)[0]) if found.any() else None

    def edges(self, structure: int = 0) -> set[tuple[str, str]]:
        """Return the node-level edges of one structure; parameters appear as node.role."""
        graph = self.structures[structure]
        names = [
            f"{k.node}.{k.role}" if kind == "parameter" else k.node
            for k, kind in zip(graph.keys, graph.kinds, strict=True)
        ]
        return {(names[s], names[t]) for s, t, _ in graph.edges if names[s] != names[t]}


@contextmanager
def recording(spec: Mapping[str, Any] = EVERYTHING, **changes: Any) -> Iterator[Recording]:
    """Trace the block; `changes` replace top-level keys of the spec."""
    result = Recording()
    manager = HookManager(
        load_spec({**spec, **changes}), result.steps.append, on_fault=result.faults.append
    )
    manager.attach()
    try:
        yield result
    finally:
        manager.detach()


def contents(traced: Recording, number: int) -> dict[Any, Any]:
    """Return the raw rows and values of all slots of one record, as bytes by slot key."""
    step = traced.steps[number]
    names = {info.id: key for key, info in traced.slots.items()}
    if step.wait is not None:
        step.wait()
        step.wait = None
    found = {}
    for slot, tensor in zip(step.layout.slots.tolist(), step.layout.tensors, strict=True):
        start = step.layout.starts[tensor]
        rows = step.raw[start : start + step.layout.samples[tensor]]
        value = step.values.get(slot)
        found[names[slot]] = rows.tobytes(), None if value is None else value.tobytes()
    return found
