"""Steps that are only counted: what nearly all steps of a training are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from operator import length_hint
from typing import Any

import torch

from comgra_decl.hooks.words.scalars import END

_is_compiling = torch.compiler.is_dynamo_compiling


class Rest:
    """The optimizer hook that counts a known number of steps and does nothing else.

    It runs once in a while of other code, when nothing of it is in the processor's caches any more:
    what is felt is how many things it touches. So it has slots, and an iterator in place of a
    number that is read, compared, added to and written.

    Args:
        beat: given `END` at each step that is counted.
        otherwise: given the optimizer of every other step.
    """

    __slots__ = ("_beat", "_ends", "_given", "_otherwise", "_owner")

    def __init__(self, beat: Callable[[object], None], *, otherwise: Callable[[Any], None]) -> None:
        self._beat = beat
        self._otherwise = otherwise
        self._owner = 0
        self._given = 0
        self._ends: Iterator[object] = iter(())

    def begin(self, owner: int, steps: int) -> None:
        """Counts the next steps (none: 0) of the optimizer with this `id` (nobody: 0)."""
        self._given = max(steps, 0)
        self._ends = repeat(END, self._given)
        self._owner = owner

    def end(self) -> None:
        """Counts no further step; from any thread."""
        self._owner = 0

    @property
    def counted(self) -> int:
        """Steps counted since it began."""
        return self._given - length_hint(self._ends)

    def after_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """An optimizer has stepped; registered as its hook."""
        if _is_compiling():
            return
        if id(optimizer) == self._owner:
            for end in self._ends:
                self._beat(end)
                return
        self._otherwise(optimizer)
