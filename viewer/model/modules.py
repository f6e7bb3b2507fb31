"""The module tree, with the contents of each module and the extent to which it is trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from comgra_decl.viewer.model.runview import Rows, RunView
from comgra_decl.viewer.model.selection import Selection

Key = tuple[int, str]
"""Key of a module: number of its root module, path below it."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the module itself; `tied_to` is the node with which it is shared."""

    name: str
    shape: tuple[int, ...]
    count: int
    trainable: bool
    tied_to: str | None


@dataclass(slots=True)
class Module:
    """A line of the tree. Counts include submodules, and count tied parameters once.

    `node` is None if nothing was recorded for the module. `share` is the module's fraction of the
    squared norm of all changes to the model. `ratio` is the norm of the module's change divided by
    the norm of its weights. Both are None if the record does not contain them.
    """

    key: Key
    label: str
    module_class: str
    depth: int
    parameters: tuple[Parameter, ...]
    node: str | None
    parent: Key | None
    children: list[Key] = field(default_factory=list)
    count: int = 0
    trainable: int = 0
    output: tuple[int, ...] | None = None
    share: float | None = None
    ratio: float | None = None

    @property
    def frozen(self) -> str:
        """Return "frozen", "partly frozen", or "" if all parameters are trained."""
        if not self.count or self.trainable == self.count:
            return ""
        return "partly frozen" if self.trainable else "frozen"


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """All modules, parents before children.

    `measure` names the quantity to which `share` refers.
    """

    modules: Mapping[Key, Module]
    measure: str | None

    def visible(self, opened: Iterable[Key]) -> list[Module]:
        """Return the visible lines if the modules in `opened` are expanded."""
        wanted, shown = set(opened), set[Key]()
        lines = []
        for key, module in self.modules.items():
            if module.parent is None or (module.parent in wanted and module.parent in shown):
                shown.add(key)
                lines.append(module)
        return lines

    def unfolded(self, most: int) -> frozenset[Key]:
        """Return the modules to expand so that about `most` lines are visible."""
        opened: set[Key] = set()
        for depth in range(max((m.depth for m in self.modules.values()), default=0)):
            within = sum(module.depth <= depth + 1 for module in self.modules.values())
            if within > most:
                break
            opened |= {k for k, m in self.modules.items() if m.depth == depth and m.children}
        return frozenset(opened)

    def above(self, node: str) -> frozenset[Key]:
        """Return the modules to expand so that a node's line is visible."""
        found = next((m for m in self.modules.values() if m.node == node), None)
        keys: set[Key] = set()
        while found is not None and found.parent is not None:
            keys.add(found.parent)
            found = self.modules[found.parent]
        return frozenset(keys)


def module_tree(view: RunView, at: Selection) -> ModuleTree:
    """Return the run's modules and their parameter changes at the selected step."""
    modules = _nested(view, at)
    measure = None
    if at.step is not None:
        measure = _weigh(view, modules, view.row(at.step, at.type, "mean"), at)
    return ModuleTree(modules, measure)


def _nested(view: RunView, at: Selection) -> dict[Key, Module]:
    modules: dict[Key, Module] = {}
    top = -1
    nodes = set(view.nodes)
    for described in view.run.modules:
        path = str(described.get("path", ""))
        top += not path or top < 0
        parent = _parent(modules, top, path)
        module = _module(described, (top, path), parent, modules, nodes)
        if module.node is not None:
            module.output = _output(view, module.node, at)
        modules[module.key] = module
        if parent is not None:
            modules[parent].children.append(module.key)
    _count(modules)
    return modules


def _parent(modules: Mapping[Key, Module], top: int, path: str) -> Key | None:
    """Return the innermost displayed module that contains a path. Containers are not displayed."""
    while path:
        path = path.rpartition(".")[0]
        if (top, path) in modules:
            return top, path
    return None


def _module(
    described: Mapping[str, Any],
    key: Key,
    parent: Key | None,
    modules: Mapping[Key, Module],
    nodes: set[str],
) -> Module:
    node = str(described.get("node", ""))
    kind = str(described.get("class", ""))
    above = "" if parent is None else parent[1]
    label = key[1][len(above) + 1 :] if above else key[1]
    parameters = (described.get("parameters") or {}).items()
    return Module(
        key,
        label or kind,
        kind,
        depth=0 if parent is None else modules[parent].depth + 1,
        parameters=tuple(_parameter(name, facts) for name, facts in parameters),
        node=node if node in nodes else None,
        parent=parent,
    )


def _parameter(name: str, facts: Mapping[str, Any]) -> Parameter:
    return Parameter(
        name,
        tuple(facts.get("shape", ())),
        int(facts.get("count", 0)),
        bool(facts.get("trainable", True)),
        facts.get("tied_to") or None,
    )


def _output(view: RunView, node: str, at: Selection) -> tuple[int, ...] | None:
    slot = view.lead(node)
    return view.shape(slot, at) if slot.kind not in ("parameter", "buffer") else None


def _count(modules: Mapping[Key, Module]) -> None:
    for module in reversed(list(modules.values())):
        own = [p for p in module.parameters if p.tied_to is None]
        module.count += sum(p.count for p in own)
        module.trainable += sum(p.count for p in own if p.trainable)
        if module.parent is not None:
            modules[module.parent].count += module.count
            modules[module.parent].trainable += module.trainable


def _weigh(view: RunView, modules: Mapping[Key, Module], row: Rows, at: Selection) -> str | None:
    """Fill in shares and ratios. Returns the measured quantity, or None if none was recorded."""
    if "l2" not in view.run.statistics:
        return None
    lengths = row.column("l2")
    changes: dict[str, dict[Key, float]] = {"update": {}, at.gradient: {}}
    weights: dict[Key, float] = {}
    for key, module in modules.items():
        for parameter in module.parameters:
            if parameter.tied_to is not None or module.node is None:
                continue
            passes = view.passes(module.node, parameter.name, 0)
            for name, known in (*changes.items(), ("forward", weights)):
                length = lengths.get(passes[name].id, math.nan) if name in passes else math.nan
                if not math.isnan(length):
                    known[key] = known.get(key, 0.0) + length * length
    measure = next((name for name, known in changes.items() if known), None)
    if measure is not None:
        _share(modules, changes[measure], weights)
    return measure


def _share(
    modules: Mapping[Key, Module], changes: Mapping[Key, float], weights: Mapping[Key, float]
) -> None:
    sums = {key: [changes.get(key), weights.get(key)] for key in modules}
    for key in reversed(list(modules)):
        parent = modules[key].parent
        if parent is not None:
            sums[parent] = [_plus(a, b) for a, b in zip(sums[parent], sums[key], strict=True)]
    total = sum(changes.values())
    for key, (change, weight) in sums.items():
        if change is not None:
            modules[key].share = change / total if total else math.nan
            if weight:
                modules[key].ratio = math.sqrt(change / weight)


def _plus(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else a + b
