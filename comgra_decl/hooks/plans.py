"""What is to be captured of each selected module, and the slots it has filled so far."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import nn

from comgra_decl.hooks.slots import Slot
from comgra_decl.hooks.tree import Top, named_modules
from comgra_decl.spec import Capture, ModuleFacts, Selection, Spec, select

if TYPE_CHECKING:
    import torch


class ModulePlan:
    """One selected module: its capture options, its call counter, its slots."""

    __slots__ = (
        "__weakref__",
        "can_fire",
        "capture",
        "fired",
        "module",
        "module_class",
        "node",
        "path",
        "slots",
    )

    def __init__(self, top: Top, path: str, module: nn.Module, capture: Capture) -> None:
        self.path = path
        self.node: Callable[[], str] = lambda: top.node(path)
        self.module = weakref.ref(module)
        self.module_class = type(module).__name__
        self.capture = capture
        # ModuleList and its kin have no forward: nothing to wait for
        has_forward = type(module).forward is not nn.Module.forward
        self.can_fire = has_forward and (capture.output or capture.output_grad)
        self.fired = False
        self.slots: dict[tuple[str, int], Slot] = {}

    def slot(self, role: str, iteration: int) -> Slot:
        """Returns the slot of an output at the `iteration`-th call of this step."""
        slot = self.slots.get((role, iteration))
        if slot is None:
            slot = self.slots[role, iteration] = Slot(
                self.node, role, iteration=iteration, module_class=self.module_class
            )
        return slot


class ParameterPlan:
    """One parameter of a selected module; a tied parameter has one plan with all its names."""

    __slots__ = ("attribute", "capture", "module", "names", "slot")

    def __init__(self, plan: ModulePlan, attribute: str, names: Callable[[], tuple[str, ...]]):
        self.module = plan.module
        self.attribute = attribute
        self.capture = plan.capture
        self.slot = Slot(
            plan.node,
            attribute,
            kind="parameter",
            module_class=plan.module_class,
            names=names,
        )

    @property
    def parameter(self) -> torch.Tensor | None:
        """The parameter as the module holds it now."""
        module = self.module()
        return None if module is None else module._parameters.get(self.attribute)


class TopPlan:
    """Everything planned for one top: selection, module plans, parameter plans."""

    def __init__(self, spec: Spec, top: Top, module: nn.Module) -> None:
        self.top = top
        self.parameter_ids = {id(parameter) for parameter in module.parameters()}
        named = list(named_modules(module))
        self.selection: Selection = select(spec, (_facts(path, m) for path, m in named))
        planned = [
            (m, ModulePlan(top, path, m, self.selection.captures[path]))
            for path, m in named
            if path in self.selection.captures
        ]
        self.modules = [plan for _, plan in planned]  # plans hold modules weakly: none is kept
        self.parameters = list(_plan_parameters(planned))


def _plan_parameters(planned: Iterable[tuple[nn.Module, ModulePlan]]) -> Iterable[ParameterPlan]:
    names: dict[int, list[str]] = {}
    for module, plan in planned:
        if not (plan.capture.parameter or plan.capture.parameter_grad):
            continue
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{plan.path}.{attribute}".lstrip(".")
            if id(parameter) in names:
                names[id(parameter)].append(name)
            else:
                shared = names[id(parameter)] = [name]
                yield ParameterPlan(plan, attribute, lambda shared=shared: tuple(shared))  # type: ignore[misc]


def _facts(path: str, module: nn.Module) -> ModuleFacts:
    return ModuleFacts(path, tuple(cls.__name__ for cls in type(module).__mro__))
