"""Asks a program's networks whether the samples of a batch know of each other.

What a network says of a sample must not change when the other samples of its batch do. Asked is
just that: all samples are replaced by copies of one of them, and its answer must stay what it was.
BatchNorm, which mixes on purpose, is told apart; otherwise it is said where the mixing begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from comgra_decl.hooks.patches import Patch
from comgra_decl.hooks.tree import has_parameters
from comgra_decl.launch.mixed_calls import Call, Seen, differs, recalled, rows_of, run_again
from comgra_decl.launch.one_batch import random_state

Outcome = Literal["apart", "norm", "mixed", "unclear"]
"""apart: no sample knows of another; norm: only through BatchNorm in training mode."""

_WORST: tuple[Outcome, ...] = ("mixed", "unclear", "norm", "apart")


@dataclass(frozen=True)
class Mixing:
    """Whether the samples of a batch are kept apart by a network, and what that rests on.

    Attributes:
        outcome: see `Outcome`.
        reason: in words.
        model: class of the network; None if there was none.
        node: module at which it begins, if it is known.
        change: of the answer to a sample when the others are replaced, relative to its size.
    """

    outcome: Outcome
    reason: str
    model: str | None = None
    node: str | None = None
    change: float = 0.0


def worst_of(found: Sequence[Mixing]) -> Mixing:
    """Returns the verdict on a program with several networks: that on the worst of them."""
    nothing = "no network with parameters was called in training mode before an optimizer stepped"
    return min(found, key=lambda m: _WORST.index(m.outcome), default=Mixing("unclear", nothing))


@contextmanager
def asking(
    found: list[Mixing], end: Callable[[], BaseException], *, dim: int = 0
) -> Iterator[None]:
    """Asks each network that is called in training mode, at its first call.

    Its buffers and the global random generators are afterwards what they would have been.

    Args:
        found: is filled, a verdict for each network.
        end: makes what is raised where an optimizer steps.
        dim: the dimension of the samples, of inputs and answers alike.
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
    except Exception as error:  # noqa: BLE001  (of the program's own code, called once more)
        reason = f"called once more it failed: {type(error).__name__}: {error}"
        return Mixing("unclear", reason, type(call.module).__name__)
    finally:
        after()


def _verdict(call: Call) -> Mixing:
    count = call.samples
    if count < 2:
        return Mixing("unclear", f"its first input has {count} samples along dimension {call.dim}")
    base = run_again(call)
    if not rows_of(base.output, count, call.dim):
        return Mixing("unclear", "it returns nothing that has a part for each sample")
    if differs(base.output, run_again(call).output, call) > 0:
        return Mixing("unclear", "called twice with the same input it answers differently")
    sample, change = _largest_change(call, base)
    if not change:
        return Mixing("apart", f"replacing all others changes no answer ({count} samples)")
    norms = [m for m in call.module.modules() if isinstance(m, _BatchNorm) and m.training]
    with _evaluated(norms):
        base = run_again(call)
        sample, rest = _largest_change(call, base)
        if norms and not rest:
            return Mixing("norm", f"only {len(norms)} BatchNorm modules mix them", change=change)
        return _mixed(call, base, sample, rest)


def _mixed(call: Call, base: Seen, sample: int, change: float) -> Mixing:
    node, inside = _origin(call, base, run_again(call, sample), sample)
    where = ""
    if node is not None:
        where = f"; it begins in {node}" if inside else f"; it begins before {node}"
    reason = (
        f"the answer to sample {sample} changes by {change:.2g} of its size when the other "
        f"{call.samples - 1} samples of the batch are replaced{where}"
    )
    return Mixing("mixed", reason, node=node, change=change)


def _largest_change(call: Call, base: Seen) -> tuple[int, float]:
    """Returns the sample whose answer depends most on the others, of the first, middle and last."""
    samples = sorted({0, call.samples // 2, call.samples - 1})
    changes = {i: differs(base.output, run_again(call, i).output, call, sample=i) for i in samples}
    most = max(samples, key=lambda i: changes[i])
    return most, changes[most]


def _origin(call: Call, base: Seen, other: Seen, sample: int) -> tuple[str | None, bool]:
    """Returns the first module whose output differs, and whether what entered it did not."""
    for one, two in zip(base.calls, other.calls, strict=False):
        if one.name != two.name:
            break
        if differs(one.output, two.output, call, sample=sample) > 0:
            return one.name, not differs(one.inputs, two.inputs, call, sample=sample) > 0
    return None, False


@contextmanager
def _evaluated(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Switches these modules alone to evaluation mode."""
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
