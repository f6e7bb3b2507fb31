"""Test whether a program's networks keep the samples in a batch independent.

A network's output for one sample must not change when the other samples in the batch change. The
test replaces all samples with copies of one sample and compares the outputs for that sample.
BatchNorm, which mixes samples on purpose, is reported separately. For any other mixing, the verdict
names the module in which it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook

from comgra_decl.experiments.overfit_one_batch import random_state
from comgra_decl.hooks.module_tree import has_parameters
from comgra_decl.hooks.patches import Patch
from comgra_decl.torch_private import BatchNorm as _BatchNorm
from comgra_decl.torch_private import torch_pytree as _pytree

Outcome = Literal["apart", "norm", "mixed", "unclear"]
"""apart: samples are independent; norm: they mix only through BatchNorm in training mode."""

_WORST: tuple[Outcome, ...] = ("mixed", "unclear", "norm", "apart")


@dataclass(frozen=True)
class Mixing:
    """Whether a network keeps the samples in a batch independent, and the evidence.

    Attributes:
        outcome: see `Outcome`.
        reason: an explanation.
        model: class of the network; None if none was called.
        node: module in which the mixing begins, if known.
        change: change of a sample's output when the others are replaced, relative to its magnitude.
    """

    outcome: Outcome
    reason: str
    model: str | None = None
    node: str | None = None
    change: float = 0.0


def worst_of(found: Sequence[Mixing]) -> Mixing:
    """Return the verdict on a program with several networks: the worst one."""
    nothing = "no model with parameters was called in training mode before an optimizer step"
    return min(found, key=lambda m: _WORST.index(m.outcome), default=Mixing("unclear", nothing))


@contextmanager
def asking(
    found: list[Mixing], end: Callable[[], BaseException], *, dim: int = 0
) -> Iterator[None]:
    """Test each network that is called in training mode, at its first call.

    Afterwards, its buffers and the global random generators are restored.

    Args:
        found: list to which the verdict on each network is appended.
        end: creates the exception to raise at the first optimizer step.
        dim: the batch dimension, of inputs and outputs alike.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    asked: list[nn.Module] = []
    depth = [0]

    def call(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if depth[0]:
            return original(module, *args, **kwargs)
        depth[0] += 1
        try:
            trains = module.training and torch.is_grad_enabled()
            if not trains or module in asked or not has_parameters(module):
                return original(module, *args, **kwargs)
            asked.append(module)
            again = recalled(module, (args, kwargs), dim=dim)
            output = original(module, *args, **kwargs)
            found.append(_asked(again))
            return output
        finally:
            depth[0] -= 1

    def stop(*_: Any) -> None:
        raise end()

    patch = Patch(nn.Module, "__call__", call)
    handle = register_optimizer_step_pre_hook(stop)
    patch.apply()
    try:
        yield
    finally:
        patch.restore()
        handle.remove()


def _asked(call: Call) -> Mixing:
    after = random_state()
    try:
        return replace(_verdict(call), model=type(call.module).__name__)
    except Exception as error:  # noqa: BLE001  (raised by the program's own code)
        reason = f"it failed when called again: {type(error).__name__}: {error}"
        return Mixing("unclear", reason, type(call.module).__name__)
    finally:
        after()


def _verdict(call: Call) -> Mixing:
    count = call.samples
    if count < 2:
        return Mixing("unclear", f"its first input has size {count} in dimension {call.dim}")
    base = run_again(call)
    if not rows_of(base.output, count, call.dim):
        return Mixing("unclear", "no output has the batch dimension")
    if differs(base.output, run_again(call).output, call) > 0:
        return Mixing("unclear", "its output differs between two calls with the same input")
    sample, change = _largest_change(call, base)
    if not change:
        return Mixing("apart", f"no sample's output depends on the other samples ({count} samples)")
    norms = [m for m in call.module.modules() if isinstance(m, _BatchNorm) and m.training]
    with _evaluated(norms):
        base = run_again(call)
        sample, rest = _largest_change(call, base)
        if norms and not rest:
            return Mixing("norm", f"mixed only by {len(norms)} BatchNorm modules", change=change)
        return _mixed(call, base, sample, rest)


def _mixed(call: Call, base: Seen, sample: int, change: float) -> Mixing:
    node, inside = _origin(call, base, run_again(call, sample), sample)
    where = ""
    if node is not None:
        where = f"; mixing begins in {node}" if inside else f"; mixing begins before {node}"
    reason = (
        f"the output for sample {sample} changes by {change:.2g} of its magnitude when the other "
        f"{call.samples - 1} samples in the batch are replaced{where}"
    )
    return Mixing("mixed", reason, node=node, change=change)


def _largest_change(call: Call, base: Seen) -> tuple[int, float]:
    """Return which of the first, middle and last samples depends most on others, and how much."""
    samples = sorted({0, call.samples // 2, call.samples - 1})
    changes = {i: differs(base.output, run_again(call, i).output, call, sample=i) for i in samples}
    most = max(samples, key=lambda i: changes[i])
    return most, changes[most]


def _origin(call: Call, base: Seen, other: Seen, sample: int) -> tuple[str | None, bool]:
    """Return the first module with a different output, and whether its input is the same."""
    for one, two in zip(base.calls, other.calls, strict=False):
        if one.name != two.name:
            break
        if differs(one.output, two.output, call, sample=sample) > 0:
            return one.name, not differs(one.inputs, two.inputs, call, sample=sample) > 0
    return None, False


@contextmanager
def _evaluated(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Switch only these modules to evaluation mode."""
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative differences that the order of summation can cause, by dtype; 0.02 for other dtypes."""

_SHORT = 2e-2


@dataclass(frozen=True)
class Call:
    """A recorded call to a network, which can be repeated.

    Attributes:
        module: the network.
        args, kwargs: copies of its arguments.
        restore: restores the state of the random generators.
        dim: the batch dimension.
    """

    module: nn.Module
    args: Any
    kwargs: Any
    restore: Callable[[], None]
    dim: int

    @property
    def samples(self) -> int:
        """The batch size, from the first tensor that has the batch dimension."""
        leaves = _pytree.tree_leaves((self.args, self.kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor) and x.dim() > self.dim]
        return tensors[0].shape[self.dim] if tensors else 0


@dataclass
class Within:
    """Inputs and outputs of one module within the network."""

    name: str
    inputs: list[Tensor]
    output: list[Tensor]


@dataclass
class Seen:
    """The output of a call, and the calls to its modules in the order in which they ended."""

    output: Any = None
    calls: list[Within] = field(default_factory=list)


def run_again(call: Call, sample: int | None = None) -> Seen:
    """Repeat a call without gradients; if `sample` is given, replace every sample with it."""
    names = {id(module): name for name, module in call.module.named_modules()}
    seen, count = Seen(), call.samples
    args, kwargs = _pytree.tree_map_only(
        Tensor, lambda x: _replaced(x, sample, count, call.dim), (call.args, call.kwargs)
    )

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        name = names.get(id(module), type(module).__name__) or type(module).__name__
        parts = (rows_of(x, count, call.dim) for x in (inputs, output))
        seen.calls.append(Within(name, *([x.clone() for x in part] for part in parts)))

    # copies, because a graph may hold the buffers, which must not change in that case
    buffers = {name: buffer.clone() for name, buffer in call.module.named_buffers()}
    handle = register_module_forward_hook(note)
    call.restore()
    try:
        with torch.no_grad():
            seen.output = functional_call(call.module, buffers, args, kwargs)
    finally:
        handle.remove()
    return seen


def rows_of(thing: Any, count: int, dim: int) -> list[Tensor]:
    """Return the tensors in a structure that have the batch dimension, of size `count`."""
    leaves = _pytree.tree_leaves(thing)
    return [
        x.detach()
        for x in leaves
        if isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == count
    ]


def differs(one: Any, two: Any, call: Call, *, sample: int | None = None) -> float:
    """Return the largest difference for one sample, or for all; 0 if rounding explains it.

    Relative to the largest magnitude of the tensor; infinity if shapes differ, or if a value is
    finite in only one of the two.
    """
    first, second = (rows_of(x, call.samples, call.dim) for x in (one, two))
    if len(first) != len(second):
        return float("inf")
    if sample is not None:
        first, second = ([x.select(call.dim, sample) for x in xs] for xs in (first, second))
    return max((_difference(a, b) for a, b in zip(first, second, strict=True)), default=0.0)


def _replaced(tensor: Tensor, sample: int | None, count: int, dim: int) -> Tensor:
    if sample is None or tensor.dim() <= dim or tensor.shape[dim] != count:
        return tensor.clone()
    return tensor.narrow(dim, sample, 1).expand_as(tensor).clone()


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else 1.0
    if not a.numel() or torch.equal(a, b):
        return 0.0
    x, y = (t.abs() if t.is_complex() else t for t in (a.double(), b.double()))
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()):
        return float("inf")
    x, y = x[finite], y[finite]
    if not x.numel():
        return 0.0
    size = max(float(x.abs().max()), torch.finfo(torch.float32).tiny)
    found = float((x - y).abs().max()) / size
    return found if found > _TOLERANCE.get(a.dtype, _SHORT) else 0.0


def recalled(module: nn.Module, given: Sequence[Any], *, dim: int) -> Call:
    """Return a `Call` that can repeat the call that is about to be made.

    Args:
        module: the network.
        given: args and kwargs, which are copied.
        dim: the batch dimension.
    """
    args, kwargs = _pytree.tree_map_only(Tensor, torch.clone, tuple(given))
    return Call(module, args, kwargs, random_state(), dim)
