"""Where a step ends when a program has one optimizer or several."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from comgra_decl.hooks.tree import instances_of

if TYPE_CHECKING:
    import torch


class StepOwner:
    """Decides which optimizer's step ends the training step.

    With one optimizer it is that one. With several (adversarial training) the step ends when each
    of them has stepped, or when one steps a second time; the one that was last owns all steps from
    then on.

    Args:
        takes_part: whether a parameter belongs to a model that has been called. Optimizers of
            other models (an earlier cell of a notebook) are not waited for.
    """

    def __init__(self, takes_part: Callable[[torch.Tensor], bool]) -> None:
        self._takes_part = takes_part
        self._owner: weakref.ref[Optimizer] | None = None
        self._waiting: list[Optimizer] | None = None  # held only until the first step has ended

    def ends_step(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's step, just taken, ends the training step."""
        owner = self._owner() if self._owner is not None else None
        if owner is None:
            return self._elect(optimizer)
        return owner is optimizer

    def _elect(self, optimizer: Optimizer) -> bool:
        if self._owner is not None:  # the former owner is gone; its successor takes over
            self._owner = weakref.ref(optimizer)
            return True
        if self._waiting is None:
            self._waiting = [o for o in instances_of(Optimizer) if self._works_on_models(o)]
        mine = _parameter_ids(optimizer)
        # One that holds the same parameters is a wrapper (Lightning, Accelerate) or outdated.
        still = [o for o in self._waiting if mine.isdisjoint(_parameter_ids(o))]
        repeated = len(still) == len(self._waiting)
        self._waiting = still
        if repeated or not still:
            self._owner = weakref.ref(optimizer)
            self._waiting = []
        return self._owner is not None

    def _works_on_models(self, optimizer: Optimizer) -> bool:
        return any(self._takes_part(parameter) for parameter in _parameters(optimizer))


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for parameter in _parameters(optimizer)}


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in getattr(optimizer, "param_groups", ()):  # absent while it is being constructed
        yield from group["params"]
