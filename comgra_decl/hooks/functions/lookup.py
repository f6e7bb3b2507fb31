"""Find the functions named in a spec, under every name by which a program may call them.

The lookup imports no module, because that would run the program's code too early. If a module is
not loaded yet, its functions are found later, when a model is called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from comgra_decl.errors import did_you_mean

_FAMILY = (torch, torch.Tensor, functional, torch.special)
"""Namespaces in which a name stands for the same operation, as a function or as a method."""


@dataclass(frozen=True)
class Found:
    """A function with all its names.

    Attributes:
        name: the name in the spec.
        torch_functions: the functions that a torch function mode may receive when it is called.
        places: the (module or class, attribute) pairs that hold it and are patched to watch it.
        problem: why the function was not found, or "".
    """

    name: str
    torch_functions: tuple[Callable[..., Any], ...] = ()
    places: tuple[tuple[Any, str], ...] = field(default=())
    problem: str = ""


def find(name: str) -> Found:
    """Return the function with the given dotted name; `problem` explains why there is none."""
    owner, rest, where = _loaded(name)
    for attribute in rest[:-1]:
        known, owner = owner, getattr(owner, attribute, None)
        if owner is None:
            return _missing(name, attribute, where, dir(known))
        where = f"{where}.{attribute}"
    last = rest[-1]
    function = getattr(owner, last, None)
    if function is None:
        near = dir(owner) if owner is not None else [m for m in sys.modules if "._" not in m]
        return _missing(name, last if owner is not None else name, where, near)
    if isinstance(function, type):
        return Found(
            name, problem=f"{name!r} is a class; to select its modules, use {{class: {last}}}"
        )
    if not callable(function):
        return Found(name, problem=f"{name!r} is not a function")
    if not _is_open(owner):
        return Found(
            name, problem=f"{where!r} is not a Python module or class, so it cannot be watched"
        )
    if name.startswith("torch."):
        return _torch_function(name, owner, last, function)
    return Found(name, places=tuple(_places(owner, last, function)))


def _is_open(owner: Any) -> bool:
    """Whether the attributes of an owner can be replaced."""
    if inspect.isclass(owner):
        return owner is torch.Tensor or not owner.__flags__ & _IMMUTABLE
    return inspect.ismodule(owner)


_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def _loaded(name: str) -> tuple[Any, list[str], str]:
    """Return the innermost loaded module of a dotted name, the rest, and the module's name."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:length]))
        if module is not None:
            return module, parts[length:], ".".join(parts[:length])
    main = sys.modules.get("__main__")
    if main is not None and Path(str(getattr(main, "__file__", "") or "")).stem == parts[0]:
        return main, parts[1:], parts[0]  # the running script, by its file name
    return None, parts[-1:], ""


def _missing(name: str, attribute: str, where: str, names: list[str]) -> Found:
    public = [n for n in names if not n.startswith("_")]
    near = did_you_mean(attribute, public)
    place = f"{where!r} has no {attribute!r}" if where else "no module of that name is loaded"
    return Found(name, problem=f"there is no function {name!r}: {place}{near}")


def _torch_function(name: str, owner: Any, last: str, function: Callable[..., Any]) -> Found:
    functions = {function}
    places: list[tuple[Any, str]] = []
    if any(owner is member for member in _FAMILY):
        for attribute in (last, f"{last}_"):
            found = (getattr(member, attribute, None) for member in _FAMILY)
            functions |= {each for each in found if callable(each)}
        # Calls between functions of `torch.nn.functional` do not reach a mode. The attention of
        # `nn.MultiheadAttention` calls `softmax` this way.
        if hasattr(functional, last):
            places.append((functional, last))
    elif inspect.isfunction(function):
        places.append((owner, last))
    return Found(name, tuple(functions), tuple(places))


def _places(owner: Any, attribute: str, function: Any) -> Iterator[tuple[Any, str]]:
    """Yield the places that hold the function; `from layers import attend` creates another one."""
    yield owner, attribute
    if inspect.isclass(owner):
        return
    for module in list(sys.modules.values()):
        content = getattr(module, "__dict__", {})  # sys.modules may contain non-modules
        if module is not owner:
            names = [key for key, value in list(content.items()) if value is function]
            yield from ((module, key) for key in names)
