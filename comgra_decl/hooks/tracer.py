"""The hooks that sit on a program while a step is recorded, and what they do at each call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from comgra_decl.hooks.nested import first_batch_size, tensors_in
from comgra_decl.hooks.plans import ModulePlan, ParameterPlan, TopPlan
from comgra_decl.hooks.slots import Slot
from comgra_decl.hooks.tree import Owners, Top

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.hooks.capture import StepCapture
    from comgra_decl.hooks.provenance import Provenance
    from comgra_decl.spec import Spec

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


_tracing_state: Callable[[], Any] = torch._C._get_tracing_state


def is_no_step() -> bool:
    """Whether a module called now is not part of the training's forward pass.

    While autograd is running it is a recomputation (checkpointing); under `torch.jit.trace` what
    we compute would become part of the traced program.
    """
    return _graph_task() != -1 or _tracing_state() is not None


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
        self._keeps_values = any(entry.values for entry in spec.nodes.values())
        self._owners = owners
        self._choose = choose
        self._left = left
        self._on_fault = on_fault
        self._handles: list[RemovableHandle] = []
        self._late: set[int] = set()  # modules with hooks of their own, which run before ours
        self._plans: dict[int, ModulePlan] = {}
        self._parameters: dict[int, ParameterPlan] = {}
        self._inputs: dict[tuple[str, int], Slot] = {}
        self._losses: dict[int, Slot] = {}
        self._depth = 0
        self._capture: StepCapture | None = None
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

    def _hook_late(self, plan: ModulePlan) -> None:
        """A module's own hooks may replace its output: ours must then run after them."""
        module = plan.module()
        if module is not None and module._forward_hooks and id(module) not in self._late:
            self._late.add(id(module))
            self._handles.append(module.register_forward_hook(self._finish, always_call=True))

    # -- following calls -----------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_no_step():
            return
        self._depth += 1
        if self._depth == 1:
            try:
                # A global pre hook is not given keyword arguments: its caller's frame has them.
                kwargs = sys._getframe(1).f_locals.get("kwargs", {})
                with torch._C.DisableTorchFunction():
                    self._enter_root(module, args, kwargs)
            except Exception as error:
                self._on_fault(error)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if id(module) not in self._late:
            self._finish(module, args, output)

    def _finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_no_step():
            return
        try:
            capture, plan = self._capture, self._plans.get(id(module))
            if capture is not None and plan is not None and plan.module() is module:
                if self._graph is None:
                    self._record(plan, capture, args, output)
                else:
                    with torch._C.DisableTorchFunction():
                        self._record(plan, capture, args, output)
            self._depth = max(0, self._depth - 1)  # installed inside a call: its end only
            if self._depth == 0:
                self._capture = None
                self._left()
        except Exception as error:
            self._on_fault(error)

    def _enter_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = self._adopt(module)
        if not _takes_part(plan.top, args, kwargs):
            self._capture = None
            return
        capture = self._capture = self._choose(module, plan.top)
        self._graph = self.provenance if capture is not None and capture.followed else None
        if capture is None:
            return
        capture.batch_size = first_batch_size(args, kwargs) or capture.batch_size
        if plan.top.parametric and capture.count(plan) == 0:
            self._read_parameters(plan, capture)
        if any(True for _ in module.parameters()):  # not a loss or a metric: those end the model
            self._read_inputs(capture, args, kwargs)

    def _adopt(self, root: nn.Module) -> TopPlan:
        """Plans a root module when it is first called: names, selection, slots."""
        module = self._owners.top_of(root)
        plan = self.tops.get(id(module))
        if plan is None or plan.top.module() is not module:
            top = Top(module, prefixed=self._is_prefixed)
            plan = self.tops[id(module)] = TopPlan(self._spec, top, module)
            for module_plan in plan.modules:
                self._plans[id(module_plan.module())] = module_plan
                self._hook_late(module_plan)
            for parameter_plan in plan.parameters:
                self._parameters[id(parameter_plan.parameter)] = parameter_plan
        return plan

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
        for path, tensor in tensors_in(output):
            slot = plan.slot("output" + path, iteration)
            if wanted.output:
                index = capture.add(slot, tensor, batch_dim=wanted.batch_dim, values=wanted.values)
                if index is None:  # what cannot be reduced has no gradient we could reduce either
                    continue
            if self._graph is not None:
                self._graph.trace(slot, tensor, (t for _, t in tensors_in(args)))
            if wanted.output_grad and tensor.requires_grad:
                dim = capture.batch_dim(tensor, wanted.batch_dim)
                hook = partial(self._on_gradient, capture, capture.epoch, slot, dim, wanted.values)
                tensor.register_hook(hook)

    def _on_gradient(
        self,
        capture: StepCapture,
        epoch: int,
        slot: Slot,
        batch_dim: int | None,
        values: bool,
        gradient: torch.Tensor,
    ) -> None:
        if capture.epoch != epoch or not capture.open:
            return
        try:
            pass_ = slot.gradient(capture.count(slot) + 1)
            capture.add(pass_, gradient, batch_dim=batch_dim, values=values)
        except Exception as error:
            self._on_fault(error)

    def _read_parameters(self, plan: TopPlan, capture: StepCapture) -> None:
        """Reads the weights the coming forward pass will use."""
        for parameter_plan in plan.parameters:
            parameter = parameter_plan.parameter
            if parameter is None or isinstance(parameter, nn.parameter.UninitializedParameter):
                continue
            self._parameters[id(parameter)] = parameter_plan
            if parameter_plan.capture.parameter:
                values = parameter_plan.capture.values
                capture.add(parameter_plan.slot, parameter, batch_dim=None, values=values)

    def read_parameter_gradients(
        self, capture: StepCapture, parameters: Iterable[torch.Tensor]
    ) -> None:
        """Reads the gradients as an optimizer has just used them."""
        for parameter in parameters:
            plan = self._parameters.get(id(parameter))
            if plan is None or plan.parameter is not parameter or parameter.grad is None:
                continue
            if plan.capture.parameter_grad:
                slot = plan.slot.gradient(capture.count(plan) + 1)
                values = plan.capture.values
                capture.add(slot, parameter.grad, batch_dim=None, values=values)

    def _read_inputs(
        self, capture: StepCapture, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        iteration = capture.count("input")
        for path, tensor in (*tensors_in(args), *tensors_in(kwargs)):
            if tensor.grad_fn is not None:  # computed by another part of the model
                continue
            role = "input" if path == "[0]" else f"input{path}"
            slot = self._inputs.get((role, iteration))
            if slot is None:
                slot = Slot(lambda: "input", role, iteration=iteration, kind="input")
                self._inputs[role, iteration] = slot
            capture.add(slot, tensor, batch_dim="auto", values=self._keeps_values)
            if self._graph is not None and not self._graph.of(tensor).all:
                self._graph.trace(slot, tensor)

    def read_loss(self, capture: StepCapture, loss: torch.Tensor, backwarded: torch.Tensor) -> None:
        """Reads a tensor that `backward()` was called on (`loss`: before the AMP scale)."""
        iteration = capture.count("loss")
        slot = self._losses.get(iteration)
        if slot is None:
            slot = Slot(lambda: "loss", "output", iteration=iteration, kind="loss")
            self._losses[iteration] = slot
        index = capture.add(slot, loss, batch_dim=None, values=False)
        if index is not None and loss.numel() == 1:
            capture.kpi_tensors["loss" if iteration == 0 else f"loss[{iteration}]"] = index
        if self.provenance is not None:
            self.provenance.trace(slot, backwarded)

    def parameter_slot(self, tensor: torch.Tensor) -> Slot | None:
        """Returns the slot of a parameter that is traced, else None."""
        plan = self._parameters.get(id(tensor))
        return plan.slot if plan is not None and plan.parameter is tensor else None


def _takes_part(top: Top, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A root without parameters belongs to the model if gradient can flow through it.

    A loss module does; a transform that a data loader applies to every sample does not.
    """
    if not top.takes_part:
        top.takes_part = any(t.requires_grad for _, t in tensors_in((args, kwargs)))
    return top.takes_part
