"""The numbers of every step, recorded or not: its losses, and what the program says.

A loss is read in about a microsecond (`losses.py` finds it). A number on a device is copied there
and fetched later, together with others, so nobody waits for it. What a quiet step leaves is two
entries in a list, looked at together with those of other steps.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from comgra_decl.hooks.scalars.alarm import LossAlarm
from comgra_decl.hooks.scalars.loop_position import LoopPosition
from comgra_decl.hooks.scalars.numbers import LateNumbers, Number, read_number
from comgra_decl.records import RESUMED, Note, Said

_HAND_OVER = 1.0  # seconds between two times that numbers are handed over
_MOST = 20_000  # numbers of a step that are taken together
_MOST_CLOSED = 5_000  # steps, or numbers said after one, that wait until then

END = object()
"""The event that ends a step."""

_Named = tuple[str, Number]
_Step = tuple[int, str, list[_Named]]


@dataclass(eq=False)
class Saying:
    """What is said of the step in progress, as far as events were looked at; one for each thread.

    Attributes:
        step: its number, unless other threads end steps before it.
        first: the first step that anything was said of.
        type: of the step that ended last.
        losses: how many it has.
        most: how many one that has ended had at most.
        place: where the last one ended.
        numbers: what was said of it.
        notes: likewise, when and what.
    """

    step: int = 0
    first: int = 0
    type: str = "train"
    losses: int = 0
    most: int = 0
    place: LoopPosition = field(default_factory=LoopPosition)
    numbers: list[_Named] = field(default_factory=list)
    notes: list[tuple[float, str]] = field(default_factory=list)


class Scalars:
    """Collects the numbers and notes of the step in progress and hands them over now and then.

    `events` takes what happens in a step: its losses in the order of their `backward`, each a
    number, maybe in lists of one (anything else if it has none), and `END` for the end of a step
    of type `train` whose end `end_step` is not told of.

    Args:
        sink: receives what was said, on the training thread; must be quick. None: nobody does.
        on_fault: told about an error of our own.

    Attributes:
        alarm: notices sudden losses; None if no one asks.
    """

    def __init__(
        self, sink: Callable[[Said], None] | None, *, on_fault: Callable[[BaseException], None]
    ) -> None:
        self._sink = sink
        self._on_fault = on_fault
        self.events: list[Any] = []
        self.alarm: LossAlarm | None = None
        self._due = -math.inf
        self.talks = False  # the program has said something
        self.saying = Saying()
        self.unended = "train"  # the type of the step in progress, if it never ends
        self._one_at_a_time = threading.Lock()
        self._looking = threading.Lock()
        self._closed: list[_Step] = []
        self._closed_notes: list[Note] = []

    def watch_losses(self, wanted: bool) -> None:
        """Notices sudden losses from now on, or no longer."""
        if wanted != (self.alarm is not None):
            self.alarm = LossAlarm() if wanted else None

    def stop(self) -> None:
        """What was said until now is handed over."""
        with suppress(Exception):  # a fault of ours may be why this ends
            self._look()
            self._end(self.saying, self.unended)
            self._hand_over()

    @property
    def losses(self) -> int:
        """How many losses the step in progress has."""
        self._look()
        return self.saying.losses

    @property
    def surplus(self) -> int:
        """How many more losses the step in progress has than any that has ended."""
        return self.losses - self.saying.most

    def resume(self, step: int, text: str = "") -> None:
        """The training goes on with `step`, which is the one in progress."""
        self.saying.step = self.saying.first = step
        if text:
            self._closed_notes.append(Note(step, RESUMED, time.time(), text))

    def turn_to(self, saying: Saying) -> None:
        """What is said from now on is about the step in progress of another thread, or its own."""
        self._look()
        self.saying = saying

    # -- what is said --------------------------------------------------------------------------

    def kpi(self, name: str, value: Any) -> None:
        """Takes a number of a step: a float, or a tensor of one element."""
        number = read_number(value) if isinstance(value, torch.Tensor) else float(value)
        if number is None:
            return
        saying = self.saying
        if self._is_about_the_last_step():
            self._closed.append((saying.step - 1, saying.type, [(name, number)]))
        else:
            saying.numbers.append((name, number))
            if len(saying.numbers) >= _MOST:
                self._end(saying, "train")
        if len(self._closed) >= _MOST_CLOSED:
            self._hand_over()

    def measured(self, name: str, number: Number) -> None:
        """Takes a number that was seen, not said, of the step in progress."""
        self._look()
        self.saying.numbers.append((name, number))

    def note(self, text: str) -> None:
        """Takes a text about a step."""
        now, saying = time.time(), self.saying
        if self._is_about_the_last_step():
            self._closed_notes.append(Note(saying.step - 1, saying.type, now, text))
        else:
            saying.notes.append((now, text))

    def remark(self, text: str) -> None:
        """Takes a note of ours about the step in progress, from any thread, and hands it over."""
        self._closed_notes.append(Note(self.saying.step, self.saying.type, time.time(), text))
        self._hand_over()

    def _is_about_the_last_step(self) -> bool:
        """Whether what is said now is about the step that has ended; see `places`."""
        self.talks = True
        self._look()
        saying = self.saying
        return saying.step > saying.first and not saying.losses and saying.place.passed()

    def end_step(self, step: int, labels: Collection[str]) -> None:
        """The step with this number and these labels has ended."""
        self._look()
        self.saying.step = step
        self._close(next(iter(labels)) if labels else "train")
        if self.talks or step == self.saying.first:
            self.saying.place.note()
        if time.monotonic() >= self._due or len(self._closed) >= _MOST_CLOSED:
            self._hand_over()

    # -- events --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Takes in what has happened since it was looked at last."""
        with self._looking:
            for event in _taken(self.events):
                if event is END:
                    self._close("train")
                    continue
                saying = self.saying
                name = f"loss[{saying.losses}]" if saying.losses else "loss"
                saying.losses += 1
                number = _only(event)
                if isinstance(number, (float, torch.Tensor)):
                    saying.numbers.append((name, number))
                    if self.alarm is not None and name == "loss" and isinstance(number, float):
                        self.alarm.take(number)

    def _close(self, type_: str) -> None:
        saying = self.saying
        if saying.numbers or saying.notes:
            self._end(saying, type_)
        saying.type = type_
        saying.step += 1
        saying.most = max(saying.most, saying.losses)
        saying.losses = 0

    # -- handing over --------------------------------------------------------------------------

    def _end(self, saying: Saying, type_: str) -> None:
        """Closes what was said of a step; another thread may be saying more meanwhile."""
        self._closed.append((saying.step, type_, _taken(saying.numbers)))
        notes = _taken(saying.notes)
        self._closed_notes += [Note(saying.step, type_, when, text) for when, text in notes]

    def _hand_over(self) -> None:
        if not self._one_at_a_time.acquire(blocking=False):
            return  # another thread is at it
        try:
            self._due = time.monotonic() + _HAND_OVER
            self._look()
            closed, notes = _taken(self._closed), _taken(self._closed_notes)
            if self._sink is not None and (notes or any(numbers for _, _, numbers in closed)):
                self._sink(_said(closed, notes, self.alarm))
        finally:
            self._one_at_a_time.release()


def _only(event: Any) -> Any:
    """Returns what lists of one element each contain at last."""
    while isinstance(event, list) and len(event) == 1:
        event = event[0]
    return event


def _taken(items: list[Any]) -> list[Any]:
    """Empties a list of what it holds now, and returns that."""
    taken = items[: len(items)]
    del items[: len(taken)]
    return taken


def _said(closed: list[_Step], notes: list[Note], alarm: LossAlarm | None) -> Said:
    numbers = [number for _, _, part in closed for number in part]
    late = LateNumbers()
    values = np.full(len(numbers), np.nan)
    for where, (_, value) in enumerate(numbers):
        if isinstance(value, torch.Tensor):
            late.add(where, value)
        else:
            values[where] = value
    late.send()
    counts = [len(part) for _, _, part in closed]
    names = [name for name, _ in numbers]
    return Said(
        steps=np.repeat(np.array([step for step, _, _ in closed], np.int64), counts),
        values=values,
        names=names,
        types=[type_ for _, type_, part in closed for _ in part],
        notes=notes,
        settle=partial(_settle, late, values, names, alarm) if len(late) else None,
    )


def _settle(
    late: LateNumbers, values: NDArray[np.float64], names: list[str], alarm: LossAlarm | None
) -> None:
    """Waits for numbers on devices, on the writer thread; only now their losses are known."""
    unknown = np.isnan(values)
    late.settle(values)
    if alarm is not None:
        for at in np.flatnonzero(unknown).tolist():
            if names[at] == "loss":
                alarm.take(float(values[at]))
