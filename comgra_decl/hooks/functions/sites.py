"""Determine which modules have their function calls recorded, and the nodes of these calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import nn

from comgra_decl.hooks.module_tree import named_modules
from comgra_decl.hooks.plans import ModulePlan, TopPlan, facts_of
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.spec.calls import CallRule, calls_inside, calls_outside

if TYPE_CHECKING:
    from comgra_decl.spec import Capture, Spec


class Series(Protocol):
    """An object whose tensors are recorded under roles and iterations."""

    node: Callable[[], str]
    capture: Capture

    def slot(self, role: str, iteration: int) -> Slot:
        """Return the slot of a tensor in a given iteration."""


class CallPlan:
    """The calls to one function inside one module, which form a node."""

    def __init__(self, node: Callable[[], str], function: str, capture: Capture) -> None:
        self.node = node
        self.function = function
        self.capture = capture
        self.fired = False
        self.slots: dict[tuple[str, int], Slot] = {}

    def slot(self, role: str, iteration: int, axes: tuple[str, ...] = ()) -> Slot:
        """Return the slot of a tensor in a given iteration.

        Args:
            role: role of the tensor.
            iteration: number of the call in its step.
            axes: names of its value dims, unless the spec declares some.
        """
        slot = self.slots.get((role, iteration))
        if slot is None:
            slot = self.slots[role, iteration] = Slot(
                self.node,
                role,
                iteration=iteration,
                module_class=self.function,
                axes=self.capture.axes or axes,
                image=self.capture.image,
            )
        return slot


class Inside(NamedTuple):
    """What is recorded inside a module: calls by function, and weights of fused attention."""

    calls: dict[str, CallPlan]
    attention: Series | None

    def nested(self, inner: Inside | None) -> Inside:
        """Return what is recorded inside a nested module: this combined with `inner`."""
        if inner is None:
            return self
        return Inside({**self.calls, **inner.calls}, inner.attention or self.attention)


NOTHING = Inside({}, None)


class Sites:
    """Stores what is recorded inside each module.

    Args:
        spec: selects what to capture.
        rules: the functions that the spec selects, under the names by which they are watched.
    """

    def __init__(self, spec: Spec, rules: Iterable[CallRule]) -> None:
        self._spec = spec
        self._rules = list(rules)
        self._labels = {rule.function: rule.function.rpartition(".")[2] for rule in self._rules}
        self._tops: dict[int, tuple[weakref.ref[TopPlan], weakref.ref[nn.Module]]] = {}
        self._sites: dict[int, tuple[weakref.ref[nn.Module], Inside]] = {}
        self.plans: list[CallPlan] = []
        self.outside = Inside(
            {
                function: self._plan(function, capture, lambda f=function: self._labels[f])  # type: ignore[misc]
                for function, capture in calls_outside(spec, self._rules).items()
            },
            None,
        )

    def inside(self, module: nn.Module, tops: Iterable[TopPlan]) -> Inside | None:
        """Return what is recorded inside a module of one of the models, or None if nothing is."""
        for top in tops:
            known = self._tops.get(id(top))
            if known is None or known[0]() is not top or known[1] is not top.top.module:
                self._tops[id(top)] = weakref.ref(top), top.top.module
                self._adopt(top)
        site = self._sites.get(id(module))
        return site[1] if site is not None and site[0]() is module else None

    def _adopt(self, top: TopPlan) -> None:
        """Find the modules in a model in which calls are recorded, at the model's first call."""
        root = top.top.module()
        if root is None:
            return
        named = list(named_modules(root))
        paths = {path for path, _ in named}
        attention = {plan.path: plan for plan in top.modules if _recomputes(plan)}
        for path, module in named:
            captures = calls_inside(self._spec, self._rules, facts_of(path, module))
            calls = {
                function: self._plan(function, capture, self._node(top, path, function, paths))
                for function, capture in captures.items()
            }
            if calls or path in attention:
                inside = Inside(calls, attention.get(path))
                self._sites[id(module)] = (weakref.ref(module), inside)

    def _node(self, plan: TopPlan, path: str, function: str, paths: set[str]) -> Callable[[], str]:
        """Return a function that names calls inside a module; "()" avoids a clash with a child."""
        label = self._labels[function]
        if f"{path}.{label}".lstrip(".") in paths:
            label += "()"
        return lambda: f"{plan.top.node(path)}.{label}"

    def _plan(self, function: str, capture: Capture, node: Callable[[], str]) -> CallPlan:
        plan = CallPlan(node, function, capture)
        self.plans.append(plan)
        return plan

    def of_entry(self, entry: str) -> Iterator[CallPlan]:
        """Yield the plans that an entry of the spec contributes to."""
        return (plan for plan in self.plans if entry in plan.capture.entries)


def _recomputes(plan: ModulePlan) -> bool:
    return plan.capture.attention is not None and plan.capture.attention.recompute
