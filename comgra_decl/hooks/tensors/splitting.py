"""Takes a tensor apart along one dimension: heads, tokens, experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.spec.functions import SplitSpec

MOST_PARTS = 64
"""More roles than this in one node help nobody, and every part costs as much as a tensor."""


class Part(NamedTuple):
    """One part: what it is called, a view of its elements, and where its batch is."""

    label: str
    tensor: torch.Tensor
    batch_dim: int | None


def take_apart(tensor: torch.Tensor, split: SplitSpec, *, batch_dim: int | None) -> list[Part]:
    """Returns the parts in order, as views that autograd does not know of.

    Args:
        tensor: of any dtype and shape.
        split: the dimension, what a part is called, and the number of equal groups if not every
            index is a part. The dimension remains in a group, and is gone from a single index.
        batch_dim: the batch dimension of the whole; parts keep it, unless it is taken apart itself.

    Raises:
        ValueError: the tensor cannot be taken apart so; the message says why.
    """
    dim = _dimension(tensor, split.dim)
    size = int(tensor.shape[dim])
    count = size if split.groups is None else split.groups
    if count > MOST_PARTS:
        raise ValueError(f"that makes {count} parts; at most {MOST_PARTS}, see `groups`")
    if split.groups is not None and size % count:
        raise ValueError(f"{size} elements do not make {count} equal groups")
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
