"""Split a tensor along one dimension: heads, tokens, experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.spec.functions import SplitSpec

MOST_PARTS = 64
"""The maximum number of parts, limited because each part costs as much as a separate tensor."""


class Part(NamedTuple):
    """One part: its label, a view of its elements, and its batch dimension."""

    label: str
    tensor: torch.Tensor
    batch_dim: int | None


def take_apart(tensor: torch.Tensor, split: SplitSpec, *, batch_dim: int | None) -> list[Part]:
    """Split a tensor into parts, returned in order as views without autograd history.

    Args:
        tensor: of any dtype and shape.
        split: the dimension, the name of a part, and the number of equal groups if not every index
            is a part. A group keeps the dimension; for a single index, the dimension is removed.
        batch_dim: the batch dimension of the whole tensor; parts keep it, unless it is the
            dimension split.

    Raises:
        ValueError: the tensor cannot be split this way; the message gives the reason.
    """
    dim = _dimension(tensor, split.dim)
    size = int(tensor.shape[dim])
    count = size if split.groups is None else split.groups
    if count > MOST_PARTS:
        raise ValueError(f"there would be {count} parts; the maximum is {MOST_PARTS}, see `groups`")
    if split.groups is not None and size % count:
        raise ValueError(f"{size} elements cannot be divided into {count} equal groups")
    with without_functions():
        views = _views(tensor.detach(), dim, count=count, grouped=split.groups is not None)
    batch = _batch_of_part(tensor, dim, batch_dim, grouped=split.groups is not None)
    return [Part(f"{split.name} {i}", view, batch) for i, view in enumerate(views)]


def _dimension(tensor: torch.Tensor, dim: int) -> int:
    count = tensor.dim()
    if not -count <= dim < count:
        raise ValueError(f"it has no dimension {dim}, its shape is {tuple(tensor.shape)}")
    return dim % count


def _views(whole: torch.Tensor, dim: int, *, count: int, grouped: bool) -> list[torch.Tensor]:
    if not grouped:
        return [whole.select(dim, i) for i in range(count)]
    width = whole.shape[dim] // count
    return [whole.narrow(dim, i * width, width) for i in range(count)]


def _batch_of_part(
    tensor: torch.Tensor, dim: int, batch_dim: int | None, *, grouped: bool
) -> int | None:
    if batch_dim is None:
        return None
    batch = batch_dim % tensor.dim()
    if grouped:
        return batch
    return None if batch == dim else batch - (batch > dim)
