"""Where a step ends when a program has one optimizer or several."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

from comgra_decl.hooks.tree import instances_of


class StepOwner:
    """Decides which optimizer's step ends the training step.

    With one optimizer it is that one. With several (adversarial training) the step ends when each
    living optimizer has stepped, or when one steps a second time; the one that was last owns all
    steps from then on.
    """

    def __init__(self) -> None:
        self._owner: weakref.ref[Optimizer] | None = None
        self._waiting: weakref.WeakSet[Optimizer] | None = None

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
            self._waiting = weakref.WeakSet(instances_of(Optimizer))
        repeated = optimizer not in self._waiting
        self._waiting.discard(optimizer)
        if repeated or not self._waiting:
            self._owner = weakref.ref(optimizer)
        return self._owner is not None
