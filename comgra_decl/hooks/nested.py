"""Finding the tensors inside whatever a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MAX_DEPTH = 8  # deeper nesting is a cycle or a data structure that is no output


def tensors_in(value: Any, path: str = "", *, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (path, tensor) for every tensor in a nested value, in a stable order.

    Mappings give `.key`, sequences `[i]`, named tuples, dataclasses and attrs classes `.field`.
    Own walk rather than pytree: pytree does not enter dataclasses and is ten times slower on a
    plain tensor.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth < _MAX_DEPTH:
        for step, child in _children(value):
            yield from tensors_in(child, path + step, depth=depth + 1)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f".{key}", child) for key, child in value.items())
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        yield from ((f".{names[i]}" if names else f"[{i}]", child) for i, child in enumerate(value))
    elif not isinstance(value, type):
        yield from ((f".{name}", getattr(value, name, None)) for name in _field_names(value))


def _field_names(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return [field.name for field in getattr(type(value), "__attrs_attrs__", ())]


def first_batch_size(*values: Any) -> int | None:
    """Returns the first dimension of the first tensor with one, or None: the batch size."""
    for value in values:
        for _, tensor in tensors_in(value):
            if tensor.dim() > 0:
                return int(tensor.shape[0])
    return None
