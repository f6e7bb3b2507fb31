"""Search all objects of the program without disturbing its other threads.

The garbage collector's list includes objects that another thread is still constructing, such as the
tuple that `tuple(generator)` fills. If a reference to such a tuple exists at the time the tuple is
completed, the other thread fails with "SystemError: bad argument to internal function". The list is
therefore read in a single call of C code, during which no other thread runs, and only matching
objects are kept.

Reading the whole list takes about 0.1 seconds in a program that has imported a large library. The
modules and optimizers that it contains are therefore remembered. As long as no collection has moved
newer objects to the oldest generation, a later search reads only the two younger generations.
"""

from __future__ import annotations

import gc
import operator
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain, compress, repeat, starmap
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from comgra_decl.hooks.call_context import variables_in_use
from comgra_decl.hooks.other_threads import uncollected
from comgra_decl.hooks.patches import Patch

T = TypeVar("T")
Moved = tuple[int, ...]

_MOST_REACHED = 5_000
"""The number of objects to search for frozen ones, starting from the variables of a function or the
program's main module."""

_NO_WAY = (type, ModuleType, FunctionType, CodeType, FrameType, str, bytes, int, float)
"""Types that are not searched, because they lead to no module or optimizer, or to every imported
object."""

_SOUGHT = (nn.Module, Optimizer)
"""The classes whose instances are remembered."""

_MOST_REMEMBERED = 10_000

_HAS_GENERATIONS = sys.version_info < (3, 14) and not sysconfig.get_config_var("Py_GIL_DISABLED")
"""Whether objects move to the oldest generation only when the second one is collected."""

_key = object.__hash__
"""Returns a number that only one object has, as `id` does: the hash of its address.

`id` itself is an audited event, so if the program has an audit hook in Python (`sys.addaudithook`),
each call of it would let other threads run in the middle of a search. Types themselves cannot be
keys, because one whose metaclass defines `==` may not be hashable.
"""

_remembered: tuple[Moved, list[weakref.ref[Any]]] | None = None

_frozen: dict[int, weakref.ref[Any]] = {}
"""The modules and optimizers that existed when the program called `gc.freeze`, keyed by `id`."""


def watch_freezing(*, on_fault: Callable[[BaseException], None]) -> Patch:
    """Return a patch that notes all modules and optimizers just before `gc.freeze` hides them."""

    def freeze(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            _note_unfrozen()
        except Exception as error:
            on_fault(error)
        return original(*args, **kwargs)

    return Patch(gc, "freeze", freeze)


def _note_unfrozen() -> None:
    global _remembered
    _remembered = None  # `gc.unfreeze` moves objects to the oldest generation
    kinds = _with_derived(nn.Module) | _with_derived(Optimizer)
    alive = {number: known for number, known in _frozen.items() if known() is not None}
    found = {id(one): weakref.ref(one) for one in _unfrozen(kinds)}
    _frozen.clear()
    _frozen.update(alive | found)


def instances_of(cls: type[T]) -> Iterator[T]:
    """Yield the living instances of a class and its subclasses; some may be yielded twice.

    Instances are recognised by `type`, because `isinstance` triggers lazy proxies. The collector
    does not list frozen objects (`gc.freeze`, called before forking workers). Of the frozen
    objects, this function finds the modules and optimizers that existed when a watched `gc.freeze`
    was called, and objects reachable from variables of the main module. From Python 3.13 on, it
    also finds objects reachable from variables of running functions.
    """
    kinds = _with_derived(cls)
    yield from (found for found in _sought() if _key(type(found)) in kinds)
    if gc.get_freeze_count():
        noted = (known() for known in list(_frozen.values()))
        yield from (found for found in chain(noted, _reached()) if _key(type(found)) in kinds)


def all_of(cls: type[T]) -> list[T]:
    """Return the instances of any class that the collector lists, in a slow search of all objects.

    Unlike `instances_of`, it is not limited to modules and optimizers, and finds no frozen objects.
    """
    return _among(gc.get_objects, kinds=_with_derived(cls))


def _sought() -> Iterator[Any]:
    """Yield the living modules and optimizers, except frozen ones; some may be yielded twice."""
    global _remembered
    kinds = {number for cls in _SOUGHT for number in _with_derived(cls)}
    remembered = _remembered  # another thread may forget it
    if remembered is not None:
        before, known = remembered
        # a collection in between moves objects from the first generation to the second
        young = [*_among(gc.get_objects, 0, kinds=kinds), *_among(gc.get_objects, 1, kinds=kinds)]
        if _moved() == before:
            yield from (found for reference in known if (found := reference()) is not None)
            yield from young
            return
        del young
    _remembered, moved = None, _moved()
    everything = _unfrozen(kinds)
    if _HAS_GENERATIONS and len(everything) <= _MOST_REMEMBERED:
        _remembered = moved, [weakref.ref(found) for found in everything]
    yield from everything


def _moved() -> Moved:
    """Return how often objects have moved to the oldest generation or have been frozen."""
    collections = (int(generation["collections"]) for generation in gc.get_stats()[1:])
    return (gc.get_freeze_count(), *collections)


def functions_with(code: CodeType) -> list[FunctionType]:
    """Return the functions with the given code object, except frozen ones (`gc.freeze`)."""
    functions = _among(gc.get_referrers, code, kinds={_key(FunctionType)})
    return [function for function in functions if function.__code__ is code]


def unfrozen_of(types: Collection[type]) -> list[Any]:
    """Return the objects of exactly the given types, except frozen ones (`gc.freeze`)."""
    return _unfrozen({_key(kind) for kind in types})


def referrers_of(*things: Any) -> list[Any]:
    """Return the objects that refer to any of some things, except tuples and frames."""
    return _among(gc.get_referrers, *things, kinds={_key(tuple), _key(FrameType)}, without=True)


def _unfrozen(kinds: Collection[int]) -> list[Any]:
    return _among(gc.get_objects, kinds=kinds)


def _among(
    found: Callable[..., list[Any]], *about: Any, kinds: Collection[int], without: bool = False
) -> list[Any]:
    """Return the objects of some types among those that a function of `gc` returns.

    Args:
        found: the function of `gc`.
        about: its arguments.
        kinds: the keys of the types.
        without: whether to return the objects of all other types instead.
    """
    box: list[list[Any]] = []
    fill: Iterator[Any] = filter(None, map(box.extend, (starmap(found, (about,)),)))
    flags = map(kinds.__contains__, map(_key, map(type, chain.from_iterable(box))))
    if without:
        flags = map(operator.not_, flags)
    objects = chain(chain.from_iterable(box), repeat(None))  # infinite, so that `flags` ends first
    empty: Iterator[Any] = filter(None, starmap(box.clear, ((),)))
    with uncollected():  # otherwise callbacks of a collection would allow other threads to run
        return list(chain(fill, compress(objects, flags), empty))  # evaluates all, in this order


def _with_derived(cls: type) -> set[int]:
    waiting: list[type] = [cls]
    known = {_key(cls)}
    derived: type
    while waiting:
        for derived in type.__subclasses__(waiting.pop()):
            if _key(derived) not in known:
                known.add(_key(derived))
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
