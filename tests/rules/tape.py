"""A run made of tensors given in a test, passed to rules in windows of any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import AGGREGATES, LOSS_CALLS, STATISTICS, SlotInfo, SlotKey, Structure
from comgra_decl.rules import Engine, Finding, Numbers, Rule, Window

BINS = 64


def statistics_of(tensor: Any, batch_dim: int | None) -> NDArray[np.float64]:
    """Returns [statistics, 3] of a tensor by plain numpy, including NaN."""
    tensor = np.asarray(tensor, np.float64)
    rows = tensor.reshape(1, -1) if batch_dim is None else tensor.reshape(len(tensor), -1)
    with np.errstate(all="ignore"):
        each = {
            "mean": rows.mean(1),
            "abs_mean": np.abs(rows).mean(1),
            "std": rows.std(1),
            "min": rows.min(1),
            "max": rows.max(1),
            "abs_max": np.abs(rows).max(1),
            "l2": np.sqrt((rows**2).sum(1)),
            "zero_fraction": (rows == 0).mean(1),
            "nonfinite": (~np.isfinite(rows)).sum(1).astype(float),
        }
        found = [(each[n].mean(), each[n].std(), np.abs(each[n]).max()) for n in STATISTICS]
    return np.array(found)


Tensor = int | Sequence[int]
"""What a loss call receives: a slot, whose shape is that of each record; or only a shape."""


@dataclass(frozen=True)
class Compared:
    """A loss call as described by a test; see `records.LOSS_CALLS`."""

    function: str
    prediction: Tensor
    target: Tensor
    made_by: str
    dim: int | None
    arguments: dict[str, Any]


@dataclass
class Tape:
    """Records, metrics and graphs of a run; slots are named by the key they are recorded under."""

    slots: list[SlotInfo] = field(default_factory=list)
    rows: list[dict[int, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    numbers: list[tuple[str, str, int, float]] = field(default_factory=list)
    structure: Structure | None = None
    documents: dict[str, Any] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    statistics: tuple[str, ...] = STATISTICS
    extra: list[dict[int, list[float]]] = field(default_factory=list)
    """Statistics beyond the default ones, by record and slot."""
    facts: list[dict[str, Any]] = field(default_factory=list)
    """Further facts, such as `records.MODES`, by record."""
    calls: list[Compared] = field(default_factory=list)
    """The loss calls in the records that follow."""

    def slot(
        self,
        node: str,
        shape: Sequence[int],
        *,
        role: str = "output",
        pass_: str = "forward",
        kind: str = "computed",
        class_: str = "Linear",
        dtype: str = "float32",
        iteration: int = 0,
    ) -> int:
        """Adds a slot and returns its number; parameters have no batch dimension."""
        batch_dim = None if kind == "parameter" or not len(shape) else 0
        key = SlotKey(node, role, iteration, pass_)
        info = SlotInfo(len(self.slots), key, kind, dtype, tuple(shape), batch_dim, class_)
        self.slots.append(info)
        return info.id

    def loss_call(
        self,
        function: str,
        prediction: Tensor,
        target: Tensor,
        *,
        made_by: str = "",
        dim: int | None = None,
        **arguments: Any,
    ) -> None:
        """Adds a call that compares a prediction with a target to all records that follow."""
        self.calls.append(Compared(function, prediction, target, made_by, dim, arguments))

    def record(
        self,
        tensors: Mapping[int, Any],
        *,
        step: int | None = None,
        mode: str = "train",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds a record with these tensors by slot."""
        self.steps.append(len(self.steps) if step is None else step)
        self.modes.append(mode)
        self.rows.append(dict(tensors))
        calls = [self._facts_of(call, tensors) for call in self.calls]
        self.facts.append({**({LOSS_CALLS: calls} if calls else {}), **(facts or {})})

    def graph(self, edges: Sequence[tuple[int, int]], cut: Sequence[tuple[int, int]] = ()) -> None:
        """Connects slots; those in `cut` carry no gradient."""
        keys, kinds = [s.key for s in self.slots], [s.kind for s in self.slots]
        pairs = [(a, b, True) for a, b in edges] + [(a, b, False) for a, b in cut]
        self.structure = Structure("g", keys, kinds, pairs)

    def losses(self, values: Sequence[float], *, name: str = "loss", type_: str = "train") -> None:
        """Adds a metric for each step."""
        self.numbers += [(name, type_, step, float(v)) for step, v in enumerate(values)]

    def play(self, *rules: Rule, window: int = 7) -> Engine:
        """Passes everything to the rules, `window` records or metrics at a time."""
        engine = Engine(list(rules), self.statistics)
        engine.add_slots(self.slots)
        if self.structure is not None:
            engine.add_structure(self.structure)
        for name, document in self.documents.items():
            engine.add_document(name, document)
        for first in range(0, len(self.rows), window):
            engine.look(self._window(engine, slice(first, first + window)))
        for name, type_ in dict.fromkeys((n, t) for n, t, _, _ in self.numbers):
            said = [(s, v) for n, t, s, v in self.numbers if (n, t) == (name, type_)]
            for first in range(0, len(said), window):
                steps, values = zip(*said[first : first + window], strict=True)
                engine.look_at_numbers(Numbers(name, type_, np.array(steps), np.array(values)))
        return engine

    def _facts_of(self, call: Compared, tensors: Mapping[int, Any]) -> dict[str, Any]:
        origin = {"made_by": call.made_by} if call.made_by else {}
        dim = {} if call.dim is None else {"dim": call.dim}
        return {
            "function": call.function,
            "arguments": call.arguments,
            "prediction": {**self._form(call.prediction, tensors), **origin, **dim},
            "target": self._form(call.target, tensors),
        }

    def _form(self, tensor: Tensor, tensors: Mapping[int, Any]) -> dict[str, Any]:
        if not isinstance(tensor, int):
            return {"shape": [*tensor], "dtype": "float32", "slot": None}
        info = self.slots[tensor]
        shape = np.shape(tensors[tensor]) if tensor in tensors else info.shape
        number = info.key.iteration if info.key.node in ("prediction", "target") else None
        return {"shape": [*shape], "dtype": info.dtype, "slot": number}

    def findings(self, rule: Rule, *, window: int = 7) -> list[Finding]:
        """Returns the findings of one rule; no rule may fail silently."""
        engine = self.play(rule, window=window)
        found = engine.findings()
        assert not [u for u in engine.unchecked() if u.reason.startswith("it failed")], (
            engine.unchecked()
        )
        return found

    def _window(self, engine: Engine, part: slice) -> Window:
        rows = self.rows[part]
        usual, many = len(STATISTICS), len(self.statistics)
        table = np.full((len(rows), len(self.slots), many, len(AGGREGATES)), np.nan)
        for i, tensors in enumerate(rows):
            for slot, tensor in tensors.items():
                table[i, slot, :usual] = statistics_of(tensor, self.slots[slot].batch_dim)
        for i, extra in enumerate(self.extra[part]):
            for slot, values in extra.items():
                table[i, slot, usual:, 0] = values
        known: dict[tuple[int, ...], int] = {}
        codes = np.full(table.shape[:2], np.nan, np.float32)
        for i, tensors in enumerate(rows):
            for slot, tensor in tensors.items():
                shape = np.shape(tensor)
                own = shape == self.slots[slot].shape
                codes[i, slot] = 0 if own else 1 + known.setdefault(shape, len(known))
        return Window(
            table=engine.scene.table,
            statistics=self.statistics,
            first=part.start,
            steps=np.array(self.steps[part]),
            types=list(self.modes[part]),
            train=np.array([mode == "train" for mode in self.modes[part]]),
            aggregates=table.astype(np.float32),
            details=_Details(self, rows),
            structures=[self.structure.hash if self.structure else None] * len(rows),
            histograms=True,
            skipped=np.isin(self.steps[part], [*self.skipped]),
            shape_codes=codes,
            shapes=list(known),
            facts=self.facts[part],
        )


@dataclass
class _Details:
    tape: Tape
    rows: list[dict[int, Any]]

    def histograms(self, slot: int) -> tuple[NDArray[Any], NDArray[Any]]:
        counts, ranges = np.zeros((len(self.rows), BINS), int), np.full((len(self.rows), 2), np.nan)
        for i, tensors in enumerate(self.rows):
            if slot in tensors:
                counts[i], edges = np.histogram(tensors[slot], BINS)
                ranges[i] = edges[0], edges[-1]
        return counts, ranges

    def samples(self, slot: int) -> NDArray[Any]:
        size = max(len(row[slot]) if slot in row else 0 for row in self.rows)
        found = np.full((len(self.rows), size, len(STATISTICS)), np.nan)
        for i, tensors in enumerate(self.rows):
            for j, sample in enumerate(tensors.get(slot, [])):
                found[i, j] = statistics_of(np.asarray(sample)[None], 0)[:, 0]
        return found

    def values(self, row: int, slot: int) -> Any:
        return self.rows[row].get(slot)
