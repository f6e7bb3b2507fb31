"""What ends a training step: an optimizer, one of several, or the program's own word."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from comgra_decl.hooks.when.optimizers import StepOwner

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

_ODD = 100
"""Optimizer steps without the end of a step after which that is said."""


class StepEnd:
    """Decides which optimizer's step ends the training step, as `schedule.step` says.

    Args:
        rule: "last_optimizer", "any", "explicit", the number of an optimizer in the order in which
            they first step, or the name of its class.
        takes_part: whether a parameter belongs to a model that has been called.
        warn: told, once for each sentence, what is odd.
    """

    def __init__(
        self,
        rule: str | int,
        *,
        takes_part: Callable[[torch.Tensor], bool],
        warn: Callable[[str], None],
    ) -> None:
        self.rule = rule
        self._owner = StepOwner(takes_part)
        self._warn = warn
        self._order: list[weakref.ref[Optimizer]] = []
        self._ended = False  # an optimizer ended the last step, and nothing was said since
        self._others = 0

    @property
    def explicit(self) -> bool:
        """Whether only the program's word ends a step."""
        return self.rule == "explicit"

    @property
    def sole(self) -> int:
        """The `id` of an optimizer whose steps end the training's, and nobody need ask; or 0."""
        return self._owner.sole if self.rule == "last_optimizer" else 0

    def by_optimizer(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's step, just taken, ends the training step."""
        self._ended = self._decide(optimizer)
        return self._ended

    def by_program(self) -> bool:
        """Whether `comgra.step()`, just called, ends the training step.

        It always does, but for the first time after optimizers have ended steps: then the step
        that it means has ended already.
        """
        if not self.explicit:
            self.rule = "explicit"
            if self._ended:
                self._warn(
                    "comgra.step() was called in a program whose optimizers step as well: from "
                    "here on only comgra.step() ends a step (schedule.step=explicit says so from "
                    "the start)"
                )
                return False
        return True

    def _decide(self, optimizer: Optimizer) -> bool:
        if self.rule == "last_optimizer":
            return self._owner.ends_step(optimizer)
        if self.rule in ("any", "explicit"):
            return self.rule == "any"
        number = self._number(optimizer)
        mine = self.rule in (number, *(base.__name__ for base in type(optimizer).__mro__))
        self._others = 0 if mine else self._others + 1
        if self._others == _ODD:
            self._warn(
                f"schedule.step: {self.rule!r} has ended no step in the last {_ODD} optimizer steps"
            )
        return mine

    def _number(self, optimizer: Optimizer) -> int:
        """Returns the optimizer's number in the order of first steps."""
        for number, known in enumerate(self._order):
            if known() is optimizer:
                return number
        self._order.append(weakref.ref(optimizer))
        return len(self._order) - 1
