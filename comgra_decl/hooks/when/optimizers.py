"""Where a step ends when a program has one optimizer or several."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from comgra_decl.hooks.tree import instances_of

if TYPE_CHECKING:
    import torch


_PATIENCE = 8
"""Steps that one optimizer may repeat before those that have not stepped are no longer waited for:
a critic often steps five times for each step of its generator."""

_LONGEST_CYCLE = 16
"""Most steps of the owner between two of another optimizer that still make one step of them all."""

_ABANDONED = 20, 100
"""Steps of other optimizers alone after which the owner is given up: the program has moved on to
another phase. The larger number holds where optimizers have taken turns before."""


class StepOwner:
    """Decides which optimizer's step ends the training step.

    With one optimizer it is that one. With several (adversarial training) the step ends when each
    of them has stepped, or when one has repeated its own often; the one that was last owns the
    steps from then on. One that turns up later, and steps less often than the owner, takes over.

    Args:
        takes_part: whether a parameter belongs to a model that has been called. Optimizers of
            other models (an earlier cell of a notebook) are not waited for.
    """

    def __init__(self, takes_part: Callable[[torch.Tensor], bool]) -> None:
        self._takes_part = takes_part
        self._owner: weakref.ref[Optimizer] | None = None
        self._waiting: list[Optimizer] | None = None  # held only until the first step has ended
        self._repeats = 0
        self._steps = 0  # of the owner
        self._alone = 0  # steps of others since the owner's last
        self._turns = False  # whether the owner has stepped again after another one
        # for each other optimizer, how often the owner had stepped at its last step
        self._met: MutableMapping[Optimizer, int] = WeakKeyDictionary()

    @property
    def sole(self) -> int:
        """The `id` of the owner if its steps need not be told; 0 if there may be a better one."""
        owner = self._owner() if self._owner is not None else None
        return 0 if owner is None or self._met else id(owner)

    def ends_step(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's step, just taken, ends the training step."""
        owner = self._owner() if self._owner is not None else None
        if owner is optimizer:
            self._steps += 1
            if self._alone:
                self._alone, self._turns = 0, True
            return True
        return self._elect(optimizer) if owner is None else self._takes_over(optimizer)

    def _takes_over(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer than the owner turns out to be the one that ends steps."""
        before = self._met.get(optimizer, self._steps)
        self._met[optimizer] = self._steps
        self._alone += 1
        seldom = 2 <= self._steps - before <= _LONGEST_CYCLE
        if seldom or self._alone >= _ABANDONED[self._turns]:
            self._own(optimizer)
            return True
        return False

    def _own(self, optimizer: Optimizer) -> None:
        self._owner = weakref.ref(optimizer)
        self._waiting = []
        self._met.clear()
        self._steps = self._alone = 0
        self._turns = False

    def _elect(self, optimizer: Optimizer) -> bool:
        if self._owner is not None:  # the former owner is gone; its successor takes over
            self._own(optimizer)
            return True
        if self._waiting is None:
            self._waiting = [o for o in instances_of(Optimizer) if self._works_on_models(o)]
        mine = _parameter_ids(optimizer)
        # One that holds the same parameters is a wrapper (Lightning, Accelerate) or outdated.
        still = [o for o in self._waiting if mine.isdisjoint(_parameter_ids(o))]
        self._repeats += len(still) == len(self._waiting)
        self._waiting = still
        if not still or self._repeats >= _PATIENCE:
            self._own(optimizer)
        return self._owner is not None

    def _works_on_models(self, optimizer: Optimizer) -> bool:
        return any(self._takes_part(parameter) for parameter in _parameters(optimizer))


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for parameter in _parameters(optimizer)}


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in getattr(optimizer, "param_groups", ()):  # absent while it is being constructed
        yield from group["params"]
