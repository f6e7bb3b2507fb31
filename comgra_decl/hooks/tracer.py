"""The module hooks that run while a step is recorded."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from comgra_decl.hooks import modes
from comgra_decl.hooks.call_context import (
    is_backward,
    is_called_by_module,
    is_no_step,
    torch_variable,
)
from comgra_decl.hooks.cross_thread import Marks, here
from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.hook_lists import ModuleHook
from comgra_decl.hooks.module_tree import Owners, Top, has_parameters, unwrapped_class
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.plans import ModulePlan, TopPlan
from comgra_decl.hooks.probing.seclusion import SECLUDED
from comgra_decl.hooks.pytree import first_batch_size, gradient_function, tensors_in
from comgra_decl.hooks.tensors.boundaries import Ends, input_role
from comgra_decl.hooks.tensors.fast_paths import NativeCalls
from comgra_decl.hooks.tensors.parameters import Parameters
from comgra_decl.hooks.tensors.recorder import TensorRecorder
from comgra_decl.hooks.tensors.reentrant_checkpoints import Recomputed
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.hooks.unregistered import Strays
from comgra_decl.torch_private import graph_task, tracing_state, without_functions

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.hooks.compiled.functions import CompiledFunctions
    from comgra_decl.hooks.compiled.observers import Observers
    from comgra_decl.hooks.direct_calls import DirectCalls
    from comgra_decl.hooks.graph.provenance import Provenance
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.spec import Spec


_MOST_NAMESAKES = 32
"""The maximum number of models of one class that have their own nodes. Further models reuse the
names of models that no longer exist."""


class Calls(Protocol):
    """Handles calls to roots (outermost modules, or parts of one) for a tracer."""

    def entered(self) -> None:
        """Handle the beginning of a call, before anything else."""

    def choose(self, root: nn.Module, top: Top) -> StepCapture | None:
        """Return the record that this call belongs to, or None if it is not recorded.

        Args:
            root: the called module.
            top: the outermost module, which is or contains the root.
        """

    def left(self) -> None:
        """Handle the end of the call."""

    def abandoned(self) -> bool:
        """Return whether the followed thread ended before any of its step was recorded."""


class ModuleTracer:
    """Follows module calls while installed, and finds root modules automatically.

    Args:
        spec: what to capture.
        owners: the parent of each module.
        calls: decides which record a call belongs to.
        direct: is notified of module calls, to distinguish them from direct calls to `forward`.
        held: returns the ids of the parameters held by optimizers.
        together: lock held while it is decided which thread's calls are followed.
        warn: called with what does not fit the model's inputs.
        on_fault: called with exceptions raised by tracing itself, which never reach the program.

    Attributes:
        thread: the thread whose calls are followed; 0 while it is not known.
        marks: marks the model outputs in the step in progress.
        provenance: follows the dependency graph of the step in progress; None if none is followed.
        tops: the plan of each called model, by the model's `id`.
        recorder: reads outputs and their gradients.
        parameters: reads parameters and their gradients.
        expected: a module that is a model even if it has no parameters.
        observers: observe code that remains compiled; None if compiled code runs eagerly.
        functions: tracks compiled functions; None if the program cannot have compiled functions.
    """

    def __init__(
        self,
        spec: Spec,
        owners: Owners,
        *,
        calls: Calls,
        direct: DirectCalls,
        held: Callable[[], Collection[int]],
        together: AbstractContextManager[Any],
        warn: Callable[[str], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._calls = calls
        self._spec = spec
        wanted = {name for entry in spec.nodes.values() for name in entry.capture}
        self._reads_inputs = bool(wanted & {"input", "input_grad"})
        self._owners = owners
        self.direct = direct
        self._on_fault = on_fault
        self._handles: list[RemovableHandle] = []
        # hooks that run after a module's own hooks, during its call
        self._late: dict[int, RemovableHandle] = {}
        self._late_inputs: set[int] = set()  # modules whose own hooks may replace their inputs
        self._plans: dict[int, ModulePlan] = {}
        self.recorder = TensorRecorder(on_fault=on_fault)
        self._recomputed = Recomputed(self.recorder, on_fault=on_fault)
        self._ends = Ends(spec, recorder=self.recorder, warn=warn, on_fault=on_fault)
        self._in_model = False  # whether the root being called has parameters, unlike a loss
        self.parameters = Parameters(held=held, on_fault=on_fault)
        self.thread = 0
        self.marks = Marks()
        self._together = together
        self._depth = 0
        # the thread that entered the outermost call, and the one whose step it works on
        self._caller, self._followed = 0, 0
        self._batch_before: int | None = None
        self._model_called = False  # in this step
        self._epoch = -1  # the step that the last model call belonged to
        self._capture: StepCapture | None = None
        self._native = NativeCalls()
        self._graph: Provenance | None = None  # the provenance, if it follows the current call
        self.tops: dict[int, TopPlan] = {}
        self._namesakes: dict[str, list[TopPlan]] = {}  # by class, in order of first calls
        self.provenance: Provenance | None = None
        self._plain: Top | None = None  # the model whose nodes have no prefix
        # whether node names begin with the root's class; None: not decided yet
        self.prefixed: bool | None = None
        self._strays = Strays(owners)
        self.expected: weakref.ref[nn.Module] | None = None
        self.observers: Observers | None = None
        self.functions: CompiledFunctions | None = None

    # -- attaching -----------------------------------------------------------------------------

    def install(self) -> None:
        """Install the hooks. Idempotent."""
        if not self._handles:
            self._depth = 0
            self._handles = [
                register_module_forward_pre_hook(self._before),
                register_module_forward_hook(self._after, always_call=True),
            ]
            for plan in self._plans.values():
                self._hook_late(plan)

    @property
    def installed(self) -> bool:
        """Whether the hooks are installed."""
        return bool(self._handles)

    @property
    def capture(self) -> StepCapture | None:
        """The record that the call in progress belongs to; None if it is not recorded."""
        return self._capture

    def follow_thread(self, thread: int) -> None:
        """Follow the calls of a thread from now on; 0 for the first thread that trains."""
        self.thread = thread

    def follow_graph(self, graph: Provenance | None) -> None:
        """Set the object that follows the dependency graph; None to follow none."""
        self.provenance = graph

    def observe(self, observers: Observers | None) -> None:
        """Set the observers of code that remains compiled; None if compiled code runs eagerly."""
        self.observers = observers

    def know_functions(self, functions: CompiledFunctions) -> None:
        """Start tracking which model calls are made within compiled functions."""
        self.functions = functions

    @property
    def inside(self) -> bool:
        """Whether a module call is in progress.

        The depth alone is not reliable: Ctrl-C in a notebook leaves calls that never return.
        """
        if not self._handles or self._depth == 0:
            return False
        found = is_called_by_module(sys._getframe(1))
        if not found:
            self.recover()
        return found

    def _claim(self) -> bool:
        """Return whether this thread can be followed, and follow it if it trains.

        Until one thread trains, any thread can be followed. A thread that has never trained can
        also be followed if the thread whose step would be recorded next has ended.
        """
        trains = torch.is_grad_enabled()
        with self._together:
            free = self.thread == 0 or (trains and self._calls.abandoned())
            if free and trains:
                self.thread = here()
        return free

    def recover(self) -> None:
        """Discard calls that never returned, as after Ctrl-C in a notebook."""
        self._depth = 0

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        for handle in self._late.values():
            handle.remove()
        self._handles.clear()
        self._late.clear()
        self._late_inputs.clear()
        self._capture = None
        if self.observers is not None:
            self.observers.take_off()
        self._release()

    def finish(self, capture: StepCapture) -> None:
        """Read the values known only when the step ends, and release the step's tensors."""
        with without_functions():
            self.parameters.finish(capture)
        self._release()

    def _release(self) -> None:
        self._ends.release()
        self._recomputed.clear()
        self.recorder.release()
        self.parameters.release()

    def _hook_late(self, plan: ModulePlan) -> None:
        """Make a module's inputs be read after its own hooks, which may replace them."""
        module = plan.module()
        if module is None:
            return
        known = id(module) in self._late_inputs
        if plan.reads_inputs and module._forward_pre_hooks and not known:
            self._late_inputs.add(id(module))
            hook = module.register_forward_pre_hook(ModuleHook(self._before_late), with_kwargs=True)
            self._handles.append(hook)

    # -- following calls -----------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        try:
            own = this_thread.number
            self.direct.entered[own] = module
            if self.observers is not None and self._is_compiled(module):
                return
            # inlined `is_no_step`, because this runs at each call to each module
            if graph_task() != -1 or tracing_state() is not None or own in SECLUDED:
                return
            # No call lies between these comparisons and the addition, so no other thread runs.
            if own == self._caller and self.thread == self._followed and self._depth:
                self._depth += 1  # within a call that this thread has entered: as `_descend`
            else:
                mine = here()
                if mine != self.thread and not self._claim():
                    return
                # Global pre-hooks do not receive keyword arguments, so read them from the caller.
                outermost = self._depth == 0
                kwargs = torch_variable(sys._getframe(1), "kwargs") or {} if outermost else {}
                if not self._descend(mine, module, args, kwargs):
                    return
            if module._forward_hooks:
                self._come_after(module)
            if self._graph is not None and not getattr(module, "training", True):
                self._enter_native(module, args, torch_variable(sys._getframe(1), "kwargs") or {})
            if self._reads_inputs and id(module) not in self._late_inputs:
                self._take_inputs(module, args, torch_variable(sys._getframe(1), "kwargs") or {})
        except Exception as error:
            self._on_fault(error)

    def before_direct(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Handle the beginning of a direct call to `forward`."""
        try:
            mine = here()
            if is_no_step() or (mine != self.thread and not self._claim()):
                return
            if self.functions is not None and self._depth == 0:
                self.functions.calls_forward(sys._getframe(1))
            if not self._descend(mine, module, args, dict(kwargs)):
                return
            if self._graph is not None and not getattr(module, "training", True):
                self._enter_native(module, args, kwargs)
            if self._reads_inputs:
                self._take_inputs(module, args, kwargs)
        except Exception as error:
            self._on_fault(error)

    def _descend(
        self, mine: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Begin a call in the thread `mine`; return whether it is followed.

        Checks under the lock which thread is followed, because another thread may just have become
        that thread.
        """
        with self._together:
            if self.thread not in (0, mine):
                return False
            self._depth += 1
            if self._depth == 1:
                self._caller, self._followed = this_thread.number, mine
                self._calls.entered()
                if self.functions is not None:
                    self.functions.calls(module, sys._getframe(1))
                with without_functions():
                    self._enter_root(module, args, kwargs)
            return True

    @guarded
    def after_direct(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Handle the end of a direct call to `forward`; `output` is None if the call failed."""
        self._finish(module, args, output)

    def before_compiled(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Handle the beginning of a module call reported by an observed compiled function."""
        mine = here()
        if not (is_no_step() or (mine != self.thread and not self._claim())):
            self._descend(mine, module, args, kwargs)

    @guarded
    def after_compiled(self) -> None:
        """Handle the end of a module call reported by an observed compiled function."""
        if not is_no_step() and self.thread in (0, here()) and self._handles:
            self._depth = max(0, self._depth - 1)
            if self._depth == 0:
                self._leave_root(self._capture, (), None)

    def before_function(self) -> None:
        """Handle the beginning of an observed compiled function that calls models."""
        self._ends.targets.interrupt()

    def given(self, tensor: torch.Tensor) -> None:
        """Handle an argument that the function passes to a model."""
        self._ends.targets.give(tensor)

    def target(self, tensor: torch.Tensor) -> None:
        """Handle a target that the function found outside models."""
        if self._capture is None or not self._in_model:
            self._ends.targets.shown(tensor)

    def after_function(self, returned: Any) -> None:
        """Handle the end of the function, or its failure along with that of the enclosing calls."""
        self._depth, self._capture = 0, None
        self._ends.targets.know(returned)
        self._ends.targets.resume()

    def _is_compiled(self, module: nn.Module) -> bool:
        """Return whether a module is the graph of a compiled function.

        Some backends call the graph as a module. The modules compiled into it report their own
        calls.
        """
        within = self.observers is not None and self.observers.within_function
        return within and isinstance(module, torch.fx.GraphModule) and id(module) not in self._plans

    def plans_of(self, module: nn.Module) -> list[ModulePlan]:
        """Return the plans of all modules in the model that is, or contains, the called module."""
        return self._adopt(module).modules

    def _enter_native(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if self._graph is not None and self._graph is self.provenance:
            self._native.enter(module, args, kwargs, self._graph)

    @guarded
    def _before_late(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        """Read the inputs of a module after its own pre-hooks.

        `kwargs` is missing if another hook in the same call ended tracing.
        """
        if kwargs is not None and not is_no_step():
            self._take_inputs(module, args, kwargs)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Follow the call to an outermost module during which the hooks were installed."""
        self._depth = 1
        with without_functions():
            self._enter_root(module, args, dict(kwargs))
        if module._forward_hooks:
            self._come_after(module)
        if self._reads_inputs:
            self._take_inputs(module, args, dict(kwargs))

    def _come_after(self, module: nn.Module) -> None:
        """Add a hook that runs after a module's own hooks, which may replace its output.

        The hook remains for this call only, so that the program can copy, save or script the module
        between calls.
        """
        if id(module) in self._plans and id(module) not in self._late:
            hook = ModuleHook(self._after_late)
            self._late[id(module)] = module.register_forward_hook(hook, always_call=True)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        try:
            if self.observers is not None and self._is_compiled(module):
                return
            if not self._late or id(module) not in self._late:
                self._finish(module, args, output)
            elif self._graph is not None:
                self._expect(module, args, output)
        except Exception as error:
            self._on_fault(error)

    def _expect(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Announce a module's output to the graph before the module's own hooks compute with it."""
        capture, plan, graph = self._capture, self._plans.get(id(module)), self._graph
        if is_no_step() or self.thread not in (0, here()):
            return
        if graph is None or capture is None or plan is None or plan.module() is not module:
            return
        if not plan.capture.output or plan.capture.split is not None:
            return
        iteration = capture.upcoming(plan)
        if capture.max_iterations is not None and iteration >= capture.max_iterations:
            return
        with without_functions():
            for path, tensor in tensors_in(output):
                slot = capture.in_pass(plan.slot(plan.role + path, iteration))
                graph.expect(slot, tensor, (t for _, t in tensors_in(args)))

    def _after_late(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # While an error is handled, torch may be iterating over the hooks themselves, not a copy.
        failed = sys.exc_info()[1] is not None
        try:
            self._finish(module, args, output)
            if not failed and self.thread in (0, here()):
                handle = self._late.pop(id(module), None)
                if handle is not None:
                    handle.remove()
        except Exception as error:
            self._on_fault(error)

    def _finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # inlined `is_no_step`, as in `_before`
        own = this_thread.number
        no_step = graph_task() != -1 or tracing_state() is not None or own in SECLUDED
        inside = own == self._caller and self.thread == self._followed
        if no_step or not (inside or self.thread in (0, here())):
            if self._recomputed.capture is not None and is_backward():
                self._recomputed.read(module, self._plans.get(id(module)), output)
            return
        if self._graph is not None and self._graph is self.provenance:
            self._native.leave(module, output, self._graph)
        capture, plan = self._capture, self._plans.get(id(module))
        if capture is not None and plan is not None and plan.module() is module:
            if output is not None:
                plan.fired = True
                if plan.capture.output or plan.capture.output_grad:
                    # hide our reads from modes, ours or the program's, and from tensor subclasses
                    with without_functions():
                        self._record(plan, capture, args, output)
        elif capture is not None and module._parameters and self._depth > 1:
            self._strays.see(module)
        if self._depth:  # 0 if the hooks were installed during this call
            self._depth -= 1
        if self._depth == 0:
            self._leave_root(capture, args, output)

    def _leave_root(self, capture: StepCapture | None, args: Any, output: Any) -> None:
        self._capture = None
        within_compiled = self.observers is not None and self.observers.within_function
        if self.observers is not None:
            self.observers.left()
        if capture is not None and capture.followed:
            with without_functions():
                self.marks.put_on(output)
        if capture is not None and capture.followed and self._in_model:
            with without_functions():
                self._ends.look_for_targets(
                    capture, (*args, output), self.provenance, within_compiled=within_compiled
                )
        if capture is not None and capture.categories is not None:
            capture.categories.leave(output)
        if capture is not None and capture.probing is not None:
            capture.probing.leave(output)
        if capture is not None and capture.aside and self._batch_before is not None:
            capture.batch_size = self._batch_before  # the step keeps the size of its training batch
        self._calls.left()
        if not within_compiled:
            self._ends.targets.resume()  # below the graph's mode, which sees targets later

    def _enter_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = self._adopt(module)
        modes.sweep()
        known = plan.top.parametric and module is plan.top.module()  # others may get some later
        self._in_model = known or has_parameters(module)
        if self._in_model:
            self._ends.targets.interrupt()
        if not plan.top.joins(args, kwargs):
            self._capture = None
            return
        capture = self._capture = self._calls.choose(module, plan.top)
        self._graph = self.provenance if capture is not None and capture.followed else None
        if capture is None:
            return
        if capture.followed and capture.epoch != self._epoch:
            self._begin(capture)
        capture.note_mode(plan.top.label, module, of_model=self._in_model)
        if not self._in_model and self._prepares(plan, args, kwargs):
            self._in_model = True
        self._model_called = self._model_called or self._in_model
        self._batch_before = capture.batch_size
        capture.batch_size = first_batch_size(args, kwargs) or capture.batch_size
        if capture.categories is not None or capture.probing is not None:
            self._look_at_samples(capture, module, plan, args, kwargs)
        if self.observers is not None:
            self.observers.place(plan.modules)
        if plan.top.parametric and capture.count(plan) == 0:
            self.parameters.read(plan, capture)
        if self._in_model:
            self._ends.read_inputs(capture, args, kwargs, self._graph)

    def _look_at_samples(
        self,
        capture: StepCapture,
        module: nn.Module,
        plan: TopPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Make the probes copy a trained model and search for the classes of its samples."""
        if capture.categories is not None:
            capture.categories.enter(module, args, kwargs, capture.batch_size)
        if capture.probing is None:
            return
        if plan.top.parametric and not capture.aside:
            iteration = capture.upcoming("input")
            capture.probing.enter(module, plan, args, kwargs, iteration=iteration)
        else:
            capture.probing.called(module, args, kwargs, capture.batch_size)

    def input_slot(self, role: str, iteration: int) -> Slot:
        """Return the slot of an input of a model; `iteration` counts the models in a step."""
        return self._ends.input_slot(role, iteration)

    def _prepares(self, plan: TopPlan, args: Any, kwargs: Any) -> bool:
        """Return whether a part without parameters receives the inputs of its model.

        It does if its inputs have no history and no other part of the model was called before it in
        this step. A loss module, in contrast, is called after the model.
        """
        if self._model_called or not plan.top.parametric:
            return False
        return all(gradient_function(tensor) is None for _, tensor in tensors_in((args, kwargs)))

    def _begin(self, capture: StepCapture) -> None:
        """Reset the state at the first model call of a step; the previous one may be dropped."""
        self._epoch = capture.epoch
        self._model_called = False
        self.marks.renew()
        self._ends.targets.begin()
        self.recorder.release()
        self.parameters.begin()

    def _adopt(self, root: nn.Module) -> TopPlan:
        """Return the plan of a root module, creating or updating it if necessary."""
        module = self._owners.top_of(root)
        plan = self.tops.get(id(module))
        if plan is None or plan.top.module() is not module:
            for part in module.modules():  # some may have been called while building the model
                self.tops.pop(id(part), None)
            self._owners.know(module)
            plan = self.tops[id(module)] = self._named(module)
        if plan.version != self._owners.version:
            plan.version = self._owners.version
            if plan.renew(module):
                self._take_in(plan)
        return plan

    def _named(self, module: nn.Module) -> TopPlan:
        """Return a plan for a new outermost module, under a name that no existing module has.

        A loss module that is recreated in each step (`nn.MSELoss()(out, y)`) remains one node, and
        so does a wrapper that is recreated around a model.
        """
        known = self._namesakes.setdefault(unwrapped_class(module), [])
        parametric = has_parameters(module)
        for plan in known:
            replaceable = len(known) >= _MOST_NAMESAKES or not (parametric or plan.top.parametric)
            if plan.top.module() is None and (replaceable or plan.holds_part_of(module)):
                self.tops = {key: value for key, value in self.tops.items() if value is not plan}
                plan.become(module)
                return plan
        top = Top(module, prefixed=self._is_prefixed, number=len(known) + 1)
        if self.expected is not None and self.expected() is module:
            top.parametric = top.takes_part = True
        known.append(TopPlan(self._spec, top))
        return known[-1]

    def strays(self) -> str:
        """Return a warning about called modules that belong to no model, once for each."""
        return self._strays.sentence()

    def _take_in(self, plan: TopPlan) -> None:
        self._strays.know(part.module for part in plan.parts)
        for module_plan in plan.modules:
            self._plans[id(module_plan.module())] = module_plan
            self._hook_late(module_plan)
        self.parameters.adopt(plan)

    @property
    def called_tops(self) -> list[TopPlan]:
        """The plans of outermost modules that take part in training, even if no longer alive."""
        known = (plan for plans in self._namesakes.values() for plan in plans)
        return [plan for plan in known if plan.top.takes_part and self._is_top(plan)]

    def _is_top(self, plan: TopPlan) -> bool:
        """Return whether a module is still not part of another one."""
        module = plan.top.module()
        return module is None or self.tops.get(id(module)) is plan

    def settle_names(self) -> None:
        """Fix the naming of nodes after the first record, when the number of models is known."""
        if self.prefixed is None:
            models = [plan.top for plan in self.tops.values() if plan.top.parametric]
            self.prefixed = len(models) > 1
            self._plain = models[0] if len(models) == 1 else None

    def go_on_from(self, before: ModuleTracer) -> None:
        """Continue with the node names of the previous tracer after a change to the spec."""
        self.prefixed, self._plain = before.prefixed, before._plain
        for label, plans in before._namesakes.items():
            self._namesakes[label] = [self._again(plan.top) for plan in plans]

    def _again(self, top: Top) -> TopPlan:
        top.prefixed = self._is_prefixed
        plan = TopPlan(self._spec, top)
        module = top.module()
        if module is not None:
            self.tops[id(module)] = plan
        return plan

    def _is_prefixed(self, top: Top) -> bool:
        """Return whether the names of a model's nodes begin with its class.

        A model that was the only one in the first record has no prefix. Losses always have one,
        because their parts may have the same names as parts of the model.
        """
        if not top.parametric:
            return True
        if self.prefixed is None:
            return sum(plan.top.parametric for plan in self.tops.values()) > 1
        return self.prefixed or top is not self._plain

    # -- reading tensors -----------------------------------------------------------------------

    def _record(self, plan: ModulePlan, capture: StepCapture, args: Any, output: Any) -> None:
        """Read the output of a selected module, and hook its gradients."""
        wanted = plan.capture
        iteration = capture.iteration(plan, plan.node)
        if iteration is None:
            return
        graph = self._graph
        if wanted.output_grad and capture.followed and not torch.is_grad_enabled():
            self._recomputed.first(plan, iteration, capture)
        if type(output) is torch.Tensor and wanted.split is None and not capture.aside:
            # nearly all modules return one plain tensor: the same as below, in fewer calls
            slot = plan.slots.get((plan.role, iteration)) or plan.slot(plan.role, iteration)
            self.recorder.read_whole(
                slot,
                output,
                capture.batch_dim(output, wanted.batch_dim, slot),
                capture=capture,
                how=wanted,
                wanted=plan.outputs,
                graph=graph,
                inputs=() if graph is None else (t for _, t in tensors_in(args)),
            )
            return
        slot_of = partial(plan.slot, iteration=iteration)
        for path, tensor in tensors_in(output):
            self.recorder.read(
                tensor,
                plan.role + path,
                slot_of,
                capture=capture,
                how=wanted,
                wanted=plan.outputs,
                graph=graph,
                inputs=() if graph is None else (t for _, t in tensors_in(args)),
            )

    def _take_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Read the inputs of a selected module, without edges; they are outputs of other nodes."""
        capture, plan = self._capture, self._plans.get(id(module))
        if capture is None or plan is None or not plan.reads_inputs or plan.module() is not module:
            return
        iteration = capture.iteration((plan, "input"), plan.node)
        if iteration is None:
            return
        slot_of = partial(plan.slot, iteration=iteration)
        with without_functions():
            for path, tensor in (*tensors_in(args), *tensors_in(kwargs)):
                self.recorder.read(
                    tensor,
                    input_role(path),
                    slot_of,
                    capture=capture,
                    how=plan.capture,
                    wanted=plan.inputs,
                )

    def know(self, value: Any) -> None:
        """Exclude tensors named by the program from the search for targets."""
        self._ends.targets.know_named(value)

    def rest(self) -> None:
        """Pause the search for targets until the next training call."""
        self._ends.targets.rest()

    def before_optimizer(
        self, capture: StepCapture, optimizer: torch.optim.Optimizer, *, closure: bool
    ) -> None:
        """Read the gradients before an optimizer step, whose arithmetic contains no targets."""
        if self.functions is not None:
            self.functions.ends(sys._getframe(1))
        with without_functions():
            self._ends.before_optimizer(capture, optimizer, closure=closure, holds=self._holds)
            if capture.probing is not None:
                capture.probing.stepping(optimizer, closure=closure)
            self.parameters.before_step(optimizer, capture, closure=closure)

    def _holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter of any model, including those not selected."""
        plans = (plan for known in self._namesakes.values() for plan in known)
        tops = (plan.top.module() for plan in plans)
        return any(tensor is p for top in tops if top is not None for p in top.parameters())

    def after_optimizer(self, capture: StepCapture, optimizer: torch.optim.Optimizer) -> None:
        """Read the parameters and the optimizer state after an optimizer step."""
        with without_functions():
            self.parameters.after_step(optimizer, capture)

    def after_hand(self, capture: StepCapture) -> None:
        """Read the gradients in a step ended by a manual update."""
        with without_functions():
            self.parameters.after_hand(capture)

    def read_loss(self, capture: StepCapture, loss: torch.Tensor, backwarded: torch.Tensor) -> None:
        """Read a tensor on which `backward()` was called.

        Args:
            capture: the record of the step.
            loss: the loss before gradient scaling.
            backwarded: the tensor on which `backward` is called.
        """
        if self.functions is not None:
            self.functions.ends(sys._getframe(1))
        self._ends.read_loss(capture, loss, backwarded, self.provenance)

    def after_backward(self) -> None:
        """Look at the gradients that a backward pass has left."""
        if self._ends.awaits_gradients:  # in the first records only
            with without_functions():
                self._ends.after_backward()

    def parameter_slot(self, tensor: torch.Tensor) -> Slot | None:
        """Return the slot of a parameter or buffer, or None if it is not traced."""
        plan = self.parameters.plan_of(tensor)
        return plan.slot if plan is not None else None
