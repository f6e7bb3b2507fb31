"""Calls of a network that are made once more, with other samples, and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree

from comgra_decl.launch.one_batch import random_state

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative differences that the order of sums may make; 0.02 in shorter formats."""

_SHORT = 2e-2


@dataclass(frozen=True)
class Call:
    """A call of a network: what it takes to make it again.

    Attributes:
        module: the network.
        args, kwargs: copies of what it was given.
        restore: sets the random generators to where they were.
        dim: the dimension of the samples.
    """

    module: nn.Module
    args: Any
    kwargs: Any
    restore: Callable[[], None]
    dim: int

    @property
    def samples(self) -> int:
        """Samples in the batch, by the first tensor that has the dimension."""
        leaves = _pytree.tree_leaves((self.args, self.kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor) and x.dim() > self.dim]
        return tensors[0].shape[self.dim] if tensors else 0


@dataclass
class Within:
    """What one module within the network was given and returned."""

    name: str
    inputs: list[Tensor]
    output: list[Tensor]


@dataclass
class Seen:
    """What a call returned, and what its modules did, in the order in which they ended."""

    output: Any = None
    calls: list[Within] = field(default_factory=list)


def run_again(call: Call, sample: int | None = None) -> Seen:
    """Makes a call again without a graph; with copies of one sample in place of all, if named."""
    names = {id(module): name for name, module in call.module.named_modules()}
    seen, count = Seen(), call.samples
    args, kwargs = _pytree.tree_map_only(
        Tensor, lambda x: _replaced(x, sample, count, call.dim), (call.args, call.kwargs)
    )

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        name = names.get(id(module), type(module).__name__) or type(module).__name__
        parts = (rows_of(x, count, call.dim) for x in (inputs, output))
        seen.calls.append(Within(name, *([x.clone() for x in part] for part in parts)))

    # copies: a graph may hold the buffers, which must not change then
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
    """Returns the tensors in a structure that have a part for each sample."""
    leaves = _pytree.tree_leaves(thing)
    return [
        x.detach()
        for x in leaves
        if isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == count
    ]


def differs(one: Any, two: Any, call: Call, *, sample: int | None = None) -> float:
    """Returns the largest difference of one sample's parts, or of all; 0 if rounding explains it.

    It is relative to the largest magnitude in the part; infinity where shapes differ or only one of
    both is finite.
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
    """Returns what it takes to make a call again that is about to be made.

    Args:
        module: the network.
        given: args and kwargs, of which copies are kept.
        dim: the dimension of the samples.
    """
    args, kwargs = _pytree.tree_map_only(Tensor, torch.clone, tuple(given))
    return Call(module, args, kwargs, random_state(), dim)
