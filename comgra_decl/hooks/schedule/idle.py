"""Steps that are only counted; almost all steps in a training run are of this kind."""

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
    """An optimizer hook that counts a known number of steps and does nothing else.

    When the hook runs, its data is no longer in the CPU's caches, so its cost depends on the number
    of objects that it accesses. It therefore uses only closure variables, and an iterator instead
    of a counter.

    Args:
        beat: called with `END` at each counted step.
        otherwise: called with the optimizer at every step that requires more than counting.
        on_fault: called with an error raised by `otherwise`.

    Attributes:
        after_optimizer: the hook to be registered to run after optimizer steps.
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
        """Count the next `steps` steps of the optimizer with the id `owner`; 0 for none."""
        self._given = max(steps, 0)
        self._left = repeat(END, self._given)
        self._count(owner, map(self._beat, self._left))

    def end(self) -> None:
        """Stop counting; may be called from any thread."""
        self._count(0, iter(()))

    def counted(self) -> int:
        """Return the number of steps counted since `begin`."""
        return self._given - length_hint(self._left)


def _hook(
    otherwise: Callable[[Any], Any], on_fault: Callable[[BaseException], None]
) -> tuple[_Hook, Callable[[int, Iterator[object]], None]]:
    """Return the hook, and a function that sets the optimizer whose steps are counted."""
    owner = 0
    beats: Iterator[object] = iter(())

    def after_optimizer(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if _is_compiling():  # first, because compiled code is guarded on what it reads
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


_SECONDS = 0.25  # between two checks, at the current pace
_MOST = 32  # steps, so that a slowdown in training is noticed in time


class Pace:
    """Estimates how many steps take about a quarter of a second.

    Reading a clock in every step would take a tenth of the cost of tracing between recorded steps.

    Args:
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._step = 0
        self._time = clock()

    def steps(self, step: int) -> int:
        """Return the number of steps (0 to 32), starting with `step`, until the next check."""
        now = self._clock()
        passed, seconds = step - self._step, now - self._time
        self._step, self._time = step, now
        if passed <= 0 or seconds <= 0:
            return 0
        return min(_MOST, int(passed * _SECONDS / seconds))
