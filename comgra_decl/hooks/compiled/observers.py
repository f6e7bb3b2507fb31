"""What compiled code shows of itself, on its way into the record of a step."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks.calling import (
    is_backward,
    is_compiled_call,
    is_module_call,
    is_no_step,
)
from comgra_decl.hooks.compiled import operators
from comgra_decl.hooks.compiled.operators import NO_TICKET, Shown
from comgra_decl.hooks.reading.ends import input_role
from comgra_decl.hooks.reading.recorder import TensorRecorder

if TYPE_CHECKING:
    from types import FrameType

    from torch import nn

    from comgra_decl.hooks.plans import ModulePlan
    from comgra_decl.hooks.tracer import ModuleTracer

_PLACE = -1
"""Where our hooks lie among those of a module: last, and under a number that torch never gives.

The same for all, because the compiler guards on it, and modules of one kind share compiled code.
"""

_WITHIN_FUNCTION = (
    "a compiled function calls the model: in recorded steps that function runs eagerly. Compile "
    "the model itself, with model.compile() or torch.compile(model), to have it recorded compiled"
)
_is_compiling = torch.compiler.is_compiling
_Arrival = Callable[[torch.Tensor], None]


class OutputObserver:
    """A forward hook that the compiler makes a part of what it compiles; eagerly it does nothing.

    Args:
        number: of the module, kept as a tensor: compiled code that several modules share takes it
            from the one that is called.
        gradient: whether the gradients of outputs are recorded.
    """

    def __init__(self, number: int, *, gradient: bool) -> None:
        self.number = torch.tensor(number)
        self.gradient = gradient

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The module has returned."""
        if _is_compiling():
            _show(output, "", 0, self.number, entering=False, watched=self.gradient)


class InputObserver:
    """The same, before the module is called; with keyword arguments."""

    def __init__(self, number: int, *, gradient: bool) -> None:
        self.number = torch.tensor(number)
        self.gradient = gradient

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The module is called."""
        if _is_compiling():
            count = _show(args, "", 0, self.number, entering=True, watched=self.gradient)
            _show(kwargs, "", count, self.number, entering=True, watched=self.gradient)


def _show(
    value: Any, path: str, index: int, module: torch.Tensor, *, entering: bool, watched: bool
) -> int:
    """Shows the tensors in a value, named as `tensors_in` names them; in words that Dynamo knows.

    Returns:
        The number of tensors shown, `index` of them before this value.
    """
    if isinstance(value, torch.Tensor):
        torch.ops.comgra_decl.show(value, module, path, index, entering, watched)
        return index + 1
    below: list[tuple[str, Any]] = []
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        for i, child in enumerate(value):
            below.append((f".{names[i]}" if names else f"[{i}]", child))
    elif isinstance(value, Mapping):
        below = [(f".{key}", child) for key, child in value.items()]
    elif dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        below = [(f".{field.name}", getattr(value, field.name)) for field in fields]
    for step, child in below:
        index = _show(child, path + step, index, module, entering=entering, watched=watched)
    return index


class _ShownRecorder(TensorRecorder):
    """Reads what compiled code shows, below autograd: gradients are shown by themselves, later."""

    watched = False
    arrivals: list[_Arrival]

    def _awaits(self, tensor: torch.Tensor) -> bool:
        return self.watched

    def _hook(self, tensor: torch.Tensor, hook: _Arrival) -> None:
        self.arrivals.append(hook)


class Observers:
    """The hooks that compiled code has inside, and where the tensors go that it shows.

    Args:
        tracer: knows which record the call in progress belongs to.
        warn: told what runs eagerly all the same.
        on_fault: told about an error of our own.
    """

    def __init__(
        self,
        tracer: ModuleTracer,
        *,
        warn: Callable[[str], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._tracer = tracer
        self._warn = warn
        self._said = False
        self._on_fault = on_fault
        self._recorder = _ShownRecorder(on_fault=on_fault)
        self._plans: list[ModulePlan] = []
        self._hooks: dict[ModulePlan, tuple[InputObserver, OutputObserver]] = {}
        self._placed: list[nn.Module] = []
        self._iterations: dict[object, int | None] = {}  # of the latest call
        self._tickets: list[list[_Arrival]] = []
        self._issued: dict[tuple[int, str, bool], list[int]] = {}

    @property
    def placed(self) -> bool:
        """Whether the hooks are on modules: within the call of a model that is recorded."""
        return bool(self._placed)

    def begin(self) -> None:
        """A step is about to be recorded."""
        self._iterations.clear()
        self._tickets.clear()
        self._issued.clear()
        operators.reader = self

    def end(self) -> None:
        """The step is over."""
        self.take_off()
        if operators.reader is self:
            operators.reader = None

    def place(self, plans: Iterable[ModulePlan]) -> None:
        """A model is called: puts the hooks on its modules, behind those that they have."""
        self._say_if_within_compiled(sys._getframe(1))
        for plan in plans:
            module = plan.module()
            if module is None or isinstance(module, torch.jit.ScriptModule):
                continue  # no hook runs within TorchScript
            if _PLACE in module._forward_hooks:
                continue
            before, after = self._hooks_of(plan)
            if plan.capture.output or plan.capture.output_grad:
                module._forward_hooks[_PLACE] = after
            if plan.reads_inputs:
                module._forward_pre_hooks[_PLACE] = before
                module._forward_pre_hooks_with_kwargs[_PLACE] = True
            self._placed.append(module)

    def take_off(self) -> None:
        """The model has returned: copies of modules, and files of them, have no hook of ours."""
        for module in self._placed:
            module._forward_hooks.pop(_PLACE, None)
            module._forward_pre_hooks.pop(_PLACE, None)
            module._forward_pre_hooks_with_kwargs.pop(_PLACE, None)
        self._placed.clear()

    def _say_if_within_compiled(self, frame: FrameType | None) -> None:
        while frame is not None and not self._said:
            if is_compiled_call(frame) and not is_module_call(frame):
                self._said = True
                self._warn(_WITHIN_FUNCTION)
            frame = frame.f_back

    def _hooks_of(self, plan: ModulePlan) -> tuple[InputObserver, OutputObserver]:
        found = self._hooks.get(plan)
        if found is None:
            number = len(self._plans)
            self._plans.append(plan)
            found = self._hooks[plan] = (
                InputObserver(number, gradient=plan.inputs.gradient),
                OutputObserver(number, gradient=plan.outputs.gradient),
            )
        return found

    # -- what compiled code shows --------------------------------------------------------------

    def read(self, tensor: torch.Tensor, shown: Shown) -> int:
        """A module was given this tensor, or has returned it."""
        try:
            with torch._C.DisableTorchFunction():
                return self._read(tensor, shown)
        except Exception as error:
            self._on_fault(error)
            return NO_TICKET

    def _read(self, tensor: torch.Tensor, shown: Shown) -> int:
        tracer, plan = self._tracer, self._plans[shown.module]
        capture = tracer.capture
        if is_backward():
            return self._again(shown)
        if capture is None or is_no_step() or tracer.thread not in (0, get_ident()):
            return NO_TICKET
        call: object = (plan, "input") if shown.entering else plan
        if shown.position == 0:
            plan.fired = plan.fired or not shown.entering
            self._iterations[call] = capture.iteration(call, plan.node)
        iteration = self._iterations.get(call)
        if iteration is None:
            return NO_TICKET
        self._recorder.watched, self._recorder.arrivals = shown.watched, []
        self._recorder.read(
            tensor,
            input_role(shown.path) if shown.entering else plan.role + shown.path,
            partial(plan.slot, iteration=iteration),
            capture=capture,
            how=plan.capture,
            wanted=plan.inputs if shown.entering else plan.outputs,
        )
        if not self._recorder.arrivals:
            return NO_TICKET
        ticket = len(self._tickets)
        self._tickets.append(self._recorder.arrivals)
        self._issued.setdefault(_which(shown), []).append(ticket)
        return ticket

    def _again(self, shown: Shown) -> int:
        """A checkpoint computes again what was shown before; where that was once, it is known."""
        issued = self._issued.get(_which(shown), [])
        return issued[0] if len(issued) == 1 else NO_TICKET

    def gradient(self, tensor: torch.Tensor, ticket: int) -> None:
        """The gradient of a tensor that was shown has been computed."""
        try:
            arrivals = self._tickets[ticket] if 0 <= ticket < len(self._tickets) else ()
            with torch._C.DisableTorchFunction():
                for arrival in arrivals:
                    arrival(tensor)
        except Exception as error:
            self._on_fault(error)


def _which(shown: Shown) -> tuple[int, str, bool]:
    return shown.module, shown.path, shown.entering
