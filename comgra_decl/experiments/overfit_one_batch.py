"""Train a program on a single batch and judge whether its network can fit it."""

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
"""A batch counts as fitted if the loss falls to this fraction of the first loss, or less."""

_LEAST_STEPS = 20
_FALLING = 0.98  # of the earlier loss; above that, training has stalled
_HELD = 0.9  # share of the steps that must see the same input


@dataclass
class Seen:
    """Observations of a program: a loss and a fingerprint of the input for each step."""

    losses: list[float] = field(default_factory=list)
    inputs: list[object] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """Whether the network can fit one batch, and the evidence."""

    outcome: Outcome
    reason: str
    steps: int
    first: float | None
    last: float | None


def verdict(seen: Seen, *, below: float = BELOW) -> Verdict:
    """Return the verdict, given the losses from training on one batch.

    Compares the median of the last tenth of the losses with the first loss. If the loss is negative
    or the input changed, the outcome is "unclear".
    """
    losses = np.array(seen.losses)
    steps = len(losses)
    if not steps:
        return Verdict("unclear", "no optimizer took a step after a backward pass", 0, None, None)
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
        return "cannot", f"the loss is not finite, first at step {step}"
    if not _held(inputs):
        return "unclear", (
            "the input changed from step to step, so the batch was not held fixed: the program "
            "gets its batches neither from a DataLoader nor from the global random generators"
        )
    if len(losses) < _LEAST_STEPS:
        return "unclear", f"the program ended after {len(losses)} steps; {_LEAST_STEPS} are needed"
    if min(first, last) < 0:
        return "unclear", "the loss is negative, so it does not show how well the batch is fitted"
    if last <= below * first:
        return "can", f"the loss fell to {last / first:.2g} of the first" if first else "it is 0"
    before = float(np.median(losses[-2 * tenth : -tenth]))
    if last < _FALLING * before:
        return "unclear", "the loss is still falling; allow more steps with --steps"
    return "cannot", f"the loss stays at {last / first:.2g} of the first"


def _held(inputs: list[object]) -> bool:
    """Return whether most steps saw the same input; the first may differ (random numbers)."""
    if len(inputs) < 3:
        return True
    return sum(seen == inputs[-1] for seen in inputs[1:]) >= _HELD * (len(inputs) - 1)


@contextmanager
def held(seen: Seen, steps: int, end: Callable[[], BaseException]) -> Iterator[None]:
    """Keep the program's batch fixed inside the block, and record its losses and inputs.

    Each DataLoader repeatedly yields new copies of its first batch. After each optimizer
    step, the random generators of Python, NumPy and torch are reset to their state after the first
    step, so that the same numbers are drawn again. Nothing else is changed.

    Args:
        seen: filled with losses and inputs.
        steps: number of optimizer steps after which the exception is raised.
        end: creates the exception.
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
    """Return an `__iter__` that makes each DataLoader repeat its first batch."""
    first: dict[object, Any] = {}
    keep: list[Any] = []  # so that no id is reused by another data set

    def iterate(original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        key = _meant(loader)
        if key not in first:
            keep.append(loader.dataset)
            first[key] = next(original(loader))
        try:
            count = len(loader)
        except TypeError:  # the length of an iterable data set is unknown
            count = sys.maxsize
        for _ in range(count):
            yield _copied(first[key])

    return iterate


def _meant(loader: Any) -> object:
    """Return a key that a loader shares with its replacement in the next epoch."""
    return id(loader.dataset), loader.batch_size, type(loader.sampler).__name__


def _copied(batch: Any) -> Any:
    import torch

    from comgra_decl.torch_private import torch_pytree as _pytree

    return _pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, batch)


class _Watch:
    """Observes the steps of a program."""

    def __init__(self, seen: Seen, steps: int, end: Callable[[], BaseException]) -> None:
        self._seen, self._steps, self._end = seen, steps, end
        self._loss: float | None = None
        self._input: object = None
        self._random: Callable[[], None] | None = None

    def called(self, module: Any, args: Any) -> None:
        """Compute a fingerprint of the first input tensors in a step."""
        import torch

        if self._input is None and module.training and torch.is_grad_enabled():
            tensors = [a.detach() for a in args if isinstance(a, torch.Tensor) and a.numel()]
            if tensors:
                self._input = tuple((tuple(t.shape), float(t.double().sum())) for t in tensors)

    def backward(self, tensors: Any) -> None:
        """Add a loss to the step's total."""
        from comgra_decl.hooks.pytree import tensors_in

        for _, tensor in tensors_in(tensors):
            if tensor.numel() == 1:
                self._loss = (self._loss or 0.0) + float(tensor.detach())

    def stepped(self, *_: Any) -> None:
        """End the step; end the program after the last one."""
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
    """Return a function that restores the current state of the global random generators."""
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
