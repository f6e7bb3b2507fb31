"""Steps that are only counted: what nearly all steps of a training are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from operator import length_hint
from time import monotonic
from typing import Any

import torch

from comgra_decl.hooks.scalars.scalars import END

_Hook = Callable[[Any, Any, Any], None]

_is_compiling = torch.compiler.is_dynamo_compiling


class IdleSteps:
    """The optimizer hook that counts a known number of steps and does nothing else.

    It runs once in a while of other code, when nothing of it is in the processor's caches any more:
    what is felt is how many things it touches. So what it needs are variables that it closes over,
    and an iterator in place of a number that is read, compared, added to and written.

    Args:
        beat: given `END` at each step that is counted.
        otherwise: given the optimizer of every other step.
        on_fault: told about an error of that.

    Attributes:
        after_optimizer: an optimizer has stepped; to be registered as its hook.
    """

    def __init__(
        self,
        beat: Callable[[object], object],
        *,
        otherwise: Callable[[Any], Any],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._beat = beat
        self._given = 0
        self._left: Iterator[object] = iter(())
        self.after_optimizer, self._count = _hook(otherwise, on_fault)

    def begin(self, owner: int, steps: int) -> None:
        """Counts the next steps (none: 0) of the optimizer with this `id` (nobody: 0)."""
        self._given = max(steps, 0)
        self._left = repeat(END, self._given)
        self._count(owner, map(self._beat, self._left))

    def end(self) -> None:
        """Counts no further step; from any thread."""
        self._count(0, iter(()))

    def counted(self) -> int:
        """Returns the steps counted since it began."""
        return self._given - length_hint(self._left)


def _hook(
    otherwise: Callable[[Any], Any], on_fault: Callable[[BaseException], None]
) -> tuple[_Hook, Callable[[int, Iterator[object]], None]]:
    """Returns the hook, and what gives it an optimizer's `id` and a beat for each of its steps."""
    owner = 0
    beats: Iterator[object] = iter(())

    def after_optimizer(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if _is_compiling():  # first of all: compiled code is guarded by what it has read
            return
        if id(optimizer) == owner:
            for _ in beats:
                return
        try:
            otherwise(optimizer)
        except Exception as error:
            on_fault(error)

    def count(new_owner: int, new_beats: Iterator[object]) -> None:
        nonlocal owner, beats
        beats = new_beats
        owner = new_owner

    return after_optimizer, count


_SECONDS = 0.25  # between two looks, at the present pace
_MOST = 32  # steps; a training that becomes slow is noticed soon enough


class Pace:
    """Says how many steps take about a quarter of a second.

    Reading a clock in every step takes a tenth of what tracing costs between recorded steps.

    Args:
        clock: seconds that pass evenly.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._step = 0
        self._time = clock()

    def steps(self, step: int) -> int:
        """Returns after how many steps from `step` on, which begins now, to look again: 0 to 32."""
        now = self._clock()
        passed, seconds = step - self._step, now - self._time
        self._step, self._time = step, now
        if passed <= 0 or seconds <= 0:
            return 0
        return min(_MOST, int(passed * _SECONDS / seconds))
