"""One module that is used as if it were several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from comgra_decl.rules.api import Finding, Patient, Rule, Scene, SlotTable, Window, per_run

_NAMES = ("mean", "std", "l2", "min", "max")


class _Entry(NamedTuple):
    outputs: list[int]  # slots of its outputs, one per call
    container: list[int]  # slots of the outputs of the module that contains the list


class SharedModule(Rule):
    """Entries of a list that are the same module and compute the same values."""

    name = "shared_module"
    certainty = 0.75
    definition = (
        "An entry of a ModuleList or ModuleDict is called several times while the module that "
        "contains the list is called once, and in `patience` records, all of these calls return "
        "tensors with exactly the same statistics. The calls then have the same input, as if the "
        "entry were several modules: the list contains the same object more than once, as "
        "`[layer] * 4` does. Layers that are shared on purpose receive different inputs."
    )
    source = "In Python, the list `[x] * n` contains the same object n times. Our own definition."
    advice = (
        "Create each entry separately: `nn.ModuleList(nn.Linear(h, 1) for _ in range(4))`, or use "
        "copy.deepcopy."
    )
    Parameters = Patient

    _same: dict[str, int] = per_run(dict)  # number of records, by node
    _first: dict[str, int] = per_run(dict)
    _other: set[str] = per_run(set)  # nodes whose calls differed
    _known: tuple[SlotTable, dict[str, _Entry]] | None = None

    def look(self, window: Window) -> None:
        """Compare the calls of each module in a list."""
        if self._known is None or self._known[0] is not window.table:
            self._known = window.table, _calls(self.scene, window.table)
        names = [name for name in _NAMES if window.has(name)]
        for node, entry in self._known[1].items() if names else ():
            if node in self._other:
                continue
            at = np.array(entry.outputs)
            there = window.present[:, at]
            calls = there.sum(1)
            contained = window.present[:, np.array(entry.container, np.int64)].sum(1).clip(1)
            several = np.flatnonzero((calls > contained) & (calls % contained == 0))
            if not len(several):
                continue
            values = np.stack([window.read(name, at) for name in names], -1)
            for row in several.tolist():
                groups = values[row][there[row]].reshape(int(contained[row]), -1, len(names))
                if not (groups == groups[:, :1]).all():
                    self._other.add(node)
                    break
                self._same[node] = self._same.get(node, 0) + 1
                self._first.setdefault(node, int(window.steps[row]))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such module."""
        for node, records in self._same.items():
            if node in self._other or records < self.parameters.patience:
                continue
            calls = _calls(scene, scene.table)[node].outputs
            return [
                self.finding(
                    scene,
                    place=scene.table.place(calls[0]),
                    first_step=self._first[node],
                    message=f"{node} is called {len(calls)} times per step and returns the same "
                    "values each time: several entries of its list are the same module, and share "
                    "their parameters.",
                    evidence={"calls": len(calls), "records": records},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if scene.records else "it needs training records"


def _calls(scene: Scene, table: SlotTable) -> dict[str, _Entry]:
    """Return the entries of lists that are called several times, by node."""
    outputs: dict[str, list[int]] = {}  # one per call
    called: set[tuple[str, int]] = set()
    for info in table.infos:
        node, role, iteration, pass_ = info.key
        if not role.startswith("output") or pass_ != "forward":
            continue
        if (node, iteration) not in called:
            called.add((node, iteration))
            outputs.setdefault(node, []).append(info.id)
    found: dict[str, _Entry] = {}
    by_path: dict[str, Mapping[str, Any]] = {}  # of one model, which comes before its modules
    for module in scene.documents.get("modules") or []:
        path, node = str(module["path"]), str(module["node"])
        if not path:
            by_path = {}
        by_path[path] = module
        above = path.rpartition(".")[0]
        is_entry = by_path.get(above, {}).get("class") in ("ModuleList", "ModuleDict")
        if not path or not is_entry or len(outputs.get(node, ())) < 2:
            continue
        while above and str(by_path[above]["node"]) not in outputs:
            above = above.rpartition(".")[0]
        container = str(by_path[above]["node"]) if above in by_path else ""
        found[node] = _Entry(outputs[node], outputs.get(container, []))
    return found
