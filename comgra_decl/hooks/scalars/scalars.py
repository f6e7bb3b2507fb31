"""The metrics of every step, recorded or not: its losses, and values that the program logs.

Reading a loss takes about a microsecond (`losses.py` finds it). A value on a device is copied on
the device and transferred later, together with others, so the program does not wait for it. A step
without other events adds two entries to a list. The entries of several steps are processed
together.
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
from comgra_decl.records import RESUMED, Note, ScalarBatch

_HAND_OVER = 1.0  # seconds between two deliveries of numbers
_MOST = 20_000  # numbers of a step that are delivered together
_MOST_CLOSED = 5_000  # steps, or numbers logged after a step, that are held back until a delivery

END = object()
"""The event that ends a step."""

_Named = tuple[str, Number]
_Step = tuple[int, str, list[_Named]]


@dataclass(eq=False)
class Saying:
    """The values logged for the current step in the events processed so far; one object per thread.

    Attributes:
        number: its number, unless other threads end steps before this one.
        first: the first step that has values.
        type: the type of the step that ended last.
        losses: the number of losses in the step.
        most: the largest number of losses in any step that has ended.
        place: where the last step ended.
        numbers: the numbers logged for the step.
        notes: the (time, text) pairs logged for the step.
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
    """Collects the metrics and notes of the current step and delivers them at intervals.

    `events` receives the events in a step: its losses in the order of their `backward` calls, and
    `END` when a step of type `train` ends without being reported to `end_step`. A loss is a number,
    a number in nested lists with one element, or any other value if the loss could not be read.

    Args:
        sink: called with the logged values in the training thread; must be fast. None to discard
        them.
        on_fault: called with an error in tracing itself.

    Attributes:
        alarm: detects sudden losses; None if the spec does not request this.
    """

    def __init__(
        self,
        sink: Callable[[ScalarBatch], None] | None,
        *,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._sink = sink
        self._on_fault = on_fault
        self.events: list[Any] = []
        self.alarm: LossAlarm | None = None
        self._due = -math.inf
        self.talks = False  # whether the program has logged anything
        self.saying = Saying()
        self.unended = "train"  # the type of the current step, if it never ends
        self._one_at_a_time = threading.Lock()
        self._looking = threading.Lock()
        self._closed: list[_Step] = []
        self._closed_notes: list[Note] = []

    def watch_losses(self, wanted: bool) -> None:
        """Start or stop detecting sudden losses."""
        if wanted != (self.alarm is not None):
            self.alarm = LossAlarm() if wanted else None

    def stop(self) -> None:
        """Deliver everything logged so far."""
        with suppress(Exception):  # a fault in tracing may be the reason for stopping
            self._look()
            self._end(self.saying, self.unended)
            self._hand_over()

    @property
    def losses(self) -> int:
        """The number of losses in the current step."""
        self._look()
        return self.saying.losses

    @property
    def surplus(self) -> int:
        """How many more losses the current step has than any completed step."""
        return self.losses - self.saying.most

    def resume(self, step: int, text: str = "") -> None:
        """Continue a resumed run at `step`, which becomes the current step."""
        self.saying.step = self.saying.first = step
        if text:
            self._closed_notes.append(Note(step, RESUMED, time.time(), text))

    def turn_to(self, saying: Saying) -> None:
        """Switch to another `Saying`, which belongs to this or another thread's current step."""
        self._look()
        self.saying = saying

    # -- logging -------------------------------------------------------------------------------

    def kpi(self, name: str, value: Any) -> None:
        """Log a value for a step: a float, or a one-element tensor."""
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

    def step_of_annotation(self) -> int:
        """Return the step to which an annotation made now belongs; see `kpi`."""
        before = self._is_about_the_last_step()  # processes the ends of steps, so it comes first
        return self.saying.step - before

    def measured(self, name: str, number: Number) -> None:
        """Add a value of the current step that tracing observed, not one the program logged."""
        self._look()
        self.saying.numbers.append((name, number))

    def told(self, name: str, number: float, *, step: int) -> None:
        """Add one of tracing's own values to a step, from any thread."""
        self._closed.append((step, self.saying.type, [(name, number)]))

    def note(self, text: str) -> None:
        """Add a note to a step."""
        now, saying = time.time(), self.saying
        if self._is_about_the_last_step():
            self._closed_notes.append(Note(saying.step - 1, saying.type, now, text))
        else:
            saying.notes.append((now, text))

    def remark(self, text: str, *, step: int | None = None) -> None:
        """Add tracing's own note on a step, from any thread, and deliver it.

        Args:
            text: the note.
            step: by default, the last step whose number is known here, which lags behind while
                steps are only counted.
        """
        at = self.saying.step if step is None else step
        self._closed_notes.append(Note(at, self.saying.type, time.time(), text))
        self._hand_over()

    def _is_about_the_last_step(self) -> bool:
        """Whether values logged now belong to the step that has just ended; see `LoopPosition`."""
        self.talks = True
        self._look()
        saying = self.saying
        return saying.step > saying.first and not saying.losses and saying.place.passed()

    def end_step(self, step: int, labels: Collection[str]) -> None:
        """End the step with this number and these labels."""
        self._look()
        self.saying.step = step
        self._close(next(iter(labels)) if labels else "train")
        if self.talks or step == self.saying.first:
            self.saying.place.note()
        if time.monotonic() >= self._due or len(self._closed) >= _MOST_CLOSED:
            self._hand_over()

    # -- events --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Process the events since the last call."""
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

    # -- delivery ------------------------------------------------------------------------------

    def _end(self, saying: Saying, type_: str) -> None:
        """Close the list of values logged for a step, while another thread may be adding more."""
        self._closed.append((saying.step, type_, _taken(saying.numbers)))
        notes = _taken(saying.notes)
        self._closed_notes += [Note(saying.step, type_, when, text) for when, text in notes]

    def _hand_over(self) -> None:
        if not self._one_at_a_time.acquire(blocking=False):
            return  # another thread is delivering
        try:
            self._due = time.monotonic() + _HAND_OVER
            self._look()
            closed, notes = _taken(self._closed), _taken(self._closed_notes)
            if self._sink is not None and (notes or any(numbers for _, _, numbers in closed)):
                self._sink(_said(closed, notes, self.alarm))
        finally:
            self._one_at_a_time.release()


def _only(event: Any) -> Any:
    """Unwrap nested lists of one element."""
    while isinstance(event, list) and len(event) == 1:
        event = event[0]
    return event


def _taken(items: list[Any]) -> list[Any]:
    """Remove and return the current items of a list."""
    taken = items[: len(items)]
    del items[: len(taken)]
    return taken


def _said(closed: list[_Step], notes: list[Note], alarm: LossAlarm | None) -> ScalarBatch:
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
    return ScalarBatch(
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
    """Wait, on the writer thread, for values on devices, and complete the losses."""
    unknown = np.isnan(values)
    late.settle(values)
    if alarm is not None:
        for at in np.flatnonzero(unknown).tolist():
            if names[at] == "loss":
                alarm.take(float(values[at]))
