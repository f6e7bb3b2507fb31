"""Record function calls made by modules: softmax inside attention, or the program's own functions.

The classes here are used only if the spec selects functions or requests attention weights, and are
active only in recorded steps. In evaluation, a torch function mode would change which kernels some
layers run, so the mode is removed while those layers are called. Anything that such a layer
computes in a single native call is not visible.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from comgra_decl.hooks.call_context import is_no_step, torch_variable
from comgra_decl.hooks.functions import attention
from comgra_decl.hooks.functions.lookup import Found, find
from comgra_decl.hooks.functions.sites import NOTHING, CallPlan, Inside, Series, Sites
from comgra_decl.hooks.functions.watching import Watching
from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.modes import is_active
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.hooks.tensors.fast_paths import may_run_natively
from comgra_decl.hooks.tensors.recorder import Reshape, TensorRecorder, Wanted
from comgra_decl.spec.axes import RECOMPUTED
from comgra_decl.spec.calls import CallRule, call_rules
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.hooks.graph.provenance import Provenance
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.tracer import ModuleTracer
    from comgra_decl.spec import Spec


@dataclass(eq=False, slots=True)
class _Running:
    """A running module, and the tensors recorded inside it whose edges the graph lacks."""

    module: nn.Module
    inside: Inside = NOTHING
    given: tuple[Any, ...] = ()
    paused: bool = False  # whether the mode was removed for this module
    hidden: list[torch.Tensor] = field(default_factory=list)

    @property
    def origins(self) -> list[torch.Tensor]:
        """The tensors on which anything computed inside may depend."""
        return [*(t for _, t in tensors_in(self.given)), *self.module.parameters(recurse=False)]


class _Call(NamedTuple):
    """A call whose result will be recorded."""

    plan: CallPlan | None
    attention: Series | None
    iteration: int
    capture: StepCapture
    graph: Provenance | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def wants_calls(spec: Spec) -> bool:
    """Return whether a spec selects functions or requests attention weights."""
    entries = spec.nodes.values()
    return bool(call_rules(spec)) or any(e.attention and e.attention.recompute for e in entries)


class FunctionTracer:
    """Tracks which module is running, and records the calls made inside it.

    Args:
        spec: selects what to capture.
        tracer: provides the models, and the record to which a call belongs.
        recorder: reads the tensors.
        training: the record of training steps, for calls outside any module.
        on_fault: called with an exception in tracing itself, which never reaches the program.
    """

    def __init__(
        self,
        spec: Spec,
        tracer: ModuleTracer,
        *,
        recorder: TensorRecorder,
        training: StepCapture,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._tracer = tracer
        self._recorder = recorder
        self._training = training
        self._on_fault = on_fault
        # Samples selected by category are chosen later, so all of them must be available.
        self._samples = spec.samples.count if spec.samples.by is None else sys.maxsize
        self._most = spec.values.max_elements
        self._watching = Watching(self, on_fault=on_fault)
        found = [find(rule.function) for rule in call_rules(spec)]
        names = _one_name_each([*found, find(attention.FUNCTION)])
        self._attention = names[attention.FUNCTION]
        self.rules = [replace(r, function=names[r.function]) for r in call_rules(spec)]
        self._sites = Sites(spec, self.rules)
        self._anywhere = bool(self._sites.outside.calls)
        wanted = {rule.function for rule in self.rules}
        if any(e.attention and e.attention.recompute for e in spec.nodes.values()):
            wanted.add(self._attention)
        self._missing: dict[str, Found] = {name: Found(name) for name in sorted(wanted)}
        self._handles: list[RemovableHandle] = []
        self._stack: list[_Running] = []
        self._stepping = False

    # -- attaching -----------------------------------------------------------------------------

    def install(self) -> None:
        """Start tracking module calls. Idempotent."""
        self._stepping = False
        if not self._tracer.inside:
            self._stack.clear()  # calls that never returned: Ctrl-C in a notebook runs no hook
        if self._handles:
            return
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    @guarded
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Enter a module whose hooks do not run."""
        if not is_no_step():
            self._begin(module, args, dict(kwargs))

    def leave(self, module: nn.Module, output: Any) -> None:
        """Leave a module whose hooks do not run."""
        self._after(module, (), output)

    def remove(self) -> None:
        """Remove all hooks and patches."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()
        self._watching.stop()

    def leave_training(self) -> None:
        """Stop treating calls outside modules as part of training."""
        if not self._stack:
            self._watching.stop()

    def before_optimizer(self) -> None:
        """Stop watching during an optimizer step, except for model calls in a closure."""
        self._stepping = True
        self.leave_training()

    # -- following modules ---------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any) -> None:
        try:
            if is_no_step():
                return
            # A global pre-hook receives no keyword arguments, but its caller's frame has them.
            self._begin(module, args, torch_variable(sys._getframe(1), "kwargs") or {})
        except Exception as error:
            self._on_fault(error)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outer = self._stack[-1].inside if self._stack else self._enter()
        running = _Running(module)
        if self._tracer.capture is not None:
            tops = () if self._stack else self._tracer.tops.values()
            running.inside = outer.nested(self._sites.inside(module, tops))
            running.given = (args, kwargs)
            native = may_run_natively(module, args, kwargs)
            running.paused = native and self._watching.pause()
        self._stack.append(running)

    def _enter(self) -> Inside:
        """Start watching calls when a model is called."""
        if self._tracer.capture is None:
            self._watching.stop()
            return NOTHING
        self._find_missing()
        self._watching.start(self._tracer.provenance)
        return NOTHING

    def _find_missing(self) -> None:
        for name in list(self._missing):
            found = self._missing[name] = find(name)
            if not found.problem:
                del self._missing[name]
                self._watching.add([found])

    @guarded
    def _after(self, module: nn.Module, _args: Any, output: Any) -> None:
        if is_no_step():
            return
        if not any(running.module is module for running in self._stack):
            return
        while self._stack:
            running = self._stack.pop()
            if running.paused:
                self._watching.resume(self._tracer.provenance)
            if running.module is module:
                self._connect(running.hidden, output)
                break
        outside = self._anywhere and self._training.open and not self._stepping
        if not self._stack and not (outside and getattr(module, "training", False)):
            self._watching.stop()

    def _connect(self, hidden: list[torch.Tensor], output: Any) -> None:
        """Connect tensors computed inside a torch function to the output of the module."""
        if hidden and output is not None and self._tracer.provenance is not None:
            with without_functions():
                self._tracer.provenance.connect(hidden, output, gradient=True)

    # -- following calls -----------------------------------------------------------------------

    def begins(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Prepare to record a watched call at its start; return None if it is not recorded."""
        if is_no_step():
            return None
        inside = self._stack[-1].inside if self._stack else self._sites.outside
        capture = self._tracer.capture if self._stack else self._training
        plan = inside.calls.get(name)
        weights = inside.attention if name == self._attention else None
        if weights is None and plan is not None and plan.capture.attention is not None:
            weights = plan if plan.capture.attention.recompute else None
        if capture is None or not capture.open or (plan is None and weights is None):
            return None
        graph = self._tracer.provenance if capture.followed else None
        iteration = 0 if plan is None else capture.iteration(plan, plan.node)
        if iteration is None:
            return None
        call = _Call(plan, weights, iteration, capture, graph, args, kwargs)
        if plan is not None:
            plan.fired = True
            if plan.capture.input or plan.capture.input_grad:
                self._read(plan, call, "input", list(_arguments(args, kwargs)))
        return call

    def ended(self, token: _Call, result: Any) -> None:
        """Record the result of a watched call."""
        if token.plan is not None:
            self._read(token.plan, token, "output", [("", result)])
        if token.attention is not None:
            self._recompute(token.attention, token)

    def _read(self, plan: CallPlan, call: _Call, side: str, values: list[tuple[str, Any]]) -> None:
        how = plan.capture
        given = side == "input"
        wanted = Wanted(
            tensor=how.input if given else how.output,
            gradient=how.input_grad if given else how.output_grad,
        )
        if not any(wanted):
            return
        inputs = [] if given else [t for _, t in tensors_in((call.args, call.kwargs))]
        hidden: list[torch.Tensor] = []
        if not given and self._stack and call.graph is not None and not is_active(call.graph):
            inputs, hidden = self._stack[-1].origins, self._stack[-1].hidden
        for at, value in values:
            for path, tensor in tensors_in(value):
                reshape = self._heads_apart(plan.function, tensor)
                axes = () if reshape is None else attention.AXES
                self._recorder.read(
                    tensor,
                    f"{side}{at}{path}",
                    partial(plan.slot, iteration=call.iteration, axes=axes),
                    capture=call.capture,
                    how=how,
                    wanted=wanted,
                    graph=None if given else call.graph,
                    inputs=inputs,
                    reshape=reshape,
                )
                hidden.append(tensor)

    def _heads_apart(self, function: str, tensor: torch.Tensor) -> Reshape | None:
        """Return how to tell samples and heads apart in the weights of `nn.MultiheadAttention`.

        If its weights are requested, it computes them as [samples * heads, queries, keys].
        """
        module = self._stack[-1].module if self._stack else None
        if not isinstance(module, nn.MultiheadAttention) or tensor.dim() != 3:
            return None
        if not function.endswith("softmax") or tensor.shape[0] % module.num_heads:
            return None
        shape = (-1, module.num_heads, *tensor.shape[1:])
        return lambda whole: whole.detach().reshape(shape)

    def _recompute(self, series: Series, call: _Call) -> None:
        """Recompute the weights of fused attention if there are few enough of them to store."""
        iteration = call.capture.iteration((series, RECOMPUTED), series.node)
        if iteration is None:
            return
        slot = series.slot(RECOMPUTED, iteration)
        slot = call.capture.in_pass(slot)
        fused = attention.FusedCall(*call.args, **call.kwargs)
        try:
            weights = attention.recomputed_weights(fused, samples=self._samples, most=self._most)
        except ValueError as error:
            call.capture.refused[f"{slot.node()} {slot.role}"] = str(error)
            return
        call.capture.add(slot, weights, batch_dim=0, values=True)

    # -- reporting -----------------------------------------------------------------------------

    def written(self, entry: str) -> tuple[int, int, int]:
        """Return how many nodes an entry can have, how many were called, and their series."""
        plans = list(self._sites.of_entry(entry))
        return len(plans), sum(plan.fired for plan in plans), sum(map(_series, plans))

    @property
    def fired(self) -> int:
        """Number of nodes called so far."""
        return sum(plan.fired for plan in self._sites.plans)

    def unmatched(self) -> Iterator[str]:
        """Yield one sentence for each function that does not exist or was never called.

        Optional functions count only if none of them was called.
        """
        optional = [rule for rule in self.rules if rule.optional]
        if optional and not any(map(self._was_called, optional)):
            names = ", ".join(dict.fromkeys(repr(rule.function) for rule in optional))
            yield f"comgra.nodes: none of the optional functions was called: {names}"
        for rule in self.rules:
            found = self._missing.get(rule.function)
            place = f" within {', '.join(map(repr, rule.within))}" if rule.within else ""
            if found is not None:
                yield f"comgra.nodes.{rule.entry}.select: {found.problem}"
            elif not rule.optional and not self._was_called(rule):
                yield (
                    f"comgra.nodes.{rule.entry}.select: {rule.function!r} was not called{place}; "
                    "calls made inside a native kernel or another torch function are not visible"
                )

    def _was_called(self, rule: CallRule) -> bool:
        plans = self._sites.of_entry(rule.entry)
        return any(plan.fired for plan in plans if plan.function == rule.function)


def _one_name_each(found: list[Found]) -> dict[str, str]:
    """Map each function's name to the first name of the same operation."""
    names: dict[str, str] = {}
    for each in found:
        same = (o.name for o in found if set(o.torch_functions) & set(each.torch_functions))
        names[each.name] = next(same, each.name)
    return names


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (place, argument): "" for a first positional tensor, else "[1]" or ".name"."""
    for index, value in enumerate(args):
        yield ("" if index == 0 and isinstance(value, torch.Tensor) else f"[{index}]"), value
    for name, value in kwargs.items():
        yield f".{name}", value


def _series(plan: CallPlan) -> int:
    slots = plan.slots.values()
    return sum((slot.id >= 0) + len(slot.passes) for slot in slots)
