"""The hooks that sit on a program while a step is recorded, and what they do at each call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from comgra_decl.hooks import modes
from comgra_decl.hooks.calling import is_backward, is_called_by_module, is_no_step
from comgra_decl.hooks.nested import first_batch_size, tensors_in
from comgra_decl.hooks.plans import ModulePlan, TopPlan
from comgra_decl.hooks.reading.ends import Ends, input_role
from comgra_decl.hooks.reading.native import NativeCalls
from comgra_decl.hooks.reading.parameters import Parameters
from comgra_decl.hooks.reading.recomputed import Recomputed
from comgra_decl.hooks.reading.recorder import TensorRecorder
from comgra_decl.hooks.reading.slots import Slot
from comgra_decl.hooks.tree import Owners, Top, has_parameters
from comgra_decl.stats.quiet import function_modes

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.hooks.graph.provenance import Provenance
    from comgra_decl.hooks.reading.capture import StepCapture
    from comgra_decl.spec import Spec


class ModuleTracer:
    """Follows module calls while installed, finding roots by itself.

    Args:
        spec: what to capture.
        owners: who owns which module.
        choose: called with (root module, its top) at each root call; returns the capture this
            call goes to, or None.
        left: called when a root call has returned.
        on_fault: called with an exception of our own; the program never sees it.
    """

    def __init__(
        self,
        spec: Spec,
        owners: Owners,
        *,
        choose: Callable[[nn.Module, Top], StepCapture | None],
        left: Callable[[], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._spec = spec
        wanted = {name for entry in spec.nodes.values() for name in entry.capture}
        self._reads_inputs = bool(wanted & {"input", "input_grad"})
        self._owners = owners
        self._choose = choose
        self._left = left
        self._on_fault = on_fault
        self._handles: list[RemovableHandle] = []
        self._late: set[int] = set()  # modules with hooks of their own, which run before ours
        self._plans: dict[int, ModulePlan] = {}
        self._recorder = TensorRecorder(on_fault=on_fault)
        self._recomputed = Recomputed(self._recorder, on_fault=on_fault)
        self._ends = Ends(spec, recorder=self._recorder, on_fault=on_fault)
        self._in_model = False  # whether the root being called has parameters: no loss, no metric
        self.parameters = Parameters(on_fault=on_fault)
        self.thread = 0  # the one that trains, whose calls are followed; 0: not known yet
        self._depth = 0
        self._epoch = -1  # the step that the last model call belonged to
        self._capture: StepCapture | None = None
        self._native = NativeCalls()
        self._graph: Provenance | None = None  # the provenance, where the current call is followed
        self.tops: dict[int, TopPlan] = {}  # by the module's id
        self.provenance: Provenance | None = None
        self.prefixed: bool | None = None  # whether node names carry the root's class; None: open

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
        """Whether this thread is followed: the first that trains is, and until then all are."""
        claimed = self.thread != 0
        self.thread = self.thread or (get_ident() if torch.is_grad_enabled() else 0)
        return not claimed

    def recover(self) -> None:
        """Forgets calls that never returned: Ctrl-C in a notebook runs no hook."""
        self._depth = 0

    def remove(self) -> None:
        """Takes every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._late.clear()
        self._capture = None
        self._release()

    def finish(self, capture: StepCapture) -> None:
        """Reads what is known only when the step ends, and lets go of its tensors."""
        with torch._C.DisableTorchFunction():
            self.parameters.finish(capture)
        self._release()

    def _release(self) -> None:
        self._ends.targets.stop()
        self._recomputed.clear()
        self._recorder.release()
        self.parameters.release()

    def _hook_late(self, plan: ModulePlan) -> None:
        """A module's own hooks may replace what it takes and returns: ours must run after them."""
        module = plan.module()
        if module is None:
            return
        if module._forward_hooks and id(module) not in self._late:
            self._late.add(id(module))
            self._handles.append(module.register_forward_hook(self._after_late, always_call=True))
        if plan.reads_inputs and module._forward_pre_hooks and -id(module) not in self._late:
            self._late.add(-id(module))
            hook = module.register_forward_pre_hook(self._before_late, with_kwargs=True)
            self._handles.append(hook)

    # -- following calls -----------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        try:
            if is_no_step() or (get_ident() != self.thread and not self._claim()):
                return
            self._depth += 1
            # A global pre hook is not given keyword arguments: its caller's frame has them.
            if self._depth == 1:
                kwargs = sys._getframe(1).f_locals.get("kwargs", {})
                with torch._C.DisableTorchFunction():
                    self._enter_root(module, args, kwargs)
            if self._graph is not None and not module.training:
                self._enter_native(module, args, sys._getframe(1).f_locals.get("kwargs", {}))
            if self._reads_inputs and -id(module) not in self._late:
                self._take_inputs(module, args, sys._getframe(1).f_locals.get("kwargs", {}))
        except Exception as error:
            self._on_fault(error)

    def _enter_native(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if self._graph is not None and self._graph is self.provenance:
            self._native.enter(module, args, kwargs, self._graph)

    def _before_late(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        """Keyword arguments are missing if tracing was ended by another hook of this very call."""
        try:
            if kwargs is not None and not is_no_step():
                self._take_inputs(module, args, kwargs)
        except Exception as error:
            self._on_fault(error)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The hooks were put on within the call of an outermost module that begins now."""
        self._depth = 1
        with torch._C.DisableTorchFunction():
            self._enter_root(module, args, dict(kwargs))
        if self._reads_inputs:
            self._take_inputs(module, args, dict(kwargs))

    def is_evaluation(self, root: nn.Module) -> bool:
        """Whether the call of an outermost module is no part of the training."""
        if root.training:
            return False
        plan = self.tops.get(id(self._owners.top_of(root)))
        return (plan is not None and plan.top.trained) or not torch.is_grad_enabled()

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        try:
            if id(module) not in self._late:
                self._finish(module, args, output)
        except Exception as error:
            self._on_fault(error)

    def _after_late(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        try:
            self._finish(module, args, output)
        except Exception as error:
            self._on_fault(error)

    def _finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_no_step() or self.thread not in (0, get_ident()):
            if self._recomputed.capture is not None and is_backward():
                self._recomputed.read(module, self._plans.get(id(module)), output)
            return
        if self._graph is not None and self._graph is self.provenance:
            self._native.leave(module, output, self._graph)
        capture, plan = self._capture, self._plans.get(id(module))
        if capture is not None and plan is not None and plan.module() is module:
            if not function_modes():  # neither ours nor the program's see what we read
                self._record(plan, capture, args, output)
            else:
                with torch._C.DisableTorchFunction():
                    self._record(plan, capture, args, output)
        self._depth = max(0, self._depth - 1)  # installed inside a call: its end only
        if self._depth == 0:
            self._leave_root(capture, args, output)

    def _leave_root(self, capture: StepCapture | None, args: Any, output: Any) -> None:
        self._capture = None
        if capture is not None and capture.followed and self._in_model:
            self._ends.look_for_targets(capture, (args, output), self.provenance)
        if capture is not None and capture.categories is not None:
            capture.categories.leave(output)
        self._left()
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
        capture = self._capture = self._choose(module, plan.top)
        self._graph = self.provenance if capture is not None and capture.followed else None
        if capture is None:
            return
        if capture.followed and capture.epoch != self._epoch:
            self._begin(capture)
        capture.batch_size = first_batch_size(args, kwargs) or capture.batch_size
        if capture.categories is not None:
            capture.categories.enter(module, args, kwargs, capture.batch_size)
        if plan.top.parametric and capture.count(plan) == 0:
            self.parameters.read(plan, capture)
        if self._in_model:
            self._ends.read_inputs(capture, args, kwargs, self._graph)

    def _begin(self, capture: StepCapture) -> None:
        """The first model of a step is called; the step before may have been dropped."""
        self._epoch = capture.epoch
        self._ends.targets.begin()
        self._recorder.release()
        self.parameters.begin()

    def _adopt(self, root: nn.Module) -> TopPlan:
        """Plans a root module when it is first called: names, selection, slots."""
        module = self._owners.top_of(root)
        plan = self.tops.get(id(module))
        if plan is None or plan.top.module() is not module:
            for part in module.modules():  # one that was called while the model was being built
                self.tops.pop(id(part), None)
            self._owners.know(module)
            top = Top(module, prefixed=self._is_prefixed)
            plan = self.tops[id(module)] = TopPlan(self._spec, top)
        if plan.version != self._owners.version:
            plan.version = self._owners.version
            if plan.renew(module):
                self._take_in(plan)
        return plan

    def _take_in(self, plan: TopPlan) -> None:
        for module_plan in plan.modules:
            self._plans[id(module_plan.module())] = module_plan
            self._hook_late(module_plan)
        self.parameters.adopt(plan)

    @property
    def called_tops(self) -> list[TopPlan]:
        """The outermost modules that take part in the training."""
        return [plan for plan in self.tops.values() if plan.top.takes_part]

    def takes_part(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter belongs to a model that has been called."""
        return any(id(parameter) in plan.parameter_ids for plan in self.tops.values())

    def settle_names(self) -> None:
        """Fixes how nodes are named, once the first record shows how many models there are."""
        if self.prefixed is None:
            self.prefixed = sum(plan.top.parametric for plan in self.tops.values()) > 1

    def _is_prefixed(self, top: Top) -> bool:
        """Several models need their class in front; a single one, and loss modules, do not."""
        models = [plan.top for plan in self.tops.values() if plan.top.parametric]
        if self.prefixed is None or top not in models:
            return len(models) > 1
        return self.prefixed or top is not models[0]

    # -- reading tensors -----------------------------------------------------------------------

    def _record(self, plan: ModulePlan, capture: StepCapture, args: Any, output: Any) -> None:
        wanted = plan.capture
        if output is None:
            return
        plan.fired = True
        if not (wanted.output or wanted.output_grad):
            return
        iteration = capture.count(plan)
        slot_of = partial(plan.slot, iteration=iteration)
        graph = self._graph
        if wanted.output_grad and capture.followed and not torch.is_grad_enabled():
            self._recomputed.first(plan, iteration, capture)
        for path, tensor in tensors_in(output):
            self._recorder.read(
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
        slot_of = partial(plan.slot, iteration=capture.count((plan, "input")))
        with torch._C.DisableTorchFunction():
            for path, tensor in (*tensors_in(args), *tensors_in(kwargs)):
                self._recorder.read(
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

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps what an optimizer is about to change; its arithmetic is none of the loss."""
        self._ends.targets.rest()
        if self.parameters.follows_steps or not self.tops:
            with torch._C.DisableTorchFunction():
                self.parameters.before_step(_parameters(optimizer))

    def after_optimizer(self, capture: StepCapture, optimizer: torch.optim.Optimizer) -> None:
        """Reads the gradients as an optimizer has just used them, and what came of it."""
        with torch._C.DisableTorchFunction():
            self.parameters.after_step(optimizer, _parameters(optimizer), capture)

    def read_loss(self, capture: StepCapture, loss: torch.Tensor, backwarded: torch.Tensor) -> None:
        """Reads a tensor that `backward()` was called on (`loss`: before the AMP scale)."""
        self._ends.read_loss(capture, loss, backwarded, self.provenance)

    def parameter_slot(self, tensor: torch.Tensor) -> Slot | None:
        """Returns the slot of a parameter or buffer that is traced, else None."""
        plan = self.parameters.plan_of(tensor)
        return plan.slot if plan is not None else None


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
