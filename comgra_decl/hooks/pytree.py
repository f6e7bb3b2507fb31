"""Find the tensors in the nested arguments and outputs of modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

_MAX_DEPTH = 8  # deeper nesting is a cycle or a data structure other than an output
_LEAVES = frozenset({type(None), bool, int, float, str})  # types that contain no tensors


def tensors_in(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Return (path, tensor) for every tensor in a nested value, in a stable order.

    Mappings add `.key` to the path, sequences `[i]`, and named tuples, dataclasses and attrs
    classes `.field`. torch's pytree does not traverse dataclasses and is ten times slower on a
    plain tensor.
    """
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    found: list[tuple[str, torch.Tensor]] = []
    if type(value) not in _LEAVES:
        _collect(value, path, found, 0)
    return found


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors in several nested values without their paths, in the order of the paths.

    This takes a third of the time of `tensors_in` if most values are tensors themselves.
    """
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) not in _LEAVES:
            found += [tensor for _, tensor in tensors_in(value)]
    return found


def equal(one: Any, other: Any) -> bool:
    """Return whether two nested values contain the same tensors, to the last bit."""
    first, second = tensors_in(one), tensors_in(other)
    if [path for path, _ in first] != [path for path, _ in second]:
        return False
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))


def gradient_function(tensor: torch.Tensor) -> Any:
    """Return the `grad_fn` of a tensor; None if it has none or reading it raises.

    Reading it raises for a view that was created under `no_grad` and whose base was then modified
    in place, as in LBFGS with complex parameters.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _collect(value: Any, path: str, found: list[tuple[str, torch.Tensor]], depth: int) -> None:
    if depth == _MAX_DEPTH:
        return
    kind = type(value)
    if kind is tuple or kind is list:  # the usual case in a hook: avoid the cost of a generator
        for i, child in enumerate(value):
            if isinstance(child, torch.Tensor):
                found.append((f"{path}[{i}]", child))
            elif type(child) not in _LEAVES:
                _collect(child, f"{path}[{i}]", found, depth + 1)
        return
    # keyword arguments are a dict, usually empty: avoid the generator here too
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
    """Represents a value whose structure is unknown, except for its tensors and their paths."""

    def __init__(self) -> None:
        self.by_path: dict[str, torch.Tensor] = {}


def rebuilt(
    paths: list[str], tensors: list[torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return call arguments with the given tensors at the paths found by `tensors_in`.

    Arguments without tensors are None, or missing at the end.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for path, tensor in zip(paths, tensors, strict=False):  # no tensors: a single empty path
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


def first_batch_size(args: Iterable[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the first dimension of the first argument that has dimensions, or None."""
    for tensor in tensors_of((*args, *kwargs.values())):
        if tensor.dim() > 0:
            return int(tensor.size(0))  # nested tensors have no `shape`
    return None


def first_tokens(args: Iterable[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in the first argument that is a tensor.

    Tokens are the elements of a tensor of integers with two dimensions, as language models take it.
    Otherwise, returns None.
    """
    tensors = tensors_of((*args, *kwargs.values()))
    if not tensors or tensors[0].dtype not in (torch.int32, torch.int64) or tensors[0].dim() != 2:
        return None
    return int(tensors[0].numel())
