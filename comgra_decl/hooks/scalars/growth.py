"""Find out what keeps growing while a program's memory use grows from step to step.

What the program holds is measured only if its memory has grown steadily for some time: once, and
again some steps later. A measurement takes about as long as a garbage collection.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from comgra_decl.hooks.objects import unfrozen_of
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.hooks.scalars.holdings import Holdings, holdings, makers
from comgra_decl.hooks.scalars.whereabouts import CONTAINERS, newest, places_of

T = TypeVar("T")

SAMPLES = 12
"""Number of readings over which the memory must grow."""

LEAST = 4 << 20
"""Minimum growth over these readings, in bytes."""

_EVERY = (1, 8, 64)
"""Growth over so many consecutive readings, over every eighth and over every 64th one: the slower
the memory grows, the longer it takes to tell its growth from noise."""

_STEADY = 0.8  # share of the readings that must exceed the previous one
_STEPS = 20  # minimum number of steps between two measurements
_SHARE = 0.2  # of the memory's growth that a tensor must explain
_OFTEN = 10  # steps in which a container must gain an entry, such as one of each evaluation
_LEAST_ENTRIES = 4  # that it must gain between two measurements
_MOST_COUNTS = 6
_MOST_HOLDERS = 3
_LEAST_LENGTH = 8
_MOST_ENTRIES = 16  # of an entry of a container, in which arrays are looked for


@dataclass(frozen=True)
class Gain:
    """What something gains per step.

    Attributes:
        holder: its name, such as `losses in train (train.py)`.
        number: bytes, or entries.
        in_bytes: which of them.
    """

    holder: str
    number: float
    in_bytes: bool = False


@dataclass(frozen=True)
class _Measured:
    step: int
    memory: int
    lengths: dict[int, int]
    held: Holdings


class Growth:
    """Watches a program's memory use, and names what grows with it."""

    def __init__(self) -> None:
        self._readings = 0
        self._sizes = {every: deque[int](maxlen=SAMPLES + 1) for every in _EVERY}
        self._before: _Measured | None = None
        self._counts = 0
        self._has_grown = False  # whether it has grown before, as every program does at first

    def look(self, step: int, size: int) -> list[Gain]:
        """Handle a reading of the memory.

        Args:
            step: the step in progress.
            size: the memory in use, in bytes.

        Returns:
            What grows, the most important first; usually empty.
        """
        self._readings += 1
        for every, sizes in self._sizes.items():
            if self._readings % every == 0:
                sizes.append(size)
        if self._counts >= _MOST_COUNTS or not self._grows():
            return []
        if not self._has_grown:
            self._has_grown = True
            self._forget()
            return []
        if self._before is not None and step - self._before.step < _STEPS:
            return []
        self._counts += 1
        self._forget()
        containers = {id(each): each for each in unfrozen_of(CONTAINERS)}
        lengths = {n: len(each) for n, each in containers.items() if len(each) >= _LEAST_LENGTH}
        before, now = self._before, _Measured(step, size, lengths, holdings())
        self._before = now
        return [] if before is None else [*_gains(before, now, containers)][: 2 * _MOST_HOLDERS]

    def _grows(self) -> bool:
        return any(_is_growth(sizes) for sizes in self._sizes.values())

    def _forget(self) -> None:
        for sizes in self._sizes.values():
            sizes.clear()


def _is_growth(sizes: deque[int]) -> bool:
    if len(sizes) <= SAMPLES or sizes[-1] - sizes[0] < LEAST:
        return False
    larger = sum(after > before for before, after in pairwise(sizes))
    return larger >= _STEADY * SAMPLES


def _gains(before: _Measured, now: _Measured, containers: dict[int, Any]) -> Iterator[Gain]:
    steps = now.step - before.step
    least = max(_SHARE * (now.memory - before.memory), 1.0)
    for name, size in _largest(before.held.sizes, now.held.sizes, least):
        yield Gain(name, size / steps, in_bytes=True)
    few = max(_LEAST_ENTRIES, steps / _OFTEN)
    longer = _largest(Counter(before.lengths), Counter(now.lengths), few)
    longer = [(number, gain) for number, gain in longer if number in before.lengths]
    hidden = {id(containers), id(now.lengths)}
    gained = {number: gain for number, gain in longer if _holds_data(containers[number])}
    things = [containers[number] for number in gained]
    for thing, name in islice(places_of(things, hidden), _MOST_HOLDERS):
        yield Gain(name, gained[id(thing)] / steps)
    for name, gain in _largest(before.held.counts, now.held.counts, steps / 2):
        yield Gain(name, gain / steps)
    made = _largest(before.held.made, now.held.made, few)
    names = makers({each for each, _ in made}) if made else {}
    for each, gain in made:
        if each in names:
            yield Gain(f"tensors with graphs made by {names[each]}", gain / steps)


def _largest(before: Counter[T], now: Counter[T], least: float) -> list[tuple[T, int]]:
    """Return what has grown by at least `least`, and by how much, the largest gain first."""
    gains = Counter({key: number - before[key] for key, number in now.items()})
    return [(key, gain) for key, gain in gains.most_common() if gain >= least]


def _holds_data(thing: Any) -> bool:
    """Return whether the newest entries of a container are or contain tensors or arrays."""
    entries = newest(thing)
    return bool(entries) and all(map(_is_data, entries))


def _is_data(entry: Any) -> bool:
    if issubclass(type(entry), (Tensor, np.ndarray)) or tensors_in(entry):
        return True
    inner = [*entry.values()] if type(entry) is dict else entry
    return type(entry) in (dict, list, tuple) and any(
        issubclass(type(each), np.ndarray) for each in inner[:_MOST_ENTRIES]
    )
