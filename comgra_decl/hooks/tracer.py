"""The hooks that sit on a program while a step is recorded, and what they do at each call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
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
from comgra_decl.hooks.plans import ModulePlan, TopPlan
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
"""Models of one class with nodes of their own; a program that makes ever new ones reuses names."""


class Calls(Protocol):
    """What a tracer asks about the calls of models: of outermost modules, or parts of one."""

    def entered(self) -> None:
        """A model is called; nothing was looked for yet."""

    def choose(self, root: nn.Module, top: Top) -> StepCapture | None:
        """Returns the record that this call belongs to; None: to none.

        Args:
            root: what is called.
            top: the model that it is, or is a part of.
        """

    def left(self) -> None:
        """The call has returned."""

    def abandoned(self) -> bool:
        """Whether the thread that was followed is gone, and nothing of its step recorded."""


class ModuleTracer:
    """Follows module calls while installed, finding roots by itself.

    Args:
        spec: what to capture.
        owners: who owns which module.
        calls: decides which record a call belongs to.
        direct: is told of calls of modules, to tell those of `forward` alone from them.
        held: returns the ids of the parameters that optimizers hold.
        together: held while it is decided which thread's calls are followed.
        on_fault: called with an exception of our own; the program never sees it.

    Attributes:
        thread: the one whose calls are followed; 0: it is not known yet.
        marks: on what the models of the step in progress have returned.
        provenance: follows the dependency graph of the step in progress, if anything does.
        tops: the plan of each model that was called, by the model's `id`.
        recorder: reads outputs and their gradients.
        parameters: reads parameters and their gradients.
        observers: for what is compiled, where it stays compiled.
        functions: knows compiled functions, if the program may have any.
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
        self._late: dict[int, RemovableHandle] = {}  # ours behind those of modules in a call
        self._late_inputs: set[int] = set()  # modules whose own hooks may replace what they take
        self._plans: dict[int, ModulePlan] = {}
        self.recorder = TensorRecorder(on_fault=on_fault)
        self._recomputed = Recomputed(self.recorder, on_fault=on_fault)
        self._ends = Ends(spec, recorder=self.recorder, on_fault=on_fault)
        self._in_model = False  # whether the root being called has parameters: no loss, no metric
        self.parameters = Parameters(held=held, on_fault=on_fault)
        self.thread = 0  # the one that trains, whose calls are followed; 0: not known yet
        self.marks = Marks()  # on what its models have returned in this step
        self._together = together
        self._depth = 0
        self._batch_before: int | None = None
        self._model_called = False  # in this step
        self._epoch = -1  # the step that the last model call belonged to
        self._capture: StepCapture | None = None
        self._native = NativeCalls()
        self._graph: Provenance | None = None  # the provenance, where the current call is followed
        self.tops: dict[int, TopPlan] = {}  # by the module's id
        self._namesakes: dict[str, list[TopPlan]] = {}  # by the class, in order of first calls
        self.provenance: Provenance | None = None
        self._plain: Top | None = None  # the model whose nodes have no prefix
        self.prefixed: bool | None = None  # whether node names carry the root's class; None: open
        self._strays = Strays(owners)
        self.observers: Observers | None = None  # for what is compiled, where it stays compiled
        self.functions: CompiledFunctions | None = None  # if the program may have any

    # -- attaching -----------------------------------------------------------------------------

    def install(self) -> None:
        """Puts the hooks on; calling it twice is harmless."""
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
        """Whether the hooks are on."""
        return bool(self._handles)

    @property
    def capture(self) -> StepCapture | None:
        """The record that the call in progress belongs to, None if it is not recorded."""
        return self._capture

    def follow_thread(self, thread: int) -> None:
        """Follows the calls of a thread from now on; 0: of the first that trains."""
        self.thread = thread

    def follow_graph(self, graph: Provenance | None) -> None:
        """Shows what is recorded to whoever follows the dependency graph; None: nobody does."""
        self.provenance = graph

    def observe(self, observers: Observers | None) -> None:
        """Has compiled code show what it computes, from now on; None: it runs eagerly."""
        self.observers = observers

    def know_functions(self, functions: CompiledFunctions) -> None:
        """Notes, from now on, which calls of models are made within compiled functions."""
        self.functions = functions

    @property
    def inside(self) -> bool:
        """Whether a module is being called right now.

        The count of calls alone would not do: Ctrl-C in a notebook leaves calls that never return.
        """
        if not self._handles or self._depth == 0:
            return False
        found = is_called_by_module(sys._getframe(1))
        if not found:
            self.recover()
        return found

    def _claim(self) -> bool:
        """Whether this thread is followed: the first that trains is, and until then all are.

        So is one that has never trained, if that whose step would be recorded next is gone.
        """
        trains = torch.is_grad_enabled()
        with self._together:
            free = self.thread == 0 or (trains and self._calls.abandoned())
            if free and trains:
                self.thread = here()
        return free

    def recover(self) -> None:
        """Forgets calls that never returned: Ctrl-C in a notebook runs no hook."""
        self._depth = 0

    def remove(self) -> None:
        """Takes every hook off."""
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
        """Reads what is known only when the step ends, and lets go of its tensors."""
        with without_functions():
            self.parameters.finish(capture)
        self._release()

    def _release(self) -> None:
        self._ends.targets.stop()
        self._recomputed.clear()
        self.recorder.release()
        self.parameters.release()

    def _hook_late(self, plan: ModulePlan) -> None:
        """A module's own hooks may replace what it takes: ours must run after them."""
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
            self.direct.entered[get_ident()] = module
            if self.observers is not None and self._is_compiled(module):
                return
            # what `is_no_step` asks, with no call of ours: this runs at each call of each module
            if graph_task() != -1 or tracing_state() is not None:
                return
            mine = here()
            if mine != self.thread and not self._claim():
                return
            # A global pre hook is not given keyword arguments: its caller's frame has them.
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
        """The `forward` of a module is called without the module being called."""
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
        """A call begins in the thread `mine`; returns whether it is followed.

        Another thread may be, just now: so this is asked while no other one can change it.
        """
        with self._together:
            if self.thread not in (0, mine):
                return False
            self._depth += 1
            if self._depth == 1:
                self._calls.entered()
                if self.functions is not None:
                    self.functions.calls(module, sys._getframe(1))
                with without_functions():
                    self._enter_root(module, args, kwargs)
            return True

    @guarded
    def after_direct(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The `forward` has returned; None if it failed."""
        self._finish(module, args, output)

    def before_compiled(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A compiled function that shows what it does calls a module."""
        mine = here()
        if not (is_no_step() or (mine != self.thread and not self._claim())):
            self._descend(mine, module, args, kwargs)

    @guarded
    def after_compiled(self) -> None:
        """That module has returned."""
        if not is_no_step() and self.thread in (0, here()) and self._handles:
            self._depth = max(0, self._depth - 1)
            if self._depth == 0:
                self._leave_root(self._capture, (), None)

    def before_function(self) -> None:
        """A compiled function begins that shows what it does, and calls models."""
        self._ends.targets.interrupt()

    def given(self, tensor: torch.Tensor) -> None:
        """It was given what a model in it is called with: that is no target, there or outside."""
        self._ends.targets.know(tensor)

    def target(self, tensor: torch.Tensor) -> None:
        """It has met a target, outside of models."""
        if self._capture is None or not self._in_model:
            self._ends.targets.shown(tensor)

    def after_function(self, returned: Any) -> None:
        """It has returned; or it has failed, and so have the calls that it was in."""
        self._depth, self._capture = 0, None
        self._ends.targets.know(returned)
        self._ends.targets.resume()

    def _is_compiled(self, module: nn.Module) -> bool:
        """Whether this is the graph of a compiled function, which some backends call as a module.

        The modules that it has compiled tell of themselves.
        """
        within = self.observers is not None and self.observers.within_function
        return within and isinstance(module, torch.fx.GraphModule) and id(module) not in self._plans

    def plans_of(self, module: nn.Module) -> list[ModulePlan]:
        """Returns the plans of the modules of a model that is called, or a part of it."""
        return self._adopt(module).modules

    def _enter_native(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if self._graph is not None and self._graph is self.provenance:
            self._native.enter(module, args, kwargs, self._graph)

    @guarded
    def _before_late(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        """Keyword arguments are missing if tracing was ended by another hook of this very call."""
        if kwargs is not None and not is_no_step():
            self._take_inputs(module, args, kwargs)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The hooks were put on within the call of an outermost module that begins now."""
        self._depth = 1
        with without_functions():
            self._enter_root(module, args, dict(kwargs))
        if module._forward_hooks:
            self._come_after(module)
        if self._reads_inputs:
            self._take_inputs(module, args, dict(kwargs))

    def _come_after(self, module: nn.Module) -> None:
        """A module's own hooks may replace what it returns: for this call, ours runs after them.

        Between calls it has none, so the program may copy it, save it or make a script of it.
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
        """The module's own hooks come next: what they compute from its output comes from it."""
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
        # While an error is handled, torch may be going through the hooks themselves, not a copy.
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
        # what `is_no_step` asks, with no call of ours, as in `_before`
        no_step = graph_task() != -1 or tracing_state() is not None
        if no_step or self.thread not in (0, here()):
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
                    # no mode, ours or the program's, and no class of tensors sees what we read
                    with without_functions():
                        self._record(plan, capture, args, output)
        elif capture is not None and module._parameters and self._depth > 1:
            self._strays.see(module)
        if self._depth:  # else installed inside a call: its end only
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
                    capture, (args, output), self.provenance, within_compiled=within_compiled
                )
        if capture is not None and capture.categories is not None:
            capture.categories.leave(output)
        if capture is not None and capture.aside and self._batch_before is not None:
            capture.batch_size = self._batch_before  # the one that is trained on is the step's
        self._calls.left()
        if not within_compiled:
            self._ends.targets.resume()  # below the graph's mode, which sees targets after it

    def _enter_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = self._adopt(module)
        modes.sweep()
        known = plan.top.parametric and module is plan.top.module()  # a model may get them later
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
        if self._in_model:
            capture.note_mode(plan.top.label, module)
        if not self._in_model and self._prepares(plan, args, kwargs):
            self._in_model = True
        self._model_called = self._model_called or self._in_model
        self._batch_before = capture.batch_size
        capture.batch_size = first_batch_size(args, kwargs) or capture.batch_size
        if capture.categories is not None:
            capture.categories.enter(module, args, kwargs, capture.batch_size)
        if self.observers is not None:
            self.observers.place(plan.modules)
        if plan.top.parametric and capture.count(plan) == 0:
            self.parameters.read(plan, capture)
        if self._in_model:
            self._ends.read_inputs(capture, args, kwargs, self._graph)

    def _prepares(self, plan: TopPlan, args: Any, kwargs: Any) -> bool:
        """Whether a part of a model that has no parameters is given what the model is given.

        Nothing of the model has been called in this step; a loss is called after it.
        """
        if self._model_called or not plan.top.parametric:
            return False
        return all(gradient_function(tensor) is None for _, tensor in tensors_in((args, kwargs)))

    def _begin(self, capture: StepCapture) -> None:
        """The first model of a step is called; the step before may have been dropped."""
        self._epoch = capture.epoch
        self._model_called = False
        self.marks.renew()
        self._ends.targets.begin()
        self.recorder.release()
        self.parameters.begin()

    def _adopt(self, root: nn.Module) -> TopPlan:
        """Plans a root module when it is first called: names, selection, slots."""
        module = self._owners.top_of(root)
        plan = self.tops.get(id(module))
        if plan is None or plan.top.module() is not module:
            for part in module.modules():  # one that was called while the model was being built
                self.tops.pop(id(part), None)
            self._owners.know(module)
            plan = self.tops[id(module)] = self._named(module)
        if plan.version != self._owners.version:
            plan.version = self._owners.version
            if plan.renew(module):
                self._take_in(plan)
        return plan

    def _named(self, module: nn.Module) -> TopPlan:
        """Returns a plan whose name no living module has.

        A loss that is made anew in each step (`nn.MSELoss()(out, y)`) is one node all the same, and
        so is what is put around a model anew in each step.
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
        known.append(TopPlan(self._spec, top))
        return known[-1]

    def strays(self) -> str:
        """Returns a sentence about modules that are called and are part of no model, once."""
        return self._strays.sentence()

    def _take_in(self, plan: TopPlan) -> None:
        self._strays.know(part.module for part in plan.parts)
        for module_plan in plan.modules:
            self._plans[id(module_plan.module())] = module_plan
            self._hook_late(module_plan)
        self.parameters.adopt(plan)

    @property
    def called_tops(self) -> list[TopPlan]:
        """The outermost modules that take part in the training, or did before they were gone."""
        known = (plan for plans in self._namesakes.values() for plan in plans)
        return [plan for plan in known if plan.top.takes_part and self._is_top(plan)]

    def _is_top(self, plan: TopPlan) -> bool:
        """Whether a module has not become a part of another one since it was called."""
        module = plan.top.module()
        return module is None or self.tops.get(id(module)) is plan

    def settle_names(self) -> None:
        """Fixes how nodes are named, once the first record shows how many models there are."""
        if self.prefixed is None:
            models = [plan.top for plan in self.tops.values() if plan.top.parametric]
            self.prefixed = len(models) > 1
            self._plain = models[0] if len(models) == 1 else None

    def go_on_from(self, before: ModuleTracer) -> None:
        """Takes over what nodes are called, after the spec has changed."""
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
        """Whether nodes have the class in front: of all models but a single one, or the first.

        Those of losses have: their parts may be called like parts of the model.
        """
        if not top.parametric:
            return True
        if self.prefixed is None:
            return sum(plan.top.parametric for plan in self.tops.values()) > 1
        return self.prefixed or top is not self._plain

    # -- reading tensors -----------------------------------------------------------------------

    def _record(self, plan: ModulePlan, capture: StepCapture, args: Any, output: Any) -> None:
        """Reads what a selected module has returned, and waits for its gradients."""
        wanted = plan.capture
        iteration = capture.iteration(plan, plan.node)
        if iteration is None:
            return
        slot_of = partial(plan.slot, iteration=iteration)
        graph = self._graph
        if wanted.output_grad and capture.followed and not torch.is_grad_enabled():
            self._recomputed.first(plan, iteration, capture)
        # nearly all modules return one plain tensor
        plain = type(output) is torch.Tensor
        for path, tensor in (("", output),) if plain else tensors_in(output):
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
        """Reads what a selected module is given; it is another node's tensor, so no edge."""
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
        """What the program has named itself needs no finding."""
        self._ends.targets.know_named(value)

    def rest(self) -> None:
        """The program evaluates: there is no target before it trains again."""
        self._ends.targets.rest()

    def before_optimizer(
        self, capture: StepCapture, optimizer: torch.optim.Optimizer, *, closure: bool
    ) -> None:
        """Reads what an optimizer is given; its arithmetic is none of the loss."""
        self._ends.targets.rest()
        if self.functions is not None:
            self.functions.ends(sys._getframe(1))
        with without_functions():
            self.parameters.before_step(optimizer, capture, closure=closure)

    def after_optimizer(self, capture: StepCapture, optimizer: torch.optim.Optimizer) -> None:
        """Reads what an optimizer has made of the gradients."""
        with without_functions():
            self.parameters.after_step(optimizer, capture)

    def after_hand(self, capture: StepCapture) -> None:
        """Reads the gradients of a step that the program has ended itself."""
        with without_functions():
            self.parameters.after_hand(capture)

    def read_loss(self, capture: StepCapture, loss: torch.Tensor, backwarded: torch.Tensor) -> None:
        """Reads a tensor that `backward()` was called on (`loss`: before the AMP scale)."""
        if self.functions is not None:
            self.functions.ends(sys._getframe(1))
        self._ends.read_loss(capture, loss, backwarded, self.provenance)

    def parameter_slot(self, tensor: torch.Tensor) -> Slot | None:
        """Returns the slot of a parameter or buffer that is traced, else None."""
        plan = self.parameters.plan_of(tensor)
        return plan.slot if plan is not None else None
