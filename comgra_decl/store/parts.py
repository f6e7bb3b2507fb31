"""Select parts of arrays with numpy's indexing syntax, so that only required chunks are read."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from types import EllipsisType

from comgra_decl.errors import UnknownNameError, shown

Part = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]
"""A numpy-style index: integers, slices and `...`; `numpy.s_[0, :100]` creates one."""

Index = tuple[int | slice, ...]


def cut(part: Part, shape: Sequence[int]) -> tuple[tuple[slice, ...], Index]:
    """Return the smallest box that contains a part, and the part's index within that box.

    Args:
        part: index into the array.
        shape: shape of the array.

    Returns:
        One slice without a step per dim, and the index to apply to the box.

    Raises:
        UnknownNameError: the index is out of range or has too many dims.
    """
    items = _expanded(part, len(shape))
    dims = enumerate(zip(items, shape, strict=True))
    pairs = [_of_dim(item, dim, extent) for dim, (item, extent) in dims]
    return tuple(box for box, _ in pairs), tuple(rest for _, rest in pairs)


def _expanded(part: Part, dims: int) -> list[int | slice]:
    """Return one integer or slice per dim."""
    items = [_item(item) for item in (part if isinstance(part, tuple) else (part,))]
    if items.count(...) > 1:
        raise UnknownNameError("an index of values can contain at most one ...")
    if ... not in items:
        items.append(...)
    at, missing = items.index(...), dims + 1 - len(items)
    if missing < 0:
        raise UnknownNameError(f"these values have {dims} dims, not {len(items) - 1}")
    everything: list[int | slice] = [slice(None)] * missing
    return [*items[:at], *everything, *items[at + 1 :]]  # type: ignore[list-item]


def _no_part(item: object) -> UnknownNameError:
    return UnknownNameError(
        f"an index of values must consist of integers, slices and ..., got {shown(item)}"
    )


def _item(item: object) -> int | slice | EllipsisType:
    """Return an item as a Python object; reject arrays, which can behave like integers."""
    if isinstance(item, (slice, EllipsisType)):
        return item
    try:
        if isinstance(item, bool):
            raise _no_part(item)
        return index(item)  # type: ignore[arg-type]
    except TypeError:
        raise _no_part(item) from None


def _of_dim(item: int | slice, dim: int, extent: int) -> tuple[slice, int | slice]:
    if not isinstance(item, slice):
        number = item
        if not -extent <= number < extent:
            raise UnknownNameError(
                f"dim {dim} of these values has {extent} elements; index {number} is out of range"
            )
        return slice(number % extent, number % extent + 1), 0
    try:
        chosen = range(*item.indices(extent))
    except (TypeError, ValueError):  # not numbers, or a step of 0
        raise _no_part(item) from None
    if not chosen:
        return slice(0, 0), slice(None)
    low, high = sorted((chosen[0], chosen[-1]))
    return slice(low, high + 1), slice(None, None, chosen.step)
