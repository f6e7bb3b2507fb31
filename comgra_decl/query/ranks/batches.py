"""Find the ranks of a run that see the same batch, by the names of the dimensions of their mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_DIVIDE_THE_MODEL = frozenset(
    {
        *("tp", "tensor", "tensor_parallel", "etp", "mp", "model", "model_parallel"),
        *("pp", "pipe", "pipeline", "pipeline_parallel", "stage"),
        *("cp", "context", "context_parallel", "sp", "seq", "sequence", "sequence_parallel"),
    }
)
"""Names of dimensions along which ranks share a batch: they hold parts of the model, or of each
sample. Along all others, such as data and expert parallelism, each rank has its own batch."""


NO_COORDINATES: Mapping[int, Mapping[str, int]] = {}
"""The coordinates of ranks without a mesh."""


def shares_batch(dimension: str) -> bool:
    """Whether ranks that differ only along a dimension see the same batch."""
    return dimension.lower().removesuffix("_dim") in _DIVIDE_THE_MODEL


def same_batch(
    ranks: Iterable[int], coordinates: Mapping[int, Mapping[str, int]]
) -> list[list[int]]:
    """Return the places of the ranks that see the same batch, for each batch.

    Args:
        ranks: the ranks, in order.
        coordinates: their coordinates by dimension; a rank without any sees its own batch.
    """
    found: dict[object, list[int]] = {}
    for place, rank in enumerate(ranks):
        known = coordinates.get(rank)
        own = rank if known is None else _own(known)
        found.setdefault(own, []).append(place)
    return list(found.values())


def _own(coordinates: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, at) for name, at in coordinates.items() if not shares_batch(name))
