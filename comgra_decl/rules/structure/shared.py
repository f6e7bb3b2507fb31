"""One module that is used as several."""

from __future__ import annotations

import re

import numpy as np

from comgra_decl.rules.api import Finding, Patient, Rule, Scene, SlotTable, Window, per_run

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NAMES = ("mean", "std", "l2", "min", "max")


class SharedModule(Rule):
    """List entries that are the same module and compute the same values."""

    name = "shared_module"
    certainty = 0.75
    definition = (
        "The parameters of a module have several names that differ only in one number, as those of "
        "`[layer] * 4`, so several entries of a list are the same object. In `patience` "
        "consecutive records, its calls in a step return tensors with exactly the same statistics, "
        "although these vary between records. Layers that are shared on purpose receive different "
        "inputs."
    )
    source = "The list `[x] * n` contains the same object n times. Own definition."
    advice = (
        "Create each entry: `nn.ModuleList(nn.Linear(h, 1) for _ in range(4))`, or copy.deepcopy."
    )
    Parameters = Patient

    _same: dict[str, int] = per_run(dict)  # records in a row, by node
    _first: dict[str, int] = per_run(dict)
    _other: set[str] = per_run(set)  # nodes whose calls differed
    _names: dict[str, int] = per_run(dict)

    def look(self, window: Window) -> None:
        """Compares the calls of each shared module."""
        table = window.table
        numbered = table.remembered(_shared, _shared)
        names = [name for name in _NAMES if window.has(name)]
        for node, (count, slots) in numbered.items():
            if node in self._other or not names:
                continue
            self._names[node] = count
            at = np.array(slots)
            there = window.present[:, at].all(1)
            values = np.stack([window.read(name, at) for name in names], -1)
            alike = (values == values[:, :1]).all((1, 2))
            for step, seen, same in zip(
                window.steps.tolist(), there.tolist(), alike.tolist(), strict=True
            ):
                if not seen:
                    continue
                if not same:
                    self._other.add(node)
                    break
                self._same[node] = self._same.get(node, 0) + 1
                self._first.setdefault(node, step)

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding about the first such module."""
        for node, records in self._same.items():
            if node in self._other or records < self.parameters.patience:
                continue
            place = scene.table.place(_shared(scene.table)[node][1][0])
            return [
                self.finding(
                    scene,
                    place=place,
                    first_step=self._first[node],
                    message=f"{self._names[node]} entries of a list are the same module, {node}: "
                    "they share their parameters and return identical values in every step.",
                    evidence={"entries": self._names[node], "records": records},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        return None if scene.records else "it needs training records"


def _shared(table: SlotTable) -> dict[str, tuple[int, list[int]]]:
    """Returns the number of entries and the outputs of modules that a list holds several times."""
    entries: dict[str, int] = {}
    for info in table.infos:
        if info.kind == "parameter" and len(info.names) > 1:
            rest = {_NUMBER.sub("#", name) for name in info.names}
            if len(rest) == 1 and any(_NUMBER.search(name) for name in info.names):
                entries[info.key.node] = len(info.names)
    found: dict[str, tuple[int, list[int]]] = {}
    for node, count in entries.items():
        at = [
            info.id
            for info in table.infos
            if (info.key.node, info.key.role, info.key.pass_) == (node, "output", "forward")
        ]
        if len(at) > 1:
            found[node] = count, at
    return found
