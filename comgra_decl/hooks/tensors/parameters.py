"""Read tensors of models and optimizers: parameters, gradients, updates, states, buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.hand_updates import Written
from comgra_decl.hooks.tensors.gradients import unused
from comgra_decl.hooks.tensors.outside_writes import OutsideWrites
from comgra_decl.records import OPTIMIZERS, TELLING
from comgra_decl.stats.support import is_allocated
from comgra_decl.torch_private import add_all, copy_all, negate_all, without_functions

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.hooks.plans import TensorPlan, TopPlan
    from comgra_decl.hooks.tensors.capture import StepCapture

_UNINITIALIZED = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
_NARROW = (torch.float16, torch.bfloat16)
_MOST_COPIED = 32 << 20
"""Maximum size, in bytes, of updates that are read together if their dtype differs from that of
their parameters."""


def takes_lists(tensor: torch.Tensor) -> bool:
    """Whether a single launch covers many such tensors; otherwise, torch loops over them."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_cuda


class Parameters:
    """Reads the tensors that outlive a step, each at the time when its value is meaningful.

    Parameters and buffers are read when the forward pass begins. Gradients, optimizer states and
    updates are read around the optimizer step. No event signals a manual update such as `p -= lr *
    p.grad`. Its gradients are therefore copied when backward ends, and its effect is visible only
    in the next forward pass. If there is also an optimizer step, gradients of manual updates are
    read when the step ends. This applies to parameters that no optimizer holds and that have
    changed since the last record.

    Args:
        held: returns the ids of the parameters that optimizers hold.
        on_fault: called with an exception raised by tracing in backward, which never reaches the
            program.

    Attributes:
        turns: how often a parameter was found to be trained, or frozen, unlike before.
    """

    def __init__(
        self, *, held: Callable[[], Collection[int]], on_fault: Callable[[BaseException], None]
    ) -> None:
        self._on_fault = on_fault
        self._plans: dict[int, TensorPlan] = {}  # by the id of the parameter or buffer
        self._updates = self._states = False  # whether any plan captures them
        self._used: dict[TensorPlan, torch.Tensor] = {}  # of the models called in this step
        self._lent: list[TensorPlan] = []  # replaced by another tensor during a call
        self._handles: list[RemovableHandle] = []
        self._watched: set[int] = set()
        self._before: dict[int, torch.Tensor] = {}  # parameters before the optimizer step
        # during an optimizer step: the optimizer, and its traced parameters
        self._optimizer: torch.optim.Optimizer | None = None
        self._stepping: list[tuple[TensorPlan, torch.Tensor]] = []
        self._raw: dict[TensorPlan, torch.Tensor] = {}
        # gradients after backward: the tensors, their versions, copies
        self._left: dict[TensorPlan, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._shares: dict[TensorPlan, dict[str, torch.Tensor]] = {}
        self._read_gradients = False  # whether the gradients in the running step were read
        self._is_clean = True  # whether no data of any step is held
        self._read_of: dict[TensorPlan, torch.Tensor | None] = {}  # gradients read in this step
        # at the forward pass: the gradient and its version
        self._found: dict[TensorPlan, tuple[torch.Tensor | None, int]] = {}
        self._held = held
        self._facts: dict[int, _Facts] = {}  # about optimizers, by id
        self._writes = OutsideWrites()
        self.turns = 0

    # -- plans of tensors ----------------------------------------------------------------------

    def adopt(self, plan: TopPlan) -> None:
        """Add the parameters and buffers of a model at its first call."""
        for tensor_plan in (*plan.parameters, *plan.buffers):
            self._plans[id(tensor_plan.tensor)] = tensor_plan
            self._updates = self._updates or tensor_plan.capture.update
            self._states = self._states or tensor_plan.capture.optimizer_state
        if self._optimizer is not None:  # a closure: the model is discovered within the step
            self._stepping = self._stepped_by(self._optimizer)
            self._remember(self._stepping)

    def _take_back(self) -> None:
        """Restore the plans of the modules' own tensors (see `torch.func.functional_call`)."""
        for plan in self._lent:
            self._plans[id(plan.tensor)] = plan
        self._lent.clear()

    def plan_of(self, tensor: torch.Tensor | None) -> TensorPlan | None:
        """Return the plan of a traced parameter or buffer, None for any other tensor."""
        plan = self._plans.get(id(tensor))
        return plan if plan is not None and plan.tensor is tensor else None

    # -- the forward pass begins ---------------------------------------------------------------

    def read(self, plan: TopPlan, capture: StepCapture) -> None:
        """Read the parameters and buffers that the upcoming forward pass will use."""
        self._is_clean = False
        plans, used, found = self._plans, self._used, self._found  # runs for each parameter
        for tensor_plan in (*plan.parameters, *plan.buffers):
            tensor = tensor_plan.tensor
            if tensor is None:
                continue
            buffer = tensor_plan.is_buffer
            # check the type first: `isinstance` of a parameter uses a slow metaclass
            if type(tensor) is not nn.Parameter:
                if isinstance(tensor, _UNINITIALIZED):
                    continue
                if type(tensor) is torch.Tensor and not buffer:
                    self._lent.append(tensor_plan)
            plans[id(tensor)] = tensor_plan
            used[tensor_plan] = tensor
            wanted = tensor_plan.capture
            if (
                not buffer
                and wanted.parameter_grad
                and tensor_plan not in found
                and not tensor.is_inference()
            ):
                # the state before the step, to determine what the step changes
                gradient = tensor.grad
                found[tensor_plan] = gradient, 0 if gradient is None else gradient._version
                tensor_plan.moved = False
                if tensor_plan.look is not None:
                    _look_again(tensor_plan, tensor)
            if wanted.buffer if buffer else wanted.parameter:
                capture.add(tensor_plan.slot, tensor, batch_dim=None, values=wanted.values)
            if wanted.parameter_grad_raw and capture.followed:
                self._watch(tensor_plan, tensor, capture)

    def _watch(self, plan: TensorPlan, parameter: torch.Tensor, capture: StepCapture) -> None:
        """Register hooks that receive a parameter's gradients before clipping or clearing."""
        if plan.is_buffer or not parameter.requires_grad or id(parameter) in self._watched:
            return
        self._watched.add(id(parameter))
        share = partial(self._on_share, capture, capture.epoch, plan)
        left = partial(self._on_accumulated, capture, capture.epoch, plan)
        self._handles.append(parameter.register_hook(unserializable_hook(share)))
        self._handles.append(parameter.register_post_accumulate_grad_hook(left))

    # -- backward ------------------------------------------------------------------------------

    def _on_share(
        self, capture: StepCapture, epoch: int, plan: TensorPlan, gradient: torch.Tensor | None
    ) -> None:
        pass_ = capture.backwards.current
        if capture.epoch != epoch or not capture.open or pass_ is None:
            return
        if gradient is None:  # compiled code passes None for a parameter that was not used
            return
        try:
            with without_functions(), torch.no_grad():
                shares = self._shares.setdefault(plan, {})
                known = shares.get(pass_)
                new = gradient.detach()
                shares[pass_] = new.clone() if known is None else known + new
        except Exception as error:
            self._on_fault(error)

    @guarded
    def _on_accumulated(
        self, capture: StepCapture, epoch: int, plan: TensorPlan, parameter: torch.Tensor
    ) -> None:
        if capture.epoch != epoch or not capture.open or parameter.grad is None:
            return
        with without_functions(), torch.no_grad():
            self._raw[plan] = parameter.grad.detach().clone()

    # -- manual updates ------------------------------------------------------------------------

    def keep_gradients(self) -> None:
        """Copy the gradients after `backward`, before the program uses and clears them."""
        with without_functions(), torch.no_grad():
            for plan in self._used:
                parameter = plan.tensor
                if plan.capture.parameter_grad and parameter is not None:
                    gradient = parameter.grad
                    if gradient is not None:
                        self._left[plan] = gradient, gradient._version, gradient.detach().clone()

    def after_hand(self, capture: StepCapture) -> None:
        """Read the gradients in a step that ended with a manual update.

        A gradient is read as used by the update, for example after clipping. If a gradient was
        cleared in place, it is read as it was after backward.
        """
        for plan, (gradient, version, copy) in self._left.items():
            parameter = plan.tensor
            kept = parameter is not None and parameter.grad is gradient
            changed = kept and gradient._version != version
            cleared = changed and not (gradient.is_cpu and bool(gradient.any()))
            used = copy if cleared else gradient
            slot = unused(capture, plan.slot, "grad")
            capture.add(slot, used, batch_dim=None, values=plan.capture.values)
            self._read_of[plan] = parameter
        self._left.clear()

    # -- the optimizer's step ------------------------------------------------------------------

    def before_step(
        self, optimizer: torch.optim.Optimizer, capture: StepCapture, *, closure: bool
    ) -> None:
        """Read the gradients before an optimizer step, and copy what the step will change.

        Some optimizers write to gradients as they step. Gradients that a closure will compute, or
        that the optimizer itself will unscale, are read after the step.
        """
        self._is_clean = False
        self._take_back()
        self._optimizer = optimizer
        capture.facts[OPTIMIZERS].append(self._facts_of(optimizer))
        self._stepping = self._stepped_by(optimizer)
        written = self._writes.before_step(optimizer, self._stepping)
        if written is not None:
            capture.facts[TELLING].append(written)
        if self._updates:
            self._remember(self._stepping)
        self._read_gradients = not closure and getattr(optimizer, "grad_scale", None) is None
        if self._read_gradients and capture.open:
            with capture.together():
                for plan, parameter in self._stepping:
                    self._read_gradient(plan, parameter, capture)

    def _facts_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the facts about an optimizer: those of its last step if no option has changed."""
        options: list[Any] = []
        for group in optimizer.param_groups:
            options += len(group["params"]), *map(group.get, _OPTIONS)
        # tensors may change in place, and comparing one with a number may wait for a device
        kinds = [*map(type, options)]
        known = self._facts.get(id(optimizer))
        if known is not None and known.describes(optimizer, kinds, options):
            return known.facts
        facts = _facts(optimizer)
        plain = not any(issubclass(kind, torch.Tensor) for kind in kinds)
        if len(self._facts) >= _MOST_OPTIMIZERS:
            self._facts.clear()
        if plain:
            self._facts[id(optimizer)] = _Facts(weakref.ref(optimizer), kinds, options, facts)
        return facts

    def _stepped_by(
        self, optimizer: torch.optim.Optimizer
    ) -> list[tuple[TensorPlan, torch.Tensor]]:
        plans, used = self._plans, self._used
        stepped: list[tuple[TensorPlan, torch.Tensor]] = []
        for group in optimizer.param_groups:  # no generators, since this runs in each recorded step
            parameter: torch.Tensor
            for parameter in group["params"]:
                plan = plans.get(id(parameter))
                if plan is not None and (used.get(plan) is parameter or plan.tensor is parameter):
                    stepped.append((plan, parameter))
        return stepped

    def _read_gradient(
        self, plan: TensorPlan, parameter: torch.Tensor, capture: StepCapture
    ) -> None:
        gradient = parameter.grad
        if gradient is not None and plan.capture.parameter_grad:
            slot = unused(capture, plan.slot, "grad")
            capture.add(slot, gradient, batch_dim=None, values=plan.capture.values)
            self._read_of[plan] = parameter

    def _remember(self, stepping: Iterable[tuple[TensorPlan, torch.Tensor]]) -> None:
        wanted = [p for plan, p in stepping if plan.capture.update and p.requires_grad]
        several = [p for p in wanted if takes_lists(p)]
        if several:
            sources = [p.detach() for p in several]
            copies = [torch.empty_like(p) for p in sources]
            copy_all(copies, sources)
            self._before.update((id(p), copy) for p, copy in zip(several, copies, strict=True))
        for parameter in wanted:
            if not takes_lists(parameter):
                self._before[id(parameter)] = parameter.detach().clone()

    def after_step(self, optimizer: torch.optim.Optimizer, capture: StepCapture) -> None:
        """Read updates, optimizer states and remaining gradients after an optimizer step."""
        self._take_back()
        self._writes.after_step(optimizer)
        known = self._optimizer is optimizer
        stepping = self._stepping if known else self._stepped_by(optimizer)
        self._optimizer, self._stepping = None, []
        read, self._read_gradients = self._read_gradients, False
        if not read or self._raw:
            with capture.together():
                for plan, parameter in stepping:
                    if not read:
                        self._read_gradient(plan, parameter, capture)
                    self._write_raw(plan, capture)
        if self._before:
            self._write_updates(stepping, capture)
        self._before.clear()
        if self._states and not isinstance(
            optimizer, torch.optim.LBFGS
        ):  # one state for all its parameters
            wanted = [(plan, p) for plan, p in stepping if plan.capture.optimizer_state]
            if wanted:
                self._write_states(wanted, optimizer, capture)

    def _write_raw(self, plan: TensorPlan, capture: StepCapture) -> None:
        gradient = self._raw.pop(plan, None)
        if gradient is not None:
            slot = unused(capture, plan.slot, "grad:raw")
            capture.add(slot, gradient, batch_dim=None, values=plan.capture.values)

    def _write_updates(
        self, stepping: Iterable[tuple[TensorPlan, torch.Tensor]], capture: StepCapture
    ) -> None:
        """Read the updates together, in parts whose memory use is limited."""
        pairs: list[tuple[TensorPlan, torch.Tensor, torch.Tensor]] = []
        copied = 0
        for plan, parameter in stepping:
            before, after = self._before.pop(id(parameter), None), parameter.detach()
            if before is None or before.shape != after.shape:
                continue
            if after.dtype in _NARROW:  # their difference is rarely representable in their dtype
                before = before.float()
                copied += before.nbytes
            pairs.append((plan, before, after))
            if copied >= _MOST_COPIED:
                _read_updates(pairs, capture)
                pairs, copied = [], 0
        _read_updates(pairs, capture)

    def _write_states(
        self,
        stepping: Iterable[tuple[TensorPlan, torch.Tensor]],
        optimizer: torch.optim.Optimizer,
        capture: StepCapture,
    ) -> None:
        with capture.together():
            for plan, parameter in stepping:
                self._write_state(plan, optimizer.state.get(parameter, {}), capture)

    def _write_state(self, plan: TensorPlan, state: dict[str, Any], capture: StepCapture) -> None:
        """Read moments and similar tensors, but not step counters."""
        iteration = capture.count((plan, "state"))
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                slot = plan.state(name, iteration)
                capture.add(slot, value, batch_dim=None, values=plan.capture.values)

    # -- the step ends -------------------------------------------------------------------------

    def finish(self, capture: StepCapture) -> None:
        """Read the remaining gradients, and what individual backward passes contributed.

        The data held for the step is dropped by `release`.
        """
        if self._raw or self._shares:
            with capture.together():
                for plan in list(self._raw):
                    self._write_raw(plan, capture)
                self._write_shares(capture)
        fresh = self._fresh()
        if self._read_of:  # an optimizer has stepped
            self._read_beside(fresh, capture)

    def _write_shares(self, capture: StepCapture) -> None:
        for plan, shares in self._shares.items():
            for pass_, gradient in shares.items() if len(shares) > 1 else ():
                slot = unused(capture, plan.slot, capture.backwards.share(pass_))
                capture.add(slot, gradient, batch_dim=None, values=plan.capture.values)

    def _fresh(self) -> list[TensorPlan]:
        """Return the parameters whose gradients were created or changed in this step.

        Parameters that were read at an optimizer step and still require gradients are left out.
        """
        fresh = []
        for plan, (before, version) in self._found.items():
            parameter = self._read_of.get(plan)
            if parameter is not None and parameter.requires_grad:  # nearly all
                if not plan.trainable:
                    plan.trainable = True
                    self.turns += 1
                continue
            parameter = plan.tensor
            gradient = None if parameter is None else parameter.grad
            changed = gradient is not None and (
                gradient is not before or gradient._version != version
            )
            # some are trained in turns and frozen in between
            trainable = changed or (parameter is not None and parameter.requires_grad)
            self.turns += trainable is not plan.trainable
            plan.trainable = trainable
            if changed:
                fresh.append(plan)
        return fresh

    def _read_beside(self, fresh: list[TensorPlan], capture: StepCapture) -> None:
        """Read the gradients of parameters that the program updates without an optimizer."""
        others = [plan for plan in fresh if plan not in self._read_of]
        held = self._held() if others else ()
        for plan in others:
            parameter = plan.tensor
            if parameter is None or id(parameter) in held:
                continue
            if plan.moved or (plan.look is not None and plan.look.is_written()):
                self._read_gradient(plan, parameter, capture)
            if is_allocated(parameter):
                plan.look = Written.at(parameter)

    def begin(self) -> None:
        """Prepare for a step; drop the data of the previous one."""
        if self._is_clean:  # the usual case: the previous step has ended
            return
        self._is_clean = True
        for handle in self._handles:
            handle.remove()
        for held in (self._handles, self._watched, self._raw, self._left, self._shares, self._lent):
            held.clear()
        self._read_of.clear()
        self._found.clear()
        self._used.clear()

    def release(self) -> None:
        """Remove the hooks and release all tensors."""
        self.begin()
        self._before.clear()
        self._optimizer, self._stepping = None, []


def _read_updates(
    pairs: Collection[tuple[TensorPlan, torch.Tensor, torch.Tensor]], capture: StepCapture
) -> None:
    """Read the updates of parameters from their values before and after the step.

    The results overwrite the values from before the step, because their memory is still in the
    caches.
    """
    several = [(b, a) for _, b, a in pairs if takes_lists(a) and a.dtype is b.dtype]
    if several:  # a few launches for all; the same as a subtraction, bit for bit
        before, after = map(list, zip(*several, strict=True))
        negate_all(before)
        add_all(before, after)
    with capture.together():
        for plan, update, parameter in pairs:
            if not (takes_lists(parameter) and parameter.dtype is update.dtype):
                torch.sub(parameter, update, out=update)
            slot = unused(capture, plan.slot, "update")
            capture.add(slot, update, batch_dim=None, values=plan.capture.values)


def _look_again(plan: TensorPlan, parameter: torch.Tensor) -> None:
    """Compare a parameter that no optimizer holds with the last snapshot, and take a new one."""
    look = plan.look
    plan.moved = look is not None and look.parameter() is parameter and look.is_written()
    plan.look = Written.at(parameter) if is_allocated(parameter) else None


_OPTIONS = ("lr", "initial_lr", "weight_decay", "momentum", "betas", "maximize")
"""Options of parameter groups that are stored as a fact in a record."""


_MOST_OPTIMIZERS = 64  # whose facts are kept


class _Facts(NamedTuple):
    """The facts about an optimizer and the options from which they were derived."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    kinds: list[type]
    options: list[Any]
    facts: dict[str, Any]

    def describes(
        self, optimizer: torch.optim.Optimizer, kinds: list[type], options: list[Any]
    ) -> bool:
        known = self.optimizer() is optimizer
        return known and self.kinds == kinds and self.options == options


def _facts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the fact described by `records.OPTIMIZERS`; read no data from a device."""
    groups = []
    for group in optimizer.param_groups:
        facts: dict[str, Any] = {"parameters": len(group["params"])}
        for name in _OPTIONS:
            value = group.get(name)
            if type(value) is float:  # before `isinstance` of a tensor, which is slow
                facts[name] = value
                continue
            if isinstance(value, torch.Tensor):
                value = float(value) if value.device.type == "cpu" else None
            if isinstance(value, (bool, int, float)):
                facts[name] = value
            elif isinstance(value, tuple) and all(isinstance(v, (int, float)) for v in value):
                facts[name] = [*value]
        groups.append(facts)
    return {"class": type(optimizer).__name__, "groups": groups}
