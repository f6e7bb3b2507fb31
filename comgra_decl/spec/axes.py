"""Name the dims of recorded tensors, from the spec or else from the module class and the shape."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, Field

from comgra_decl.records import AXIS_NAME, SAMPLE

_SPACE = ("depth", "height", "width")
RECOMPUTED = "attention (recomputed)"
"""The role of the weights of fused attention, whose call never stores them."""

_FUSED = "scaled_dot_product_attention"
"""The function that reads and returns vectors, of which a square may have as many as numbers."""

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_WEIGHTS = re.compile(r"softmax|weights|prob|scores", re.IGNORECASE)
_CHANNELS_FIRST = re.compile(
    r"[123]d(?![0-9])|^(GroupNorm|SyncBatchNorm|Upsample|Pixel(Uns|S)huffle|ChannelShuffle"
    r"|LocalResponseNorm)$"
)
_CHANNELS_LAST = re.compile(
    r"^(\w*Linear|LayerNorm|\w*RMSNorm|Bilinear|Embedding(Bag)?|Conv1D|LSTM|GRU|RNN)$"
)


def checked_axes(names: list[str]) -> list[str]:
    """Return the names if each is a valid axis name and none is repeated."""
    for name in names:
        if not AXIS_NAME.fullmatch(name):
            raise ValueError(f"{name!r} must be a word of at most 40 characters, such as 'head'")
        if name == SAMPLE:
            raise ValueError("'sample' is always the batch dimension; name only the other dims")
    if len(set(names)) < len(names):
        raise ValueError("names the same axis twice")
    return names


AxisNames = Annotated[list[str], Field(min_length=1), AfterValidator(checked_axes)]


class Layouts:
    """Where the channels of tensors are: in their first value dim, or in their last one.

    The class of a module decides, if it does: convolutions, pooling and batch norms expect the
    channels first, linear layers and layer norms last. All other modules, such as activations and
    containers, take over the layout of the tensor of the same shape that was computed before them.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], bool] = {}

    def add(self, shape: Sequence[int], module_class: str) -> None:
        """Remember the layout of a tensor, by the class of its module.

        Args:
            shape: sizes of the value dims.
            module_class: class of its module, "" if unknown.
        """
        last = _has_channels_last(module_class)
        if last is not None and len(shape) > 1:
            self._last[tuple(shape)] = last

    def unit_dim(self, shape: Sequence[int], *, node: str, module_class: str) -> int:
        """Return the value dim of a module's output whose entries are its units, and remember it.

        Args:
            shape: sizes of the value dims.
            node: name of the node.
            module_class: class of its module.
        """
        names = name_axes(
            shape,
            kind="computed",
            node=node,
            role="output",
            module_class=module_class,
            channels_last=self.channels_last(shape),
        )
        self.add(shape, module_class)
        return unit_axis(names)

    def channels_last(self, shape: Sequence[int]) -> bool | None:
        """Return whether the last tensor of a shape has its channels last; None if none tells."""
        return self._last.get(tuple(shape))


@lru_cache(maxsize=1024)
def _has_channels_last(module_class: str) -> bool | None:
    """Return whether tensors of modules of a class have their channels last; None if unknown."""
    class_ = module_class.rpartition(".")[2]
    if _CHANNELS_FIRST.search(class_):
        return False
    return True if _CHANNELS_LAST.match(class_) else None


def name_axes(
    shape: Sequence[int],
    *,
    kind: str,
    node: str,
    role: str,
    module_class: str,
    whole_numbers: bool = False,
    batched: bool = True,
    declared: Sequence[str] = (),
    channels_last: bool | None = None,
) -> tuple[str, ...]:
    """Return one name for each value dim of a tensor; the batch dim is not included.

    Args:
        shape: sizes of the value dims.
        kind: kind of the tensor, as in the slot table ("parameter", "computed", ...).
        node: name of the node.
        role: role of the tensor within its node.
        module_class: class of its module, "" if unknown.
        whole_numbers: whether it holds integers, such as token ids.
        batched: whether it has a batch dim besides these dims.
        declared: names from the spec, used if there is one for each dim. Parameters are named by
            the structure of their module instead.
        channels_last: where the channels are if the class of the module does not decide it, as
            `Layouts` tells.
    """
    number = len(shape)
    class_ = module_class.rpartition(".")[2]
    if kind in ("parameter", "buffer"):
        names = _of_parameter(number, class_)
    elif declared and len(declared) == number:
        names = tuple(declared)
    else:
        called = (class_, role, node.rpartition(".")[2])
        of_class = _has_channels_last(class_)
        last = channels_last if of_class is None else of_class
        if last is None and kind in ("input", "target"):
            last = _is_colour_image(shape)
        names = _of_activation(shape, called, whole_numbers, batched, last)
    return names or tuple(f"dim {i}" for i in range(number))


def unit_axis(names: Sequence[str]) -> int:
    """Return the value dim whose entries are the units of a layer, by the names of its dims."""
    return next((i for i, name in enumerate(names) if name in _UNITS), len(names) - 1)


_UNITS = ("channel", "feature", "unit")
"""Possible names of this dim; otherwise, it is the last one."""


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
    shape: Sequence[int],
    called: tuple[str, ...],
    whole_numbers: bool,
    batched: bool,
    channels_last: bool | None,
) -> tuple[str, ...]:
    """Name the dims of an output or input; `called` are its class, role and node."""
    number = len(shape)
    if called[0] == _FUSED and RECOMPUTED not in called:  # [heads, positions, features] of a sample
        return ("head", "position", "feature")[-number:] if 1 < number < 4 and batched else ()
    square = number > 1 and shape[-1] == shape[-2]
    weights = RECOMPUTED in called or (square and _any(_WEIGHTS, called))
    if number == 1:
        return ("position" if whole_numbers and batched else "feature",)
    if number == 2:
        if weights:
            return "query", "key"
        return ("channel", "length") if channels_last is False else ("position", "feature")
    if number == 3 and batched:
        attention = _any(_ATTENTION, called)
        unknown = channels_last is None
        if weights or (attention and unknown and shape[1] == shape[2]):
            return "head", "query", "key"
        if attention and unknown:
            return "head", "position", "feature"
        places = _SPACE[1:]
        return (*places, "channel") if channels_last else ("channel", *places)
    if number == 4 and batched and channels_last is not None:
        return (*_SPACE, "channel") if channels_last else ("channel", *_SPACE)
    return ()


def _is_colour_image(shape: Sequence[int]) -> bool | None:
    """Return True for [height, width, 3], and None for shapes that do not tell."""
    return True if len(shape) == 3 and shape[2] == 3 and min(shape[:2]) > 4 else None


def _any(pattern: re.Pattern[str], names: tuple[str, ...]) -> bool:
    return any(pattern.search(name) for name in names)


def _space(number: int) -> tuple[str, ...]:
    return ("length",) if number == 1 else _SPACE[3 - number :]
