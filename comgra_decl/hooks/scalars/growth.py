"""Find out what keeps growing while a program's memory use grows from step to step.

What the program holds is measured only if its memory has grown steadily for some time: once, and
again some steps later. A measurement takes about as long as a garbage collection.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from comgra_decl.hooks.frames import variables
from comgra_decl.hooks.objects import referrers_of, unfrozen_of
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.hooks.scalars.holdings import (
    Holdings,
    holdings,
    makers,
    own_attributes,
    place_of,
    program_frames,
)

T = TypeVar("T")

SAMPLES = 12
"""Number of consecutive readings over which the memory must grow."""

LEAST = 4 << 20
"""Minimum growth over these readings, in bytes."""

_STEADY = 0.8  # share of the readings that must exceed the previous one
_STEPS = 20  # minimum number of steps between two measurements
_SHARE = 0.2  # of the memory's growth that a tensor must explain
_OFTEN = 10  # steps in which a container must gain an entry, such as one of each evaluation
_LEAST_ENTRIES = 4  # that it must gain between two measurements
_MOST_COUNTS = 6
_MOST_HOLDERS = 3
_LEAST_LENGTH = 8
_LEVELS = 4  # containers between a container and the object that holds it
_MOST_REFERRERS = 100
_HEAP_TYPE = 1 << 9  # the flag `Py_TPFLAGS_HEAPTYPE`: defined in Python
_CONTAINERS = (list, dict, set, deque)
_NESTED = (*_CONTAINERS, OrderedDict, defaultdict)


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
        self._sizes: deque[int] = deque(maxlen=SAMPLES + 1)
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
        self._sizes.append(size)
        if self._counts >= _MOST_COUNTS or not self._grows():
            return []
        if not self._has_grown:
            self._has_grown = True
            self._sizes.clear()
            return []
        if self._before is not None and step - self._before.step < _STEPS:
            return []
        self._counts += 1
        self._sizes.clear()
        containers = {id(each): each for each in unfrozen_of(_CONTAINERS)}
        lengths = {n: len(each) for n, each in containers.items() if len(each) >= _LEAST_LENGTH}
        before, now = self._before, _Measured(step, size, lengths, holdings())
        self._before = now
        return [] if before is None else [*_gains(before, now, containers)][: 2 * _MOST_HOLDERS]

    def _grows(self) -> bool:
        sizes = self._sizes
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
    named = (
        (_name_of(containers[number], hidden), gain)
        for number, gain in longer
        if _holds_tensors(containers[number])
    )
    for name, gain in islice(((n, g) for n, g in named if n is not None), _MOST_HOLDERS):
        yield Gain(name, gain / steps)
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


def _holds_tensors(thing: Any) -> bool:
    """Return whether the newest entries of a container are or contain tensors."""
    newest = _newest(thing)
    return bool(newest) and all(isinstance(each, Tensor) or tensors_in(each) for each in newest)


def _newest(thing: Any) -> list[Any]:
    """Return the two newest entries of a container, or any two of a set, without copying it."""
    if isinstance(thing, list):
        return thing[-2:]
    values = thing.values() if isinstance(thing, dict) else thing
    try:
        return [*islice(values if isinstance(thing, set) else reversed(values), 2)]
    except RuntimeError:  # another thread has changed it
        return []


def _name_of(thing: Any, hidden: set[int]) -> str | None:
    """Return where the program stores a container; None if not the program but tracing does.

    Args:
        thing: the container.
        hidden: ids of referrers that do not count.
    """
    for frame in program_frames():
        name = variables(frame, lambda known: _name_in(dict(known), thing))
        if name is not None:
            return f"{name} in {place_of(frame)}"
    main = sys.modules.get("__main__")
    name = _name_in(dict(vars(main)), thing) if isinstance(main, ModuleType) else None
    if name is not None:
        return f"{name} in __main__"
    owner, attribute = _owner(thing, hidden)
    kind = type(owner)
    if issubclass(kind, Optimizer) or str(kind.__module__).startswith("comgra_decl."):
        return None  # the states of optimizers are measured
    if owner is None:
        return f"a {type(thing).__name__}"
    if isinstance(owner, ModuleType):
        return f"{attribute} in {owner.__name__}"
    named = owner if isinstance(owner, type) else kind
    return ".".join(filter(None, (named.__qualname__, attribute)))


def _owner(thing: Any, hidden: set[int]) -> tuple[Any, str]:
    """Return the object that holds a container, and the attribute that leads to the container.

    The object is an instance of a Python class, a class or a module; None if there is none.
    """
    level, led = [thing], {id(thing)}
    for _ in range(_LEVELS):
        following: list[Any] = []
        for each in referrers_of(*level)[:_MOST_REFERRERS]:  # one search through all objects
            if id(each) in hidden | led or each is level or each is following:
                continue
            if type(each) in _NESTED:
                led.add(id(each))
                following.append(each)
            elif type(each).__flags__ & _HEAP_TYPE or isinstance(each, (ModuleType, type)):
                plain = isinstance(each, (ModuleType, type))
                known = dict(vars(each)) if plain else own_attributes(each)
                return each, next((n for n, one in known.items() if id(one) in led), "")
        level = following
    return None, ""


def _name_in(known: dict[str, Any], thing: Any) -> str | None:
    """Return the name of the variable, or of its attribute, that refers to the given object."""
    for name, value in known.items():
        if value is thing:
            return name
    for name, value in known.items():
        for attribute, held in own_attributes(value).items():
            if held is thing:
                return f"{name}.{attribute}"
    return None
