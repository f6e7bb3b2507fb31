"""Compute the opt-in statistics of the spec, for the slots to which they apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from comgra_decl.spec.globs import matches
from comgra_decl.spec.stats import MATRIX, FunctionStatistic, OptIn, QuantileStatistic
from comgra_decl.stats.extra import Extras
from comgra_decl.stats.measures import (
    EffectiveRank,
    Function,
    FunctionError,
    Measure,
    Quantiles,
    Simple,
    Top,
    kurtosis,
    negative_fraction,
)

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from comgra_decl.hooks.tensors.slots import Slot
    from comgra_decl.stats import Reduced

Refuse = Callable[[str, str], object]
"""Called with the name of a statistic that cannot be recorded, and the reason."""


@dataclass(frozen=True, eq=False, slots=True)
class _Rule:
    """One computation, and the slots to which it applies."""

    measure: Measure
    wanted: tuple[str, ...]  # the requested names among `measure.names`
    on: tuple[str, ...] | None  # captures; None for all
    nodes: tuple[str, ...]

    def applies(self, slot: Slot) -> bool:
        if self.on is not None and captured(slot) not in self.on:
            return False
        if "**" in self.nodes:
            return True
        node = slot.node()
        return any(matches(pattern, node) for pattern in self.nodes)


def captured(slot: Slot) -> str:
    """Return the kind of a slot's content, in the terms used by the spec's `capture`."""
    gradient = slot.pass_.startswith("grad")
    if slot.pass_.startswith("update"):
        return "update"
    if slot.kind == "parameter":
        if gradient:
            return f"parameter_grad{'_raw' * slot.pass_.startswith('grad:raw')}"
        return "parameter"
    if slot.kind == "buffer":
        return "optimizer_state" if "." in slot.role else "buffer"
    return f"{'input' if slot.role.startswith('input') else 'output'}{'_grad' * gradient}"


class Measured:
    """Computes opt-in statistics of the tensors in a step.

    Args:
        statistics: those of the spec, in stored order.
        refuse: called once for a statistic that cannot be computed somewhere.
        complete: whether a step contains everything that is recorded. If so, a statistic that
            matches nothing in the first step is a mistake.
    """

    def __init__(self, statistics: list[OptIn], *, refuse: Refuse, complete: bool) -> None:
        self._refuse = refuse
        self._extras = Extras(statistic.name for statistic in statistics)
        self._rules = _rules(statistics, refuse)
        self._rules_of: dict[int, tuple[_Rule, ...]] = {}  # by slot id
        self._refused: set[str] = set()
        self._found: set[str] | None = set() if complete else None

    def clear(self) -> None:
        """Prepare for the next step."""
        self._extras.clear()

    def add(self, index: int, slot: Slot, tensor: torch.Tensor, batch_dim: int | None) -> None:
        """Measure the tensor with the reducer's index `index`."""
        rules = self._rules_of.get(slot.id)
        if rules is None:
            rules = tuple(rule for rule in self._rules if rule.applies(slot))
            if slot.id >= 0:  # the node's name is final
                self._rules_of[slot.id] = rules
        for rule in rules:
            try:
                applied = self._extras.add(index, tensor, batch_dim, rule.measure)
            except (FunctionError, RuntimeError, np.linalg.LinAlgError) as error:
                self._failed(rule, slot, error)
            else:
                if applied and self._found is not None:
                    self._found.update(rule.wanted)

    def finish(self, reduced: Reduced) -> tuple[NDArray[np.float64], Callable[[], None]]:
        """End the step; see `Extras.finish`."""
        if self._found is not None:
            self._report_unmatched(self._found)
            self._found = None
        return self._extras.finish(reduced.starts, reduced.rows, reduced.aggregates)

    def _failed(self, rule: _Rule, slot: Slot, error: Exception) -> None:
        if slot.id >= 0:  # do not try again there
            self._rules_of[slot.id] = tuple(r for r in self._rules_of[slot.id] if r is not rule)
        for name in rule.wanted:
            if self._found is not None:
                self._found.add(name)
            if name not in self._refused:
                self._refused.add(name)
                self._refuse(f"the statistic {name!r} of {slot.node()} {slot.role}", str(error))

    def _report_unmatched(self, found: set[str]) -> None:
        for rule in self._rules:
            for name in rule.wanted:
                if name not in found:
                    of = "anything" if rule.on is None else " or ".join(rule.on)
                    self._refuse(
                        f"the statistic {name!r}",
                        "the first record contains no tensor to compute it from; it needs "
                        f"{of} in nodes {', '.join(rule.nodes)}",
                    )


def _rules(statistics: list[OptIn], refuse: Refuse) -> list[_Rule]:
    """Group the statistics into rules, one for each combination of computation and slots."""
    groups: dict[Any, list[OptIn]] = {}
    for statistic in statistics:
        place = (tuple(statistic.nodes), _on(statistic))
        groups.setdefault((_work(statistic), *place), []).append(statistic)
    rules = []
    for (_, nodes, on), members in groups.items():
        measure = _measure(members, refuse)
        if measure is not None:
            rules.append(_Rule(measure, tuple(m.name for m in members), on, nodes))
    return rules


def _on(statistic: OptIn) -> tuple[str, ...] | None:
    if statistic.on is not None:
        return tuple(statistic.on)
    return ("parameter",) if statistic.name in MATRIX else None


def _work(statistic: OptIn) -> str:
    if _quantile(statistic) is not None:
        return "quantiles"
    return "top" if statistic.name in Top.names else statistic.name


def _quantile(statistic: OptIn) -> float | None:
    if isinstance(statistic, QuantileStatistic):
        return statistic.quantile
    name = statistic.name
    return int(name[1:]) / 100 if name[0] == "q" and name[1:].isdecimal() else None


def _measure(members: list[OptIn], refuse: Refuse) -> Measure | None:
    first = members[0]
    if isinstance(first, FunctionStatistic):
        return _imported(first, refuse)
    work = _work(first)
    if work == "quantiles":
        return Quantiles({m.name: q for m in members if (q := _quantile(m)) is not None})
    return _BUILT_IN[work]()


_BUILT_IN: dict[str, Callable[[], Measure]] = {
    "top": Top,
    "effective_rank": EffectiveRank,
    "negative_fraction": lambda: Simple("negative_fraction", negative_fraction),
    "kurtosis": lambda: Simple("kurtosis", kurtosis),
}


def _imported(statistic: FunctionStatistic, refuse: Refuse) -> Measure | None:
    module, _, name = statistic.target.rpartition(".")
    try:
        function = getattr(import_module(module), name)
    except Exception as error:
        refuse(
            f"the statistic {statistic.name!r}",
            f"{statistic.target} cannot be imported: {type(error).__name__}: {error}",
        )
        return None
    arguments = dict(statistic.model_extra or {})
    return Function(statistic.name, function, arguments, whole=statistic.per == "batch")
