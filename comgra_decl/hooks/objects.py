"""Find objects among all objects of the program without disturbing its other threads.

The garbage collector's list includes objects that another thread is still constructing, such as the
tuple that `tuple(generator)` fills. Holding a reference to one when it is completed makes the other
thread fail ("SystemError: bad argument to internal function"). So the list is read in one call of C
code, during which no other thread runs, and only matching objects are kept.
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
"""The number of objects to search for frozen ones, starting from the variables of a function or of
the program's main module."""

_NO_WAY = (type, ModuleType, FunctionType, CodeType, FrameType, str, bytes, int, float)
"""Types not to search: they lead to no module or optimizer, or to everything ever imported."""


def instances_of(cls: type[T]) -> Iterator[T]:
    """Yield the living instances of a class and its subclasses; some may be yielded twice.

    Instances are recognised by `type`, because `isinstance` triggers lazy proxies. The collector
    does not list frozen objects (`gc.freeze`, called before forking workers). Of those, the ones
    reachable from variables of the main module are found, and from Python 3.13 on, also those
    reachable from variables of running functions.
    """
    kinds = _with_derived(cls)
    yield from _among(gc.get_objects, kinds=kinds)
    if gc.get_freeze_count():
        yield from (found for found in _reached() if id(type(found)) in kinds)


def functions_with(code: CodeType) -> list[FunctionType]:
    """Return the functions with the given code object, except frozen ones (`gc.freeze`)."""
    functions = _among(gc.get_referrers, code, kinds={id(FunctionType)})
    return [function for function in functions if function.__code__ is code]


def _among(found: Callable[..., list[Any]], *about: Any, kinds: Collection[int]) -> list[Any]:
    """Return the objects of some types among those that a function of `gc` returns.

    Args:
        found: the function of `gc`.
        about: its arguments.
        kinds: the ids of the types; a type whose metaclass defines `==` may not be hashable.
    """
    box: list[list[Any]] = []
    fill: Iterator[Any] = filter(None, map(box.extend, (starmap(found, (about,)),)))
    flags = map(kinds.__contains__, map(id, map(type, chain.from_iterable(box))))
    objects = chain(chain.from_iterable(box), repeat(None))  # longer, so that `flags` ends first
    empty: Iterator[Any] = filter(None, starmap(box.clear, ((),)))
    with uncollected():  # callbacks of a collection would allow other threads to run
        return list(chain(fill, compress(objects, flags), empty))  # evaluates all, in this order


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
    """Yield the objects reachable from the program's main module and from running functions."""
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
