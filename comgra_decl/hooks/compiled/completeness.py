"""Find tensors that the previous eager record contains but a record of compiled code lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from comgra_decl.records import PREDICTION

if TYPE_CHECKING:
    from comgra_decl.hooks.plans import TopPlan
    from comgra_decl.hooks.tensors.slots import Slot

_SHOWN = 3


class Completeness:
    """Compares records of compiled code with the last eager record.

    Compiled code may hide inputs and outputs of modules, and their gradients. Parameters, their
    gradients and their updates are not read from compiled code. If they are missing, the program
    itself left them out, for example because a scaler skipped a step. The same applies to modules
    that were not called, which can be recognised because none of their parameters has a gradient.
    """

    def __init__(self) -> None:
        self._expected: dict[int, Slot] | None = None  # slots of the last eager record, by id
        self._learning: list[bool] = []  # whether each parameter required a gradient at that time
        self.doubted: set[int] = set()  # slots missing since that record
        self._named: set[str] = set()  # all names ever reported as missing

    def holds_for(self, tops: Iterable[TopPlan]) -> bool:
        """Whether an eager record of the models in their current state exists.

        A layer that was frozen since that record receives no gradient; this is not an omission.
        """
        return self._expected is not None and self._learning == _learning(tops)

    def recorded_eagerly(self, slots: Iterable[Slot], tops: Iterable[TopPlan]) -> bool:
        """Store an eager record; return whether it has what the last compiled record lacked."""
        # compiled code shows targets, but not what a loss compares them with
        self._expected = {slot.id: slot for slot in slots if slot.node() != PREDICTION}
        self._learning = _learning(tops)
        doubted, self.doubted = self.doubted, set()
        return not doubted.isdisjoint(self._expected)

    def lacking(self, slots: Iterable[Slot], tops: Iterable[TopPlan]) -> str:
        """Describe the tensors that compiled code newly lacks; return "" if there are none."""
        found = {slot.id for slot in slots}
        expected = self._expected or {}
        missing = {id_: slot for id_, slot in expected.items() if id_ not in found}
        for slot in _left_out(tops, found) if missing else ():
            missing.pop(slot.id, None)
        self.doubted = set(missing)
        self._expected = {id_: slot for id_, slot in expected.items() if id_ not in missing}
        names = [_name(slot) for slot in missing.values()]
        if self._named.issuperset(names):
            return ""
        self._named.update(names)
        return f"for example {', '.join(names[:_SHOWN])}; {len(names)} in all"


def _learning(tops: Iterable[TopPlan]) -> list[bool]:
    return [parameter.requires_grad for top in tops for parameter in _parameters(top)]


def _parameters(top: TopPlan) -> Iterator[torch.Tensor]:
    for part in top.parts:
        module = part.module()
        if module is not None:
            held = module._parameters.values()  # takes a tenth as long as `parameters()`
            yield from (parameter for parameter in held if parameter is not None)


def _left_out(tops: Iterable[TopPlan], found: set[int]) -> Iterator[Slot]:
    """Yield the series that the program itself, not compiled code, leaves out of this step.

    Args:
        tops: the models.
        found: ids of the series in this step's record.
    """
    shown = {top for top in tops if not found.isdisjoint(slot.id for slot in _of_modules(top))}
    for top in tops:
        for held in (*top.parameters, *top.buffers):
            for slot in (held.slot, *held.states.values()):
                yield from (slot, *slot.passes.values())
        if top.top.module() is None or (shown and top not in shown):  # another model was called
            yield from _of_modules(top)
            continue
        if not any(parameter.grad is not None for parameter in _parameters(top)):
            continue  # gradients were cleared before the step ended, so this proves nothing
        modules = {part.path: part.module() for part in top.parts}
        for plan in top.modules:
            if not _was_used(plan.path, modules):
                for slot in plan.slots.values():
                    yield from (slot, *slot.passes.values())


def _of_modules(top: TopPlan) -> Iterator[Slot]:
    for plan in top.modules:
        for slot in plan.slots.values():
            yield from (slot, *slot.passes.values())


def _was_used(path: str, modules: dict[str, nn.Module | None]) -> bool:
    """Whether a module, or the module that contains it, has a parameter with a gradient."""
    module = modules.get(path)
    learning = [p for p in module.parameters() if p.requires_grad] if module is not None else []
    if learning or not path:
        return any(parameter.grad is not None for parameter in learning)
    return _was_used(path.rpartition(".")[0], modules)


def _name(slot: Slot) -> str:
    pass_ = "" if slot.pass_ == "forward" else f" ({slot.pass_})"
    return f"{slot.node()} {slot.role}{pass_}"
