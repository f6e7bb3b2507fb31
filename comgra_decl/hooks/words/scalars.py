"""The numbers of every step, recorded or not: its losses, and what the program says.

A loss is read in about a microsecond (`losses.py` finds it). A number on a device is copied there
and fetched later, together with others, so nobody waits for it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from comgra_decl.hooks.words.numbers import LateNumbers, read_number
from comgra_decl.hooks.words.places import StepPlace
from comgra_decl.records import Note, Said

_HAND_OVER = 1.0  # seconds between two times that numbers are handed over
_MOST = 20_000  # numbers of a step that are taken together
_MOST_CLOSED = 5_000  # steps, or numbers said after one, that wait until then

_Number = tuple[str, float | torch.Tensor]
_Step = tuple[int, str, list[_Number]]


class Scalars:
    """Collects the numbers and notes of the step in progress and hands them over now and then.

    Args:
        sink: receives what was said, on the training thread; must be quick. None: nobody does.
        on_fault: told about an error of our own.
    """

    def __init__(
        self, sink: Callable[[Said], None] | None, *, on_fault: Callable[[BaseException], None]
    ) -> None:
        self._sink = sink
        self._on_fault = on_fault
        self._step = 0
        self._type = "train"  # of the step that ended last
        self._losses = 0  # in the step in progress
        self._begun = False  # a backward was seen in the step in progress
        self._talks = False  # the program has said something
        self._place = StepPlace()
        self._one_at_a_time = threading.Lock()
        self._open: list[_Number] = []  # of the step in progress
        self._closed: list[_Step] = []
        self._notes: list[tuple[float, str]] = []  # of the step in progress: when and what
        self._closed_notes: list[Note] = []
        self._handed_over = -math.inf

    def stop(self) -> None:
        """What was said until now is handed over."""
        with suppress(Exception):  # a fault of ours may be why this ends
            self._end(self._step, "train")
            self._hand_over()

    # -- what is said --------------------------------------------------------------------------

    def kpi(self, name: str, value: Any) -> None:
        """Takes a number of a step: a float, or a tensor of one element."""
        number = read_number(value) if isinstance(value, torch.Tensor) else float(value)
        if number is None:
            return
        if self._is_about_the_last_step():
            self._closed.append((self._step - 1, self._type, [(name, number)]))
        else:
            self._open.append((name, number))
            if len(self._open) >= _MOST:
                self._end(self._step, "train")
        if len(self._closed) >= _MOST_CLOSED:
            self._hand_over()

    def note(self, text: str) -> None:
        """Takes a text about a step."""
        now = time.time()
        if self._is_about_the_last_step():
            self._closed_notes.append(Note(self._step - 1, self._type, now, text))
        else:
            self._notes.append((now, text))

    def _is_about_the_last_step(self) -> bool:
        """Whether what is said now is about the step that has ended; see `places`."""
        self._talks = True
        return self._step > 0 and not self._begun and self._place.passed()

    def end_step(self, step: int, labels: Collection[str]) -> None:
        """The step with this number and these labels has ended."""
        self._type = next(iter(labels)) if labels else "train"
        if self._open or self._notes:
            self._end(step, self._type)
        if self._talks or step == 0:
            self._place.note()
        self._step = step + 1
        self._losses = 0
        self._begun = False
        waiting = len(self._closed)
        if time.monotonic() - self._handed_over > _HAND_OVER or waiting >= _MOST_CLOSED:
            self._hand_over()

    def loss(self, tensor: torch.Tensor) -> None:
        """Takes a loss, which `backward` is about to be called on; does not raise."""
        place = self._losses
        self._losses = place + 1
        self._begun = True
        try:
            number = read_number(tensor)
        except Exception as error:
            self._on_fault(error)
            return
        if number is not None:
            self._open.append(("loss" if place == 0 else f"loss[{place}]", number))

    # -- handing over --------------------------------------------------------------------------

    def _end(self, step: int, type_: str) -> None:
        """Closes what was said of a step; another thread may be saying more meanwhile."""
        self._closed.append((step, type_, _taken(self._open)))
        if self._notes:
            notes = _taken(self._notes)
            self._closed_notes += [Note(step, type_, when, text) for when, text in notes]

    def _hand_over(self) -> None:
        if not self._one_at_a_time.acquire(blocking=False):
            return  # another thread is at it
        try:
            self._handed_over = time.monotonic()
            closed, notes = _taken(self._closed), _taken(self._closed_notes)
            if self._sink is not None and (notes or any(numbers for _, _, numbers in closed)):
                self._sink(_said(closed, notes))
        finally:
            self._one_at_a_time.release()


def _taken(items: list[Any]) -> list[Any]:
    """Empties a list of what it holds now, and returns that."""
    taken = items[: len(items)]
    del items[: len(taken)]
    return taken


def _said(closed: list[_Step], notes: list[Note]) -> Said:
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
    return Said(
        steps=np.repeat(np.array([step for step, _, _ in closed], np.int64), counts),
        values=values,
        names=[name for name, _ in numbers],
        types=[type_ for _, type_, part in closed for _ in part],
        notes=notes,
        settle=partial(late.settle, values) if len(late) else None,
    )
