"""Distributed tensors: determines the part held by this process, without communication."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.records import Piece

_CLASS_PREFIX = "FSDP"


class Shard(NamedTuple):
    """The part of a tensor that this process holds, and the shape of the whole tensor."""

    piece: Piece
    whole: tuple[int, ...]


def shard_of(tensor: torch.Tensor) -> Shard | None:
    """Return the local part of a distributed tensor; None for any other tensor.

    A plain tensor that `DTensor.to_local` has just returned is a local part as well, which its
    gradient function tells. Tensor-parallel modules return such tensors. A tensor has no parts if
    it is replicated in every process, or if its copies must be summed (`Partial`).
    """
    placements: Any = getattr(tensor, "placements", None)
    if placements is not None and hasattr(tensor, "to_local"):
        shape, mesh = tensor.shape, tensor.device_mesh  # type: ignore[attr-defined]
    elif (told := getattr(gradient_function(tensor), "dtensor_spec", None)) is not None:
        shape, mesh, placements = told.shape, told.mesh, told.placements
    else:
        return None
    if not any(placement.is_shard() for placement in placements):
        return None
    if any(placement.is_partial() for placement in placements):
        return None
    from comgra_decl.torch_private import place_of_shard

    found: Any = place_of_shard(shape, mesh, placements)
    extent, offset = found
    return Shard(Piece(tuple(map(int, offset)), tuple(map(int, extent))), tuple(map(int, shape)))


def class_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return a module's class as written in the program; `fully_shard` creates a subclass."""
    kind = type(module)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", None)
    if (
        sharded is not None
        and sharded in kind.__bases__
        and kind.__name__.startswith(_CLASS_PREFIX)
    ):
        return next(base for base in kind.__bases__ if base is not sharded)
    return kind
