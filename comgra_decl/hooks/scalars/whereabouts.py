"""Find where a program stores its containers: `kept["deep"]["er"] in train (train.py)`.

Variables of the running functions and of the main module are followed through containers,
attributes and the closures of functions. What they do not lead to is followed backwards, to the
object that holds it. Neither runs code of the program.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from comgra_decl.hooks.frames import TORCH_FOLDER, is_module, variables
from comgra_decl.hooks.objects import referrers_of
from comgra_decl.hooks.scalars.holdings import own_attributes, place_of, program_frames

CONTAINERS = (list, dict, set, deque)
"""The types of containers whose places are looked for."""

_NESTED = (*CONTAINERS, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
_MOST_VISITED = 20_000  # objects that are reached from variables
_MOST_ENTRIES = 64  # at the beginning and at the end of a container
_LONGEST_KEY = 40  # characters
_LEVELS = 8  # containers between a container and the object that holds it, its dict included
_MOST_REFERRERS = 100
_HEAP_TYPE = 1 << 9  # the flag `Py_TPFLAGS_HEAPTYPE`: defined in Python
_NO_WAY = (type, ModuleType, CodeType, FrameType, str, bytes, int, float, Tensor, np.ndarray)
_KEYS = (str, int, float, bool, type(None))

Place = tuple[str, str]  # the path from a variable, and where the variable is
Named = tuple[str, Any]


def places_of(things: list[Any], hidden: set[int]) -> Iterator[tuple[Any, str]]:
    """Yield containers with the place where the program stores them, except those of tracing.

    Args:
        things: the containers.
        hidden: ids of objects that refer to them and do not count.
    """
    reached = _reached({id(thing) for thing in things})
    for thing in things:
        if id(thing) in reached:
            path, place = reached[id(thing)]
            yield thing, f"{path} in {place}"
        elif (name := _by_holder(thing, hidden | {id(things)})) is not None:
            yield thing, name


# -- forwards, from variables ----------------------------------------------------------------------


def _reached(wanted: set[int]) -> dict[int, Place]:
    """Return the shortest paths from variables to the objects with some ids."""
    ways = _Ways(wanted)
    for frame in program_frames():
        variables(frame, partial(ways.add_all, place=place_of(frame)))
    main = sys.modules.get("__main__")
    if isinstance(main, ModuleType):
        ways.add_all(vars(main), place="__main__")
    ways.follow()
    return ways.found


class _Ways:
    """Ways from variables to objects, the shortest first.

    Attributes:
        found: the place of each object that was looked for, by its id.
    """

    def __init__(self, wanted: set[int]) -> None:
        self.found: dict[int, Place] = {}
        self._wanted = wanted
        self._waiting: deque[tuple[str, str, Any]] = deque()
        self._seen: set[int] = set()

    def add_all(self, known: Mapping[str, Any], *, place: str) -> None:
        """Add variables."""
        self._add([*known.items()], place)

    def follow(self) -> None:
        """Follow the variables, until all objects are found or many have been visited."""
        for _ in range(_MOST_VISITED):
            if not self._waiting or len(self.found) == len(self._wanted):
                return
            path, place, value = self._waiting.popleft()
            if issubclass(type(value), FunctionType):
                if not value.__code__.co_filename.startswith(TORCH_FOLDER):
                    self._add(_of_function(value), f"function {value.__qualname__}")
            elif issubclass(type(value), GeneratorType):
                if value.gi_frame is not None and not value.gi_running:
                    inside = partial(self.add_all, place=f"generator {value.__qualname__}")
                    variables(value.gi_frame, inside)
                continue
            self._add(_inside(value, path), place)

    def _add(self, named: Iterable[Named], place: str) -> None:
        for path, value in named:
            if path.startswith("__") or id(value) in self._seen:
                continue
            if issubclass(type(value), _NO_WAY) or _is_ours(value):
                continue
            self._seen.add(id(value))
            if id(value) in self._wanted:
                self.found[id(value)] = path, place
            self._waiting.append((path, place, value))


def _is_ours(value: Any) -> bool:
    return str(type(value).__module__).startswith("comgra_decl.")


def _of_function(function: FunctionType) -> Iterator[Named]:
    """Yield the variables in the closure of a function, and the defaults of its arguments."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    defaults = function.__defaults__ or ()
    if defaults:
        yield from zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()


def _inside(value: Any, path: str) -> Iterator[Named]:
    """Yield what a container or an object leads to in one step, with the paths."""
    kind = type(value)
    if issubclass(kind, dict):
        for key, entry in _entries(dict.items(value), dict.__len__(value)):
            yield f"{path}[{_key(key)}]", entry
    elif issubclass(kind, _SEQUENCES):
        base: Any = next(each for each in _SEQUENCES if issubclass(kind, each))
        count = base.__len__(value)
        for at in {*range(min(count, _MOST_ENTRIES)), *range(count)[-_MOST_ENTRIES:]}:
            try:
                yield f"{path}[{at}]", base.__getitem__(value, at)
            except IndexError:  # another thread has removed it
                break
    elif issubclass(kind, MethodType):
        yield path, value.__self__
        yield path, value.__func__
    elif issubclass(kind, partial):
        yield path, value.func
        yield f"{path}.args", value.args
        yield f"{path}.keywords", value.keywords
    yield from _attributes(value, path)


def _entries(items: Any, count: int) -> list[Any]:
    """Return the first and the last entries of a dict."""
    try:
        if count <= 2 * _MOST_ENTRIES:
            return [*items]
        last = [*islice(reversed(items), _MOST_ENTRIES)]
        return [*islice(items, _MOST_ENTRIES), *reversed(last)]
    except RuntimeError:  # another thread has changed it
        return []


def _attributes(value: Any, path: str) -> Iterator[Named]:
    """Yield the attributes of an object, those in slots and the children of modules included."""
    if is_module(value):
        for name, child in [*value._modules.items()]:
            yield f"{path}.{name}", child
    held = dict(vars(value)) if issubclass(type(value), FunctionType) else own_attributes(value)
    for name, entry in held.items():
        yield f"{path}.{name}", entry
    for kind in type(value).__mro__:
        if not kind.__flags__ & _HEAP_TYPE:
            break
        if "__slots__" not in vars(kind):
            continue
        for name, slot in [*vars(kind).items()]:
            if issubclass(type(slot), MemberDescriptorType):
                try:
                    yield f"{path}.{name}", slot.__get__(value, kind)
                except AttributeError:  # not assigned
                    continue


def _key(key: Any) -> str:
    """Return a key of a dict as in a program; only its type, unless it is a number or a text."""
    if type(key) is str:
        text = key[:_LONGEST_KEY] + "…" * (len(key) > _LONGEST_KEY)
        return json.dumps(text.encode(errors="replace").decode(), ensure_ascii=False)
    return repr(key) if type(key) in _KEYS else type(key).__name__


# -- backwards, to a holder ------------------------------------------------------------------------


def _by_holder(thing: Any, hidden: set[int]) -> str | None:
    """Return the object that holds a container, and the path from there; None if tracing does."""
    owner, led = _owner(thing, hidden)
    kind = type(owner)
    if issubclass(kind, Optimizer) or str(kind.__module__).startswith("comgra_decl."):
        return None  # the states of optimizers are measured
    if owner is None:
        return f"a {type(thing).__name__}{_of_what(thing)}"
    path = _path_within(owner, thing, led)
    if isinstance(owner, ModuleType):
        return f"{path.removeprefix('.')} in {owner.__name__}"
    named = owner if isinstance(owner, type) else kind
    return f"{named.__qualname__}{path}"


def _owner(thing: Any, hidden: set[int]) -> tuple[Any, set[int]]:
    """Return the object that holds a container, and the ids of the containers that lead there.

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
                return each, led
        level = following
    return None, led


def _path_within(owner: Any, thing: Any, led: set[int]) -> str:
    """Return the path from an object to a container, through containers with the given ids."""
    plain = isinstance(owner, (ModuleType, type))
    known = ((f".{n}", v) for n, v in [*vars(owner).items()]) if plain else _attributes(owner, "")
    waiting = deque((path, value) for path, value in known if id(value) in led)
    for _ in range(_MOST_VISITED):
        if not waiting:
            return ""
        path, value = waiting.popleft()
        if value is thing:
            return path
        waiting.extend((p, v) for p, v in _inside(value, path) if id(v) in led)
    return ""


def _of_what(thing: Any) -> str:
    """Return what a container that no variable leads to contains, such as ` of tensors [8, 3]`."""
    entries = newest(thing)
    if not entries:
        return ""
    for kind, name in ((Tensor, "tensors"), (np.ndarray, "arrays")):
        if isinstance(entries[0], kind):
            return f" of {name} {[*entries[0].shape]}"
    return f" of objects of the type {type(entries[0]).__name__}"


def newest(thing: Any) -> list[Any]:
    """Return the two newest entries of a container, or any two of a set, without copying it."""
    if isinstance(thing, list):
        return thing[-2:]
    values = thing.values() if isinstance(thing, dict) else thing
    try:
        return [*islice(values if isinstance(thing, set) else reversed(values), 2)]
    except RuntimeError:  # another thread has changed it
        return []
