"""Finds objects among all that the program has, without being felt by its other threads.

The collector's list of all objects has some that another thread is about to finish, such as the
tuple that `tuple(generator)` fills. Whoever holds a reference to that one when it is done makes the
other thread fail ("SystemError: bad argument to internal function"). So the list is read in one
call of C code, within which no other thread runs, and only what was looked for is kept.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain, compress, repeat, starmap
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from comgra_decl.hooks.call_context import variables_in_use
from comgra_decl.hooks.other_threads import uncollected

T = TypeVar("T")

_MOST_REACHED = 5_000
"""Objects nearest to the variables of a function, or of the program's main module, among which
frozen ones are looked for."""

_NO_WAY = (type, ModuleType, FunctionType, CodeType, FrameType, str, bytes, int, float)
"""What does not lead to a module or an optimizer, or to everything that was ever imported."""


def instances_of(cls: type[T]) -> Iterator[T]:
    """Yields the living instances of a class, told by `type`: `isinstance` wakes lazy proxies.

    Some may come twice. What a program has frozen (`gc.freeze`, before it forks workers) is in no
    list of the collector: of that, what variables of the program's main module lead to is found,
    and from Python 3.13 on, those of running functions.
    """
    kinds = _with_derived(cls)
    yield from _among(gc.get_objects, kinds=kinds)
    if gc.get_freeze_count():
        yield from (found for found in _reached() if id(type(found)) in kinds)


def functions_with(code: CodeType) -> list[FunctionType]:
    """Returns the functions that run some code, unless they are frozen (`gc.freeze`)."""
    functions = _among(gc.get_referrers, code, kinds={id(FunctionType)})
    return [function for function in functions if function.__code__ is code]


def _among(found: Callable[..., list[Any]], *about: Any, kinds: Collection[int]) -> list[Any]:
    """Returns those of what a function of the collector finds that have one of some types.

    Types are told apart by `id`: one whose metaclass defines `==` may have no hash.
    """
    box: list[list[Any]] = []
    fill: Iterator[Any] = filter(None, map(box.extend, (starmap(found, (about,)),)))
    flags = map(kinds.__contains__, map(id, map(type, chain.from_iterable(box))))
    objects = chain(chain.from_iterable(box), repeat(None))  # longer: both come to the box's end
    empty: Iterator[Any] = filter(None, starmap(box.clear, ((),)))
    with uncollected():  # what is run for a collection would let other threads go on
        return list(chain(fill, compress(objects, flags), empty))  # all happens here, in this order


def _with_derived(cls: type) -> set[int]:
    waiting: list[type] = [cls]
    known = {id(cls)}
    derived: type
    while waiting:
        for derived in type.__subclasses__(waiting.pop()):
            if id(derived) not in known:
                known.add(id(derived))
                waiting.append(derived)
    return known


def _reached() -> Iterator[Any]:
    """Yields what can be reached from the program's main module, and from running functions."""
    seen: set[int] = set()
    for origin in [vars(sys.modules["__main__"]), *variables_in_use()]:
        waiting: deque[Any] = deque([origin])
        for _ in range(_MOST_REACHED):
            if not waiting:
                break
            current = waiting.popleft()
            yield current
            for found in gc.get_referents(current):
                if id(found) not in seen and not issubclass(type(found), _NO_WAY):
                    seen.add(id(found))
                    waiting.append(found)
