"""Hooks inside compiled code that pass its tensors to the record of a step."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks.call_context import is_backward, is_module_call, is_no_step, torch_variable
from comgra_decl.hooks.compiled import operators
from comgra_decl.hooks.compiled.borders import NOWHERE, Arrival, Border, InnerGradients
from comgra_decl.hooks.compiled.operators import NO_TICKET, Given, Shown
from comgra_decl.hooks.cross_thread import here
from comgra_decl.hooks.module_tree import has_parameters
from comgra_decl.hooks.pytree import rebuilt
from comgra_decl.hooks.tensors.boundaries import input_role
from comgra_decl.hooks.tensors.recorder import TensorRecorder
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from types import FrameType

    from torch import nn

    from comgra_decl.hooks.plans import ModulePlan
    from comgra_decl.hooks.tracer import ModuleTracer

_PLACE = -1
"""The key of our hooks in a module's hook dictionaries: sorted last, and never used by torch.

All modules have the same key, because the compiler guards on the key, and modules of one class
share code.
"""

_PLACE_OF_CALLS = -2
"""The key of the hooks around calls to outermost modules; they enclose all other hooks."""

_is_compiling = torch.compiler.is_compiling


class OutputObserver:
    """A forward hook that is compiled into the module's code; in eager code it has no effect.

    Args:
        number: the module's number. It is stored as a tensor, so that compiled code that several
        modules share reads it from the module being called.
        gradient: whether the gradients of outputs are recorded.
    """

    def __init__(self, number: int, *, gradient: bool) -> None:
        self.number = torch.tensor(number)
        self.gradient = gradient

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Show the outputs of the module."""
        if _is_compiling():
            for i, (path, tensor) in enumerate(_tensors(output, "")):
                torch.ops.comgra_decl.show(tensor, self.number, path, i, False, self.gradient)


class InputObserver:
    """The forward pre-hook that corresponds to `OutputObserver`; accepts keyword arguments."""

    def __init__(self, number: int, *, gradient: bool) -> None:
        self.number = torch.tensor(number)
        self.gradient = gradient

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Show the inputs of the module."""
        if _is_compiling():
            given = [*_tensors(args, ""), *_tensors(kwargs, "")]
            for i, (path, tensor) in enumerate(given):
                torch.ops.comgra_decl.show(tensor, self.number, path, i, True, self.gradient)


class CallObserver:
    """Two hooks that mark the start and end of an outermost module's call."""

    def __init__(self, number: int, *, of_model: bool) -> None:
        self.number = torch.tensor(number)
        self.of_model = of_model

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Mark the start of the call."""
        if _is_compiling():
            given = [*_tensors(args, ""), *_tensors(kwargs, "")]
            tensors = [tensor for _, tensor in given]
            torch.ops.comgra_decl.enter(
                tensors,
                self.number,
                "\n".join([path for path, _ in given]),
                [tensor.is_leaf for tensor in tensors],
                [tensor.requires_grad for tensor in tensors],
                torch.is_grad_enabled(),
                self.of_model,
            )

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Mark the end of the call."""
        if _is_compiling():
            tensors = [tensor for _, tensor in _tensors(output, "")]
            torch.ops.comgra_decl.leave(tensors, self.number, self.of_model)


def _tensors(value: Any, path: str) -> list[tuple[str, torch.Tensor]]:
    """Do the same as `tensors_in`, in a way that Dynamo can trace."""
    if isinstance(value, torch.Tensor):
        return [(path, value)]
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
    return [found for step, child in below for found in _tensors(child, path + step)]


class _ShownRecorder(TensorRecorder):
    """Reads tensors from compiled code, below autograd; their gradients arrive later."""

    watched = False
    arrivals: list[Arrival]

    def _awaits(self, tensor: torch.Tensor) -> bool:
        return self.watched

    def hook(self, tensor: torch.Tensor, hook: Arrival) -> None:
        """Store the hook until it is known where the gradient arrives."""
        self.arrivals.append(hook)


class Observers:
    """Places hooks inside compiled code and routes the tensors it shows.

    Args:
        tracer: provides the record that the current call belongs to.
        on_fault: called with an error in tracing itself.

    Attributes:
        within_function: whether a compiled function with observed model calls is running.
    """

    def __init__(self, tracer: ModuleTracer, *, on_fault: Callable[[BaseException], None]) -> None:
        self._tracer = tracer
        self._on_fault = on_fault
        self._recorder = _ShownRecorder(on_fault=on_fault)
        self._plans: list[ModulePlan] = []
        self._hooks: dict[ModulePlan, tuple[InputObserver, OutputObserver]] = {}
        self._calls: list[tuple[weakref.ref[nn.Module], CallObserver]] = []
        self.within_function = False
        self._placed: list[nn.Module] = []
        self._called: dict[ModulePlan, None] = {}  # those whose hooks were placed in this step
        self._iterations: dict[object, int | None] = {}  # of the latest call
        self._tickets: list[tuple[list[Arrival], Callable[[], bool]]] = []
        self._inner = InnerGradients()
        self._border: Border | None = None  # of the running piece of code
        self._issued: dict[object, list[int]] = {}  # tickets, by the tensor they belong to

    @property
    def placed(self) -> bool:
        """Whether the hooks are installed on modules, which is the case during a recorded call."""
        return bool(self._placed)

    def begin(self) -> None:
        """Prepare for a step that will be recorded."""
        self.within_function = False
        self._called.clear()
        self._iterations.clear()
        self._tickets.clear()
        self._issued.clear()
        self._inner.clear()
        self._tracer.recorder.inner = self._inner
        operators.reader = self

    def end(self) -> None:
        """Remove the hooks and discard the step's gradients."""
        self.take_off()
        self._inner.clear()
        if self._tracer.recorder.inner is self._inner:
            self._tracer.recorder.inner = None
        if operators.reader is self:
            operators.reader = None

    def place(self, plans: Iterable[ModulePlan]) -> None:
        """Place the hooks on the modules in a model about to be called, after their own hooks."""
        for plan in plans:
            self._called[plan] = None
            module = plan.module()
            if module is None or isinstance(module, torch.jit.ScriptModule):
                continue  # TorchScript runs no hooks
            if _PLACE in module._forward_hooks:
                continue
            before, after = self._hooks_of(plan)
            if plan.capture.output or plan.capture.output_grad:
                module._forward_hooks[_PLACE] = after
            if plan.reads_inputs:
                module._forward_pre_hooks[_PLACE] = before
                module._forward_pre_hooks_with_kwargs[_PLACE] = True
            self._placed.append(module)

    def place_within(self, caller: FrameType) -> bool:
        """Place the hooks on the models called by a compiled function, until it returns.

        Args:
            caller: the frame of the compiled callable.

        Returns:
            Whether the function is known to call any model.
        """
        try:
            functions = self._tracer.functions
            modules = [] if functions is None else functions.outermost(caller)
            endings = torch_variable(caller, "cleanups")  # torch calls these when the call ends
            if not modules or not isinstance(endings, list):
                return False
            self._tracer.before_function()
            endings.append(self._leave_function)
            self.within_function = True
            self._place_calls(modules)
        except Exception as error:
            self._on_fault(error)
            return False
        return True

    def place_again(self, caller: FrameType) -> bool:
        """Place the hooks for a checkpoint that recomputes compiled code in backward.

        The recomputation must run the same code, because the results of different code would not
        match those that were saved.

        Args:
            caller: the frame of the compiled callable.

        Returns:
            Whether the hooks are installed.
        """
        try:
            endings = torch_variable(caller, "cleanups")
            if not self.placed and isinstance(endings, list):
                functions = self._tracer.functions
                if not is_module_call(caller) and functions is not None:
                    self._place_calls(functions.outermost(caller))
                self.place([*self._called])
                endings.append(self.take_off)
        except Exception as error:
            self._on_fault(error)
        return self.placed

    def _place_calls(self, modules: list[nn.Module]) -> None:
        observers = [(module, self._call_observer(module)) for module in modules]
        for module, observer in observers:
            module._forward_pre_hooks[_PLACE_OF_CALLS] = observer.before
            module._forward_pre_hooks_with_kwargs[_PLACE_OF_CALLS] = True
            self._placed.append(module)
        for module in modules:
            self.place(self._tracer.plans_of(module))
        for module, observer in observers:
            module._forward_hooks[_PLACE_OF_CALLS] = observer.after

    def _leave_function(self) -> None:
        try:
            if self.within_function:
                self.within_function = False
                self.take_off()
                self._tracer.after_function(torch_variable(sys._getframe(1), "result"))
        except Exception as error:
            self._on_fault(error)

    def left(self) -> None:
        """Remove the hooks after a model's call."""
        if not self.within_function:  # the function may call another model
            self.take_off()

    def take_off(self) -> None:
        """Remove the hooks, so that copied or pickled modules contain none of them."""
        for module in self._placed:
            for place in (_PLACE, _PLACE_OF_CALLS):
                module._forward_hooks.pop(place, None)
                module._forward_pre_hooks.pop(place, None)
                module._forward_pre_hooks_with_kwargs.pop(place, None)
        self._placed.clear()

    def _call_observer(self, module: nn.Module) -> CallObserver:
        for known, observer in self._calls:
            if known() is module:
                return observer
        observer = CallObserver(len(self._calls), of_model=has_parameters(module))
        self._calls.append((weakref.ref(module), observer))
        return observer

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

    # -- what compiled code shows ----------------------------------------------------------------

    def read(self, tensor: torch.Tensor, shown: Shown) -> int:
        """Read an input or output of a module; return the ticket of its gradient."""
        try:
            with without_functions():
                return self._read(tensor, shown)
        except Exception as error:
            self._on_fault(error)
            return NO_TICKET

    def _read(self, tensor: torch.Tensor, shown: Shown) -> int:
        tracer, plan = self._tracer, self._plans[shown.module]
        capture = tracer.capture
        if is_backward():
            return self._again(_which(shown))
        if capture is None or is_no_step() or tracer.thread not in (0, here()):
            return NO_TICKET
        call: object = (plan, "input") if shown.entering else plan
        if shown.position == 0:
            plan.fired = plan.fired or not shown.entering
            self._iterations[call] = capture.iteration(call, plan.node)
        iteration = self._iterations.get(call)
        if iteration is None:
            return NO_TICKET
        self._recorder.watched, self._recorder.arrivals = self._waits(shown), []
        self._recorder.read(
            tensor,
            input_role(shown.path) if shown.entering else plan.role + shown.path,
            partial(plan.slot, iteration=iteration),
            capture=capture,
            how=plan.capture,
            wanted=plan.inputs if shown.entering else plan.outputs,
        )
        arrivals = self._recorder.arrivals
        if arrivals and self._border is not None and shown.place != NOWHERE:
            self._border.wait(shown.place, arrivals, outside=shown.outside)
        elif arrivals and self._border is not None and shown.result != NOWHERE:
            self._border.result(shown.result, arrivals)
        if not arrivals or shown.outside:
            return NO_TICKET
        return self._issue(_which(shown), arrivals, shown.reached)

    def _waits(self, shown: Shown) -> bool:
        """Whether the gradient of a tensor has to be passed on later."""
        if not shown.outside or not shown.watched:
            return shown.watched
        return self._border is not None and self._border.flows(shown.place)

    def _issue(self, which: object, arrivals: list[Arrival], reached: Sequence[int] | None) -> int:
        ticket = len(self._tickets)
        arrives = _always if self._border is None else self._border.arrival_at(reached)
        self._tickets.append((arrivals, arrives))
        self._issued.setdefault(which, []).append(ticket)
        return ticket

    def _again(self, which: object) -> int:
        """Return the ticket of a recomputed tensor, if it was shown exactly once before."""
        issued = self._issued.get(which, [])
        return issued[0] if len(issued) == 1 else NO_TICKET

    def gradient(self, tensor: torch.Tensor, ticket: int) -> None:
        """Pass on the gradient of a tensor that was shown before."""
        try:
            if 0 <= ticket < len(self._tickets):
                arrivals, arrives = self._tickets[ticket]
                if arrives():
                    with without_functions():
                        for arrival in arrivals:
                            arrival(tensor)
        except Exception as error:
            self._on_fault(error)

    # -- what crosses the border of a piece of compiled code ------------------------------------

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap compiled code to observe its inputs and outputs."""

        def call(*given: Any) -> Any:
            if operators.reader is not self:
                return compiled(*given)
            before, self._border = self._border, Border(given, code=compiled)
            try:
                returned = compiled(*given)
                if not is_backward():  # in backward, a checkpoint recomputes tensors already read
                    self._leave_border(self._border, returned)
            finally:
                self._border = before
            return returned

        return call

    def _leave_border(self, border: Border, returned: Any) -> None:
        try:
            with without_functions():
                border.leave(returned, self._inner, self._tracer.recorder.hook)
        except Exception as error:
            self._on_fault(error)

    def hand_out(self, position: int, reached: Sequence[int] | None) -> int:
        """Register an output that the code also uses, so that its complete gradient is inside."""
        if self._border is None:
            return NO_TICKET
        which = self._border.code, position
        if is_backward():
            return self._again(which)
        arrivals: list[Arrival] = []
        self._border.hand_out(position, arrivals)
        return self._issue(which, arrivals, reached)

    # -- which models compiled functions call --------------------------------------------------

    def enter(self, tensors: list[torch.Tensor], given: Given) -> None:
        """Begin the call to an outermost module."""
        try:
            module = self._calls[given.module][0]()
            if module is None or is_backward():
                return
            with without_functions(), torch.set_grad_enabled(given.enabled):
                known = [*map(_as_given, tensors, given.leaves, given.flows)]
                args, kwargs = rebuilt(given.paths.split("\n"), known)
                self._tracer.before_compiled(module, args, kwargs)
            for tensor, place in zip(known, given.places, strict=True):
                if self._border is None or place == NOWHERE:
                    continue
                self._tracer.given(self._border.given(place))
                if tensor._backward_hooks:
                    self._border.wait(place, [partial(_call_hooks, tensor)], outside=True)
        except Exception as error:
            self._on_fault(error)

    def leave(self) -> None:
        """End the call to that module."""
        self._tracer.after_compiled()

    def target(self, tensor: torch.Tensor) -> None:
        """Read a tensor that a compiled function compares with a model's output."""
        try:
            if not is_no_step():
                with without_functions():
                    self._tracer.target(tensor)
        except Exception as error:
            self._on_fault(error)


def _as_given(tensor: torch.Tensor, leaf: bool, flows: bool) -> torch.Tensor:
    """Return an alias that autograd treats like the tensor that the program passed."""
    if not flows:
        return tensor
    found = tensor.detach().requires_grad_()
    return found if leaf else found.view_as(found)


def _always() -> bool:
    return True


def _call_hooks(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    """Run the hooks of a stand-in when a gradient reaches the original tensor of the program."""
    for hook in [*(tensor._backward_hooks or {}).values()]:
        hook(gradient)


def _which(shown: Shown) -> tuple[int, str, bool]:
    return shown.module, shown.path, shown.entering
