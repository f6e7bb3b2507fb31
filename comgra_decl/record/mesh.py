"""Find the device mesh of a training job, and which of its ranks are recorded.

No communication is involved: a mesh states all its ranks in every process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import SpecError
from comgra_decl.hooks.objects import all_of
from comgra_decl.spec.run import OnePerSpec

if TYPE_CHECKING:
    from comgra_decl.record.ranks import Rank
    from comgra_decl.spec.run import RunSpec

_log = logging.getLogger("comgra_decl")


@dataclass(frozen=True, eq=False)
class Mesh:
    """All ranks of a training job, arranged by named dimensions.

    Attributes:
        names: the name of each dimension.
        ranks: the ranks, int64 [size of each dimension].
    """

    names: tuple[str, ...]
    ranks: NDArray[np.int64]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank by dimension."""
        (place,) = np.argwhere(self.ranks == rank)
        return dict(zip(self.names, map(int, place), strict=True))

    def one_per(self, names: list[str]) -> list[int]:
        """Return the first of all ranks that differ only along some dimensions, in order.

        Raises:
            KeyError: the mesh lacks a dimension.
        """
        chosen = self.ranks
        for name in names:
            if name not in self.names:
                raise KeyError(name)
            chosen = chosen.take([0], self.names.index(name))
        return sorted(map(int, chosen.flat))


def waits_for_mesh(run: RunSpec) -> bool:
    """Whether the recorded ranks depend on a mesh that only the program knows."""
    return isinstance(run.ranks, OnePerSpec) and run.mesh is None


def recorded_ranks(run: RunSpec, world_size: int) -> list[int]:
    """Return the recorded ranks, in ascending order.

    If the program has no mesh with the requested dimensions, all ranks are recorded.

    Raises:
        SpecError: the declared mesh has another number of ranks.
    """
    if run.mesh is not None:
        _declared(run.mesh, world_size)
    wanted = run.ranks
    if wanted == "all":
        return list(range(world_size))
    if wanted == "first":
        return [0]
    if not isinstance(wanted, OnePerSpec):
        numbers = [wanted] if isinstance(wanted, int) else wanted
        return sorted({int(rank) for rank in numbers if int(rank) < world_size})
    mesh = mesh_of(run, world_size, names=wanted.names)
    if mesh is None:
        _log.warning(
            "comgra: the program has no device mesh of all %d processes with the dimension %s "
            "(run.ranks), so all of them are recorded",
            world_size,
            ", ".join(wanted.names),
        )
        return list(range(world_size))
    return mesh.one_per(wanted.names)


def coordinates_of(run: RunSpec, rank: Rank) -> dict[str, int] | None:
    """Return the coordinates of a rank by dimension; None if no mesh is known."""
    mesh = mesh_of(run, rank.world_size)
    return None if mesh is None else mesh.coordinates(rank.number)


def mesh_of(run: RunSpec, world_size: int, *, names: list[str] | None = None) -> Mesh | None:
    """Return the declared mesh, or the one that the program has created; None without one.

    Args:
        run: the part of the spec that may declare a mesh.
        world_size: the number of ranks; meshes of some of them are not used.
        names: dimensions that a mesh of the program must have.

    Raises:
        SpecError: the declared mesh has another number of ranks.
    """
    if run.mesh is not None:
        return _declared(run.mesh, world_size)
    found = [mesh for mesh in _of_program(world_size) if set(names or ()) <= set(mesh.names)]
    return max(found, key=_order, default=None)


def _order(mesh: Mesh) -> tuple[Any, ...]:
    """Return a key by which all processes choose the same mesh, one with many dimensions."""
    return len(mesh.names), mesh.names, *mesh.ranks.flat


def _declared(sizes: Mapping[str, int], world_size: int) -> Mesh:
    """Return the mesh that `init_device_mesh` creates for these sizes: the last varies fastest."""
    count = int(np.prod(list(sizes.values())))
    if count != world_size:
        stated = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise SpecError(
            [f"run.mesh: {stated} are {count} processes, but the job has {world_size} of them"]
        )
    return Mesh(tuple(sizes), np.arange(world_size).reshape(list(sizes.values())))


def _of_program(world_size: int) -> list[Mesh]:
    """Return all meshes of the program that have names and contain every rank.

    They are found among the objects of the process: neither a model nor torch has a list of them,
    and the dimension of a pipeline belongs to no tensor.
    """
    module: Any = sys.modules.get("torch.distributed.device_mesh")
    kind = getattr(module, "DeviceMesh", None)
    if kind is None:
        return []
    found = []
    for each in all_of(kind):
        if each.mesh_dim_names and each.mesh.numel() == world_size:
            ranks = np.array(each.mesh.tolist(), np.int64)
            found.append(Mesh(tuple(each.mesh_dim_names), ranks))
    return found
