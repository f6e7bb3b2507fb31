"""One module that is used as if it were several."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import Finding, Patient, Rule, Scene, SlotTable, Window, per_run

_NAMES = ("mean", "std", "l2", "min", "max")


class SharedModule(Rule):
    """Entries of a list that are the same module and compute the same values."""

    name = "shared_module"
    certainty = 0.75
    definition = (
        "An entry of a ModuleList or ModuleDict is called several times in a step, and in "
        "`patience` records, all of its calls return tensors with exactly the same statistics. "
        "The calls then have the same input, as if the entry were several modules: the list "
        "contains the same object more than once, as `[layer] * 4` does. Layers that are shared on "
        "purpose receive different inputs."
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
    _known: tuple[SlotTable, dict[str, list[int]]] | None = None

    def look(self, window: Window) -> None:
        """Compares the calls of each module in a list."""
        if self._known is None or self._known[0] is not window.table:
            self._known = window.table, _calls(self.scene, window.table)
        names = [name for name in _NAMES if window.has(name)]
        for node, slots in self._known[1].items() if names else ():
            if node in self._other:
                continue
            at = np.array(slots)
            there = window.present[:, at]
            values = np.stack([window.read(name, at) for name in names], -1)
            first = values[:, :1]
            alike = ((values == first).all(-1) | ~there).all(1)
            several = there.sum(1) > 1
            if (several & ~alike).any():
                self._other.add(node)
                continue
            for step in window.steps[several].tolist():
                self._same[node] = self._same.get(node, 0) + 1
                self._first.setdefault(node, step)

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding about the first such module."""
        for node, records in self._same.items():
            if node in self._other or records < self.parameters.patience:
                continue
            calls = _calls(scene, scene.table)[node]
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
        """Returns why the rule could not check the run."""
        return None if scene.records else "it needs training records"


def _calls(scene: Scene, table: SlotTable) -> dict[str, list[int]]:
    """Returns the outputs of all calls of each module in a list that is called several times."""
    modules = scene.documents.get("modules") or []
    classes = {str(m["path"]): str(m["class"]) for m in modules}
    listed = {
        str(m["node"])
        for m in modules
        if classes.get(str(m["path"]).rpartition(".")[0]) in ("ModuleList", "ModuleDict")
    }
    found: dict[str, list[int]] = {}
    for info in table.infos:
        if info.key.node in listed and (info.key.role, info.key.pass_) == ("output", "forward"):
            found.setdefault(info.key.node, []).append(info.id)
    return {node: at for node, at in found.items() if len(at) > 1}
