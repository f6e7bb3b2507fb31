"""Facts about the calls that compare a prediction with a target; see `records.LOSS_CALLS`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from typing import Any

import torch

from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.stats import dtype_name

RESHAPING = (
    "View UnsafeView ReshapeAlias Reshape Squeeze Unsqueeze Select Slice Permute Transpose T "
    "Expand Alias AsStrided Clone Contiguous ToCopy Copy Index Gather Unflatten Split Unbind"
).split()
"""Autograd's names for functions that move, select or copy elements without changing them."""

_OF_ROWS = frozenset({"Index", "IndexSelect", "Slice", "Clone", "Contiguous"})
"""Functions that choose rows and keep the dimensions, if the number of dimensions is the same."""

_MOST_HOPS = 16
_MOST_NODES = 20_000
_SOFTMAXES = ("Softmax", "LogSoftmax")
_PLAIN = frozenset({bool, int, float, str, type(None)})


def likeness(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    prediction: torch.Tensor,
    target: torch.Tensor,
) -> Hashable:
    """Return a key for the facts of a call; calls with equal keys have the same facts.

    This takes a fraction of the time needed to compute the facts, which are the same in nearly
    every record.

    Returns:
        None if the facts depend on more than that, for example because the prediction was moved
        after it was computed.
    """
    made_by = type(gradient_function(prediction))
    if not _is_settled(made_by.__name__) or prediction.is_nested or target.is_nested:
        return None
    given: list[Any] = []
    for name, value in (*enumerate(args), *kwargs.items()):
        kind = type(value)
        if kind in _PLAIN:
            given.append((name, kind, value))
        elif issubclass(kind, (int, float, str)):
            return None
        else:
            given.append((name, kind))
    forms = prediction.shape, prediction.dtype, target.shape, target.dtype
    return (func, made_by, *forms, *given)


@lru_cache(maxsize=512)
def _is_settled(kind: str) -> bool:
    """Whether the name of an autograd node reveals the origin of a tensor."""
    name, backward, _ = kind.partition("Backward")
    return bool(backward) and name not in RESHAPING and name not in _SOFTMAXES


def form_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the shape and the dtype of a tensor."""
    return {"shape": [] if tensor.is_nested else [*tensor.shape], "dtype": dtype_name(tensor)}


def origin_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the function that computed the values of a tensor, and its dimension.

    Functions that only move or select elements are skipped.

    Returns:
        `{"made_by": "Softmax", "dim": 1}`. "dim" is missing if the function has no dimension, or if
        elements were moved afterwards other than by choosing rows, because that may change
        dimensions. Empty if autograd has no information.
    """
    node, rows_only = gradient_function(tensor), True
    for _ in range(_MOST_HOPS):
        if node is None:
            return {}
        name = function_name(node)
        if name not in RESHAPING:
            kept = rows_only and len(shape_of(node)) in (0, tensor.dim())
            return {"made_by": name, **(_dimension(node) if kept else {})}
        rows_only &= name in _OF_ROWS
        following = node.next_functions
        node = following[0][0] if following else None
    return {}


def batch_softmaxes(loss: torch.Tensor, batch: int) -> list[list[int]]:
    """Return the shapes of the softmaxes over the batch that contribute to a loss.

    These are softmaxes over dimension 0 of a tensor with more than one dimension, if dimension 0
    has the size of the batch. Square tensors are omitted, because they contain the similarities of
    a batch with itself.
    """
    found = []
    for node in nodes_behind(loss):
        if function_name(node) in _SOFTMAXES and _dimension(node).get("dim") == 0:
            shape = shape_of(node)
            if len(shape) > 1 and shape[0] == batch and shape[1] != batch:
                found.append(shape)
    return found


def plain_arguments(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, bool | int | float | str | None]:
    """Return the other arguments of a loss function by name; `True` represents a tensor.

    Empty for operators and for C++ functions, whose parameter names are unavailable.
    """
    given = {**dict(zip(parameter_names(func), args, strict=False)), **kwargs}
    found: dict[str, bool | int | float | str | None] = {}
    for name, value in given.items():
        if name in ("input", "target", "targets"):
            continue
        if isinstance(value, torch.Tensor):
            found[name] = True
        elif value is None or isinstance(value, (bool, int, float, str)):
            found[name] = value
    return found


@lru_cache(maxsize=512)
def target_argument(func: Any) -> tuple[str, int] | None:
    """Return the name and position of a loss function's target parameter, or None."""
    names = parameter_names(func)
    return next(
        ((name, names.index(name)) for name in ("target", "targets") if name in names), None
    )


@lru_cache(maxsize=512)
def parameter_names(func: Any) -> tuple[str, ...]:
    """Return the parameter names of a Python function; empty for other callables."""
    if not inspect.isfunction(func):
        return ()
    try:
        return tuple(inspect.signature(func).parameters)
    except ValueError:  # `**` of tensors wraps a C++ function without parameter names
        return ()


def nodes_behind(loss: Any, *, most: float = _MOST_NODES) -> Iterator[Any]:
    """Yield the autograd nodes from which a loss is computed, up to about `most` of them.

    Args:
        loss: a tensor, or an autograd node, which comes first.
        most: the maximum number of nodes.
    """
    start = gradient_function(loss) if isinstance(loss, torch.Tensor) else loss
    waiting, seen = [start], {start}
    for node in waiting:
        if node is None or len(waiting) > most:
            continue
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def function_name(node: Any) -> str:
    """Return "Softmax" for a node called "SoftmaxBackward0".

    A `torch.autograd.Function` of the program keeps its full name, "SoftmaxBackward", because its
    derivative need not be that of torch's function.
    """
    name = str(node.name())
    own = isinstance(node, torch.autograd.function.BackwardCFunction)
    return name if own else name.partition("Backward")[0]


def _dimension(node: Any) -> dict[str, int]:
    if function_name(node) not in _SOFTMAXES:
        return {}
    dim, shape = getattr(node, "_saved_dim", None), shape_of(node)
    if dim is None or not shape:
        return {}
    # autograd shows a negative dimension as an unsigned number
    return {"dim": dim - 2**64 + len(shape) if dim >= 2**63 else dim}


def shape_of(node: Any) -> list[int]:
    """Return the shape of the output of an autograd node, if this torch version provides it."""
    outputs = getattr(node, "_input_metadata", None)
    return [int(n) for n in outputs[0].shape] if outputs else []
