"""Capture plans for the selected modules, parameters and buffers, with the slots they fill."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from comgra_decl.annotations import Mark
from comgra_decl.hooks.module_tree import Top, named_modules
from comgra_decl.hooks.tensors.recorder import Wanted
from comgra_decl.hooks.tensors.shards import class_of
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.spec import Capture, ModuleFacts, Selection, Spec, select

if TYPE_CHECKING:
    import torch

    from comgra_decl.hooks.hand_updates import Written


class ModulePlan:
    """The plan for one selected module: its capture options and its slots."""

    __slots__ = (
        "__weakref__",
        "can_fire",
        "capture",
        "fired",
        "inputs",
        "kind",
        "module",
        "module_class",
        "node",
        "outputs",
        "path",
        "reads_inputs",
        "role",
        "slots",
    )

    def __init__(self, top: Top, path: str, module: nn.Module, capture: Capture) -> None:
        self.path = path
        self.node: Callable[[], str] = lambda: top.node(path)
        self.module = weakref.ref(module)
        self.module_class = class_of(module).__name__
        self.capture = capture
        self.outputs = Wanted(capture.output, capture.output_grad)
        self.inputs = Wanted(capture.input, capture.input_grad)
        self.reads_inputs = capture.input or capture.input_grad
        mark = mark_of(module)
        self.role = (mark and mark.role) or "output"
        self.kind = (mark and mark.kind) or "computed"
        # ModuleList and similar containers have no forward, so no call is expected. Looked up
        # statically because the descriptor of a scripted class raises an error.
        has_forward = inspect.getattr_static(type(module), "forward") is not nn.Module.forward
        self.can_fire = has_forward and (
            capture.output or capture.output_grad or capture.input or capture.input_grad
        )
        self.fired = False
        self.slots: dict[tuple[str, int], Slot] = {}

    def slot(self, role: str, iteration: int) -> Slot:
        """Return the slot of an output or input in an iteration of this step."""
        slot = self.slots.get((role, iteration))
        if slot is None:
            slot = self.slots[role, iteration] = Slot(
                self.node,
                role,
                iteration=iteration,
                kind=self.kind,
                module_class=self.module_class,
                axes=self.capture.axes,
                image=self.capture.image,
            )
        return slot


class TensorPlan:
    """The plan for one parameter or buffer; a shared one has a single plan with all its names.

    Attributes:
        slot: its slot in the `forward` pass; the other passes (`grad`, `update`) belong to it.
        states: the slots of its optimizer state (such as `exp_avg`), by name and iteration.
        look: a snapshot from the last record if no optimizer holds the tensor, otherwise None.
        moved: whether it was written to between the last two records.
        trainable: whether it received, or could have received, a gradient in the last record; None
            before the first.
    """

    __slots__ = (
        "attribute",
        "capture",
        "is_buffer",
        "look",
        "module",
        "moved",
        "slot",
        "states",
        "trainable",
    )

    def __init__(
        self, plan: ModulePlan, attribute: str, kind: str, names: Callable[[], tuple[str, ...]]
    ) -> None:
        self.module = plan.module
        self.attribute = attribute
        self.capture = plan.capture
        self.is_buffer = kind == "buffer"
        self.slot = Slot(
            plan.node, attribute, kind=kind, module_class=plan.module_class, names=names
        )
        self.states: dict[tuple[str, int], Slot] = {}
        self.look: Written | None = None
        self.moved = False
        self.trainable: bool | None = None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The parameter or buffer that the module currently holds; None if it holds none."""
        module = self.module()
        if module is None:
            return None
        held = module._buffers if self.is_buffer else module._parameters
        try:
            return held[self.attribute]
        except KeyError:  # in a scripted module, `held` is not a dict and has no `get`
            return None

    def state(self, name: str, iteration: int) -> Slot:
        """Return the slot of one optimizer state tensor of this parameter."""
        slot = self.states.get((name, iteration))
        if slot is None:
            slot = self.states[name, iteration] = Slot(
                self.slot.node,
                f"{self.attribute}.{name}",
                iteration=iteration,
                kind="buffer",
                module_class=self.slot.module_class,
                names=lambda: tuple(f"{n}.{name}" for n in self.slot.names()),
            )
        return slot


class Part(NamedTuple):
    """One module of a model, selected or not; it may no longer exist."""

    path: str
    class_name: str
    module: weakref.ref[nn.Module]


class TopPlan:
    """The plan for one outermost module: its selection, and plans for its modules and tensors."""

    def __init__(self, spec: Spec, top: Top) -> None:
        self._spec = spec
        self._tree: list[tuple[str, int, tuple[str, ...]]] = []
        self.top = top
        self.version = -1  # of `Owners` when the plan was last renewed
        self._parameter: weakref.ref[torch.Tensor] | None = None  # the first of the model
        self.selection: Selection = select(spec, ())
        self.parts: list[Part] = []
        self.modules: list[ModulePlan] = []  # plans refer to modules weakly
        self.parameters: list[TensorPlan] = []
        self.buffers: list[TensorPlan] = []
        # All earlier plans by name, so that a module or tensor that reappears continues its series.
        self._known_modules: dict[str, ModulePlan] = {}
        self._known_tensors: dict[str, TensorPlan] = {}

    def holds_part_of(self, module: nn.Module) -> bool:
        """Return whether a module holds the first parameter of this one, which no longer exists."""
        first = self._parameter() if self._parameter is not None else None
        return first is not None and any(first is other for other in module.parameters())

    def become(self, module: nn.Module) -> None:
        """Continue the same series with another module of the class after the first one is gone."""
        self.top.become(module)
        self.version = -1
        self._tree = []

    def renew(self, module: nn.Module) -> bool:
        """Update the plan to the current modules in the model; return whether anything changed.

        A module that replaces another one continues its series.
        """
        named = list(named_modules(module))
        tree = [(path, id(m), tuple(_held(m))) for path, m in named]
        if tree == self._tree:
            return False
        self._tree = tree
        self.parts = [Part(path, class_of(m).__name__, weakref.ref(m)) for path, m in named]
        self.top.look(module)
        first = next(module.parameters(), None)
        self._parameter = None if first is None else weakref.ref(first)
        self.top.marks = _names_from_marks(named)
        self.selection = select(self._spec, (facts_of(path, m) for path, m in named))
        planned = [
            (m, self._plan(path, m, self._known_modules.get(path)))
            for path, m in named
            if path in self.selection.captures
        ]
        self.modules = [plan for _, plan in planned]
        self._known_modules.update((plan.path, plan) for plan in self.modules)
        of_parameters = ((m._parameters, p) for m, p in planned if _of_parameters(p))
        of_buffers = ((m._buffers, p) for m, p in planned if p.capture.buffer)
        known = self._known_tensors
        self.parameters = _going_on(known, _plan_tensors("parameter", of_parameters))
        self.buffers = _going_on(known, _plan_tensors("buffer", of_buffers))
        return True

    def _plan(self, path: str, module: nn.Module, before: ModulePlan | None) -> ModulePlan:
        if before is not None and before.module() is module:
            return before
        plan = ModulePlan(self.top, path, module, self.selection.captures[path])
        if before is not None:
            plan.slots = before.slots
        return plan


def _going_on(known: dict[str, TensorPlan], plans: Iterable[TensorPlan]) -> list[TensorPlan]:
    """Give tensor plans the slots of earlier plans with the same path, and return these plans.

    A parameter may be absent for some time, for example when pruning replaces it with another one
    and later restores it. Plans are matched by path, because the node may have received a prefix
    since then.
    """
    renewed = list(plans)
    paths = [plan.slot.names()[0] for plan in renewed]
    for path, plan in zip(paths, renewed, strict=True):
        old = known.get(path)
        if old is not None:
            plan.slot, plan.states = old.slot, old.states
    known.update(zip(paths, renewed, strict=True))
    return renewed


def _held(module: nn.Module) -> Iterator[str]:
    """Yield the names of the parameters that a module currently has."""
    return (name for name, tensor in module._parameters.items() if tensor is not None)


def mark_of(module: nn.Module) -> Mark | None:
    """Return the `@comgra.node` mark of a module's `forward`; None if it is not marked."""
    mark = getattr(module.forward, "__comgra_node__", None)
    return mark if isinstance(mark, Mark) else None


def _names_from_marks(named: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    """Return the names from marks by module path; each name goes to the first module with it."""
    first: dict[str, str] = {}
    for path, module in named:
        mark = mark_of(module)
        if mark is not None:
            first.setdefault(mark.name, path)
    return {path: name for name, path in first.items()}


def _of_parameters(plan: ModulePlan) -> bool:
    wanted = plan.capture
    return (
        wanted.parameter
        or wanted.parameter_grad
        or wanted.parameter_grad_raw
        or wanted.update
        or wanted.optimizer_state
    )


def _plan_tensors(
    kind: str, held: Iterable[tuple[Mapping[str, torch.Tensor | None], ModulePlan]]
) -> Iterator[TensorPlan]:
    names: dict[int, list[str]] = {}
    for tensors, plan in held:
        for attribute, tensor in tensors.items():
            if tensor is None:
                continue
            name = f"{plan.path}.{attribute}".lstrip(".")
            if id(tensor) in names:
                names[id(tensor)].append(name)
            else:
                shared = names[id(tensor)] = [name]
                yield TensorPlan(plan, attribute, kind, lambda shared=shared: tuple(shared))  # type: ignore[misc]


def facts_of(path: str, module: nn.Module) -> ModuleFacts:
    """Return the properties of a module that selectors match."""
    mark = mark_of(module)
    classes = tuple(cls.__name__ for cls in class_of(module).__mro__)
    return ModuleFacts(path, classes, mark.name if mark is not None else "")
