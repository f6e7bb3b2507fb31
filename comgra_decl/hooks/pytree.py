"""Finding the tensors inside whatever a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MAX_DEPTH = 8  # deeper nesting is a cycle or a data structure that is no output
_LEAVES = frozenset({type(None), bool, int, float, str})  # what needs no look inside


def tensors_in(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Returns (path, tensor) for every tensor in a nested value, in a stable order.

    Mappings give `.key`, sequences `[i]`, named tuples, dataclasses and attrs classes `.field`.
    Own walk rather than pytree: pytree does not enter dataclasses and is ten times slower on a
    plain tensor.
    """
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    found: list[tuple[str, torch.Tensor]] = []
    if type(value) not in _LEAVES:
        _collect(value, path, found, 0)
    return found


def gradient_function(tensor: torch.Tensor) -> Any:
    """Returns the `grad_fn` of a tensor; None also where torch refuses to tell it.

    It does for a view that was made under `no_grad` of something that was then changed in place, as
    LBFGS does with complex parameters.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _collect(value: Any, path: str, found: list[tuple[str, torch.Tensor]], depth: int) -> None:
    if depth == _MAX_DEPTH:
        return
    kind = type(value)
    if kind is tuple or kind is list:  # nearly always, and a hook's time: no generator
        for i, child in enumerate(value):
            if isinstance(child, torch.Tensor):
                found.append((f"{path}[{i}]", child))
            elif type(child) not in _LEAVES:
                _collect(child, f"{path}[{i}]", found, depth + 1)
        return
    # the keyword arguments of a call, mostly none, are a dict: no generator for those either
    plain = kind is dict
    children = [(f".{key}", child) for key, child in value.items()] if plain else _children(value)
    for step, child in children:
        if isinstance(child, torch.Tensor):
            found.append((path + step, child))
        elif type(child) not in _LEAVES:
            _collect(child, path + step, found, depth + 1)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f".{key}", child) for key, child in value.items())
    elif isinstance(value, Tensors):
        yield from value.by_path.items()
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        yield from ((f".{names[i]}" if names else f"[{i}]", child) for i, child in enumerate(value))
    elif not isinstance(value, type):
        yield from ((f".{name}", getattr(value, name, None)) for name in _field_names(value))


def _field_names(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return [field.name for field in getattr(type(value), "__attrs_attrs__", ())]


class Tensors:
    """A value of which only its tensors are known, by their paths in it."""

    def __init__(self) -> None:
        self.by_path: dict[str, torch.Tensor] = {}


def rebuilt(
    paths: list[str], tensors: list[torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call in which tensors lie as `tensors_in` has found them.

    What is no tensor and holds none is None, or missing at the end.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for path, tensor in zip(paths, tensors, strict=False):  # no tensors: one empty path
        first, rest = _first_step(path)
        if isinstance(first, int):
            args.extend([None] * (first + 1 - len(args)))
            args[first] = _with(args[first], rest, tensor)
        else:
            kwargs[first] = _with(kwargs.get(first), rest, tensor)
    return tuple(args), kwargs


def _first_step(path: str) -> tuple[int | str, str]:
    if path.startswith("["):
        number, _, rest = path[1:].partition("]")
        return int(number), rest
    end = next((i for i, letter in enumerate(path) if letter in ".[" and i), len(path))
    return path[1:end], path[end:]


def _with(value: Any, path: str, tensor: torch.Tensor) -> Any:
    if not path:
        return tensor
    value = value or Tensors()
    value.by_path[path] = tensor
    return value


def first_batch_size(*values: Any) -> int | None:
    """Returns the first dimension of the first tensor with one, or None: the batch size."""
    for value in values:
        for _, tensor in tensors_in(value):
            if tensor.dim() > 0:
                return int(tensor.size(0))  # nested tensors have no `shape`
    return None
