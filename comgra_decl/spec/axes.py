"""Names the dims of recorded tensors: from the spec, else from module class and shape."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from comgra_decl.records import AXIS_NAME

SAMPLE = "sample"
"""The batch dimension, which always comes first."""

POOLED = frozenset({"depth", "height", "width", "length", "time", "query", "key"})
"""Axes along which neighbours resemble each other, so that their mean says something."""

_SPACE = ("depth", "height", "width")
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_PROBABILITIES = re.compile(r"softmax|weights|attention|attn", re.IGNORECASE)
_ONE_DIMENSIONAL = re.compile(r"(Conv|Pool|BatchNorm|InstanceNorm).*1d")


def checked_axes(names: list[str]) -> list[str]:
    """Returns the names if each can name an axis and none occurs twice."""
    for name in names:
        if not AXIS_NAME.fullmatch(name):
            raise ValueError(f"{name!r} must be a word such as 'head', of at most 40 characters")
        if name == SAMPLE:
            raise ValueError("'sample' is always the batch dimension; name only the other dims")
    if len(set(names)) < len(names):
        raise ValueError("names the same axis twice")
    return names


AxisNames = Annotated[list[str], Field(min_length=1), AfterValidator(checked_axes)]


def name_axes(
    shape: Sequence[int],
    *,
    kind: str,
    role: str,
    module_class: str,
    whole_numbers: bool = False,
    batched: bool = True,
    declared: Sequence[str] = (),
) -> tuple[str, ...]:
    """Returns the names of a tensor's value dims, one for each; the batch dim is not among them.

    Args:
        shape: sizes of the value dims.
        kind: kind of the tensor, as in the slot table ("parameter", "computed", ...).
        role: role of the tensor within its node.
        module_class: class of its module, "" if unknown.
        whole_numbers: whether it holds integers, such as token ids.
        batched: whether it has a batch dim besides these dims.
        declared: names from the spec, used if they are as many as the dims. Of a parameter, the
            module's structure determines the names.
    """
    number = len(shape)
    class_ = module_class.rpartition(".")[2]
    if kind in ("parameter", "buffer"):
        names = _of_parameter(number, class_)
    elif declared and len(declared) == number:
        names = tuple(declared)
    else:
        names = _of_activation(shape, class_, role, whole_numbers, batched)
    return names or tuple(f"dim {i}" for i in range(number))


def _of_parameter(number: int, class_: str) -> tuple[str, ...]:
    if number == 1:
        return ("feature",)
    if number == 2:
        return ("token", "feature") if class_.startswith("Embedding") else ("out", "in")
    if "Conv" in class_ and number <= 5:
        first = ("in", "out") if "Transpose" in class_ else ("out", "in")
        return (*first, *_space(number - 2))
    return ()


def _of_activation(
    shape: Sequence[int], class_: str, role: str, whole_numbers: bool, batched: bool
) -> tuple[str, ...]:
    number = len(shape)
    if number == 1:
        return ("position" if whole_numbers and batched else "feature",)
    if number == 2:
        if _ONE_DIMENSIONAL.search(class_):
            return "channel", "length"
        if shape[0] == shape[1] and _is_attention(class_, role):
            return "query", "key"
        return "position", "feature"
    if number == 3 and batched:
        if shape[1] == shape[2] and _is_attention(class_, role):
            return "head", "query", "key"
        if _ATTENTION.search(class_):
            return "head", "position", "feature"
        if shape[2] == 3 and shape[0] > 4 and shape[1] > 4:
            return "height", "width", "channel"
        return "channel", "height", "width"
    if number == 4 and batched and "3d" in class_:
        return ("channel", *_SPACE)
    return ()


def _is_attention(class_: str, role: str) -> bool:
    """Whether a square matrix of this module holds weights of attention."""
    return any(_PROBABILITIES.search(name) is not None for name in (class_, role))


def _space(number: int) -> tuple[str, ...]:
    return ("length",) if number == 1 else _SPACE[3 - number :]
