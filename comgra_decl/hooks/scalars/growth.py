"""Find out what keeps growing while a program's memory use grows from step to step.

The objects of the program are counted only if its memory has grown steadily for some time: once,
and again some steps later. A count takes about as long as a garbage collection.
"""

from __future__ import annotations

import sys
from collections import deque
from itertools import islice, pairwise
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor

from comgra_decl.hooks.frames import is_ours, variables
from comgra_decl.hooks.objects import unfrozen_of
from comgra_decl.hooks.pytree import tensors_in

SAMPLES = 12
"""Number of consecutive readings over which the memory must grow."""

LEAST = 4 << 20
"""Minimum growth over these readings, in bytes."""

_STEADY = 0.8  # share of the readings that must exceed the previous one
_STEPS = 20  # minimum number of steps between two counts
_MOST_COUNTS = 6
_MOST_HOLDERS = 3
_LEAST_LENGTH = 8
_DEPTH = 60
_CONTAINERS = (list, dict, set, deque)


class Growth:
    """Watches a program's memory use, and names the tensor containers that grow with it."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque(maxlen=SAMPLES + 1)
        self._before: tuple[int, dict[int, int]] | None = None  # step and lengths at the last count
        self._counts = 0
        self._has_grown = False  # whether it has grown before, as every program does at first

    def look(self, step: int, size: int) -> dict[str, float]:
        """Handle a reading of the memory.

        Args:
            step: the step in progress.
            size: the memory in use, in bytes.

        Returns:
            The growth in tensors per step, by the name of what grows; usually empty.
        """
        self._sizes.append(size)
        if self._counts >= _MOST_COUNTS or not self._grows():
            return {}
        if not self._has_grown:
            self._has_grown = True
            self._sizes.clear()
            return {}
        if self._before is not None and step - self._before[0] < _STEPS:
            return {}
        self._counts += 1
        self._sizes.clear()
        before, lengths = self._before, _lengths()
        self._before = step, {number: len(thing) for number, thing in lengths.items()}
        if before is None:
            return {}
        steps = step - before[0]
        gains = {
            number: len(thing) - before[1][number]
            for number, thing in lengths.items()
            if number in before[1] and 2 * (len(thing) - before[1][number]) >= steps
        }
        largest = sorted(gains, key=lambda number: gains[number], reverse=True)
        found: dict[str, float] = {}
        for number in largest:
            thing = lengths[number]
            if len(found) < _MOST_HOLDERS and _holds_tensors(thing):
                found[_name_of(thing)] = gains[number] / steps
        return found

    def _grows(self) -> bool:
        sizes = self._sizes
        if len(sizes) <= SAMPLES or sizes[-1] - sizes[0] < LEAST:
            return False
        larger = sum(after > before for before, after in pairwise(sizes))
        return larger >= _STEADY * SAMPLES


def _lengths() -> dict[int, Any]:
    """Return all containers of several objects, by id."""
    return {id(each): each for each in unfrozen_of(_CONTAINERS) if len(each) >= _LEAST_LENGTH}


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


def _name_of(thing: Any) -> str:
    """Return where the program stores a container."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            break
        code, name = frame.f_code, None
        if not is_ours(frame):
            name = variables(frame, lambda known: _name_in(dict(known), thing))
        if name is not None:
            return f"{name} in {code.co_qualname} ({Path(code.co_filename).name})"
        frame = frame.f_back
    main = sys.modules.get("__main__")
    name = _name_in(dict(vars(main)), thing) if isinstance(main, ModuleType) else None
    return f"{name} in __main__" if name is not None else f"a {type(thing).__name__}"


def _name_in(known: dict[str, Any], thing: Any) -> str | None:
    """Return the name of the variable, or of its attribute, that refers to the given object."""
    for name, value in known.items():
        if value is thing:
            return name
    for name, value in known.items():
        if isinstance(value, (ModuleType, type)):
            continue
        try:  # without running the program's code, such as a `__getattribute__`
            own = object.__getattribute__(value, "__dict__")
        except AttributeError:
            continue
        if type(own) is dict:
            for attribute, held in [*own.items()]:
                if held is thing:
                    return f"{name}.{attribute}"
    return None
