"""Runs a program on one and the same batch and says whether its network can learn it by heart."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Outcome = Literal["can", "cannot", "unclear"]

BELOW = 0.1
"""Of the first loss, what is left of it when a batch counts as learned by heart."""

_LEAST_STEPS = 20
_FALLING = 0.98  # of the loss before; more is standing still
_HELD = 0.9  # share of the steps that must see the same input


@dataclass
class Seen:
    """What was seen of a program: a loss and a fingerprint of the input for each step."""

    losses: list[float] = field(default_factory=list)
    inputs: list[object] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """Whether the network can learn one batch by heart, and what that rests on."""

    outcome: Outcome
    reason: str
    steps: int
    first: float | None
    last: float | None


def verdict(seen: Seen, *, below: float = BELOW) -> Verdict:
    """Returns what the losses on one batch say.

    The loss is compared with itself: the median of the last tenth of the steps with the first
    loss. A loss that may be negative, or an input that changed, leaves it open.
    """
    losses = np.array(seen.losses)
    steps = len(losses)
    if not steps:
        return Verdict("unclear", "no optimizer made a step after a backward", 0, None, None)
    tenth = max(1, steps // 10)
    first, last = float(losses[0]), float(np.median(losses[-tenth:]))
    outcome, reason = _judged(losses, seen.inputs, first=first, last=last, below=below)
    ends = [value if np.isfinite(value) else None for value in (first, last)]
    return Verdict(outcome, reason, steps, *ends)


def _judged(
    losses: np.ndarray[Any, Any], inputs: list[object], *, first: float, last: float, below: float
) -> tuple[Outcome, str]:
    tenth = max(1, len(losses) // 10)
    if not np.isfinite(losses).all():
        step = int(np.flatnonzero(~np.isfinite(losses))[0])
        return "cannot", f"the loss is not finite from step {step} on"
    if not _held(inputs):
        return "unclear", (
            "the input changed from step to step, so nothing was held: the program takes its "
            "batches neither from a DataLoader nor from the global random generators"
        )
    if len(losses) < _LEAST_STEPS:
        return "unclear", f"the program ended after {len(losses)} steps; {_LEAST_STEPS} are needed"
    if min(first, last) < 0:
        return "unclear", "the loss can be negative, so it does not tell when it is all learned"
    if last <= below * first:
        return "can", f"the loss fell to {last / first:.2g} of what it was" if first else "it is 0"
    before = float(np.median(losses[-2 * tenth : -tenth]))
    if last < _FALLING * before:
        return "unclear", "the loss is still falling; give it more with --steps"
    return "cannot", f"the loss stays at {last / first:.2g} of what it was"


def _held(inputs: list[object]) -> bool:
    """Whether most steps saw the same input; the first one may differ (random numbers)."""
    if len(inputs) < 3:
        return True
    return sum(seen == inputs[-1] for seen in inputs[1:]) >= _HELD * (len(inputs) - 1)


@contextmanager
def held(seen: Seen, steps: int, end: Callable[[], BaseException]) -> Iterator[None]:
    """Holds the batch of whatever program runs inside, and writes down what it does.

    Each DataLoader gives its first batch again and again, as new copies. After each optimizer step
    the random generators of Python, numpy and torch return to where they were after the first, so
    that what is drawn is drawn again. Nothing else is changed.

    Args:
        seen: is filled.
        steps: after so many, what `end` returns is raised where the optimizer steps.
        end: makes the exception.
    """
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data import DataLoader

    from comgra_decl.hooks.patches import Patch

    watch = _Watch(seen, steps, end)

    def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        watch.backward(args[0] if args else kwargs.get("tensors"))
        return original(*args, **kwargs)

    patches = [
        Patch(DataLoader, "__iter__", _repeating()),
        Patch(torch.autograd, "backward", backward),
    ]
    handles = [
        register_module_forward_pre_hook(watch.called),
        register_optimizer_step_post_hook(watch.stepped),
    ]
    for patch in patches:
        patch.apply()
    try:
        yield
    finally:
        for each in (*(patch.restore for patch in patches), *(handle.remove for handle in handles)):
            each()


def _repeating() -> Callable[..., Iterator[Any]]:
    """Returns an `__iter__` for DataLoaders that gives the first batch of each for ever anew."""
    first: dict[object, Any] = {}
    keep: list[Any] = []  # so that no other data set gets a known one's id

    def iterate(original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        key = _meant(loader)
        if key not in first:
            keep.append(loader.dataset)
            first[key] = next(original(loader))
        try:
            count = len(loader)
        except TypeError:  # of an iterable data set nobody knows the end
            count = sys.maxsize
        for _ in range(count):
            yield _copied(first[key])

    return iterate


def _meant(loader: Any) -> object:
    """Returns what a loader made anew for the next epoch has in common with the last one."""
    return id(loader.dataset), loader.batch_size, type(loader.sampler).__name__


def _copied(batch: Any) -> Any:
    import torch

    from comgra_decl.torch_private import torch_pytree as _pytree

    return _pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, batch)


class _Watch:
    """Follows the steps of a program."""

    def __init__(self, seen: Seen, steps: int, end: Callable[[], BaseException]) -> None:
        self._seen, self._steps, self._end = seen, steps, end
        self._loss: float | None = None
        self._input: object = None
        self._random: Callable[[], None] | None = None

    def called(self, module: Any, args: Any) -> None:
        """Takes the fingerprint of the first tensors that a module is given in a step."""
        import torch

        if self._input is None and module.training and torch.is_grad_enabled():
            tensors = [a.detach() for a in args if isinstance(a, torch.Tensor) and a.numel()]
            if tensors:
                self._input = tuple((tuple(t.shape), float(t.double().sum())) for t in tensors)

    def backward(self, tensors: Any) -> None:
        """Adds a loss to those of the step."""
        from comgra_decl.hooks.pytree import tensors_in

        for _, tensor in tensors_in(tensors):
            if tensor.numel() == 1:
                self._loss = (self._loss or 0.0) + float(tensor.detach())

    def stepped(self, *_: Any) -> None:
        """Ends the step; ends the program after the last one."""
        if self._loss is not None:
            self._seen.losses.append(self._loss)
            self._seen.inputs.append(self._input)
            self._loss, self._input = None, None
            if self._random is None:
                self._random = random_state()
            else:
                self._random()
        if len(self._seen.losses) >= self._steps:
            raise self._end()


def random_state() -> Callable[[], None]:
    """Returns what sets the global random generators back to where they are now."""
    import torch

    python, numbers, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return restore
