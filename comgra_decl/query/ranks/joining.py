"""Formulas for statistics joined across ranks, for plain arrays.

A tensor is related to the tensors of other ranks in one of three ways, depending on its slot
(`how_joined`):

- **samples**: each rank has its own samples of the global batch. Rank r has n_r samples. Over
  these samples, the statistic s has the mean m_r, the standard deviation d_r and the absolute
  maximum a_r:

      n = sum(n_r);  mean = sum(n_r m_r) / n;  std = sqrt(sum(n_r (d_r^2 + (m_r - mean)^2)) / n)
      abs_max = max(a_r)

  (T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a pairwise algorithm for
  computing sample variances", COMPSTAT 1982). A tensor without a batch dimension counts as one
  sample on each rank.
- **copies**: all ranks have the same tensor, such as a parameter under data parallelism. The tensor
  from the first rank is used, and only that rank is read.
- **pieces**: each rank has a part of one tensor, with e_r elements, such as a sharded parameter.
  Means and fractions are weighted by e_r. std is computed as above, over elements instead of
  samples. l2 = sqrt(sum(l2_r^2)). Counts are added, and min and max are taken over all parts.
  Statistics that cannot be computed from the parts, such as quantiles and singular values, are
  missing. Identical parts are read and counted once, and without all parts, everything is missing.
- **parts**: each rank has a part of the activations of its batch, such as the output of a
  tensor-parallel layer. Means and fractions over the batch, counts of non-finite elements and the
  largest absolute value are those of the whole. The others, such as the mean of the samples' l2,
  are missing, but those of individual samples are computed as for pieces.

Ranks may see the same batch: in a device mesh, those that differ only in the coordinates along
tensor, pipeline or context parallelism. Of their samples, each is counted once. If such ranks
have different numbers, their tensors are neither known parts nor copies, and the number is missing.

All computation is in float64 from the stored float32 numbers; the result is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from comgra_decl.bins import Spacing, edges_of, fractions_of
from comgra_decl.records import SlotInfo

from .readings import Lost

TOLERANCE = 1e-5
"""Relative difference between sums over identical tensors that rounding alone cannot cause."""

Floats = NDArray[np.float64]
Read = Callable[[str], Floats]
"""Reads a column from all ranks, float64 [ranks, ..., slots]; NaN where a rank lacks the record."""


class Joint(IntEnum):
    """How the tensors of one slot are related across ranks."""

    SAMPLES = 0
    COPIES = 1
    PIECES = 2
    PARTS = 3


def how_joined(slot: SlotInfo) -> Joint:
    """Return how a slot's tensors on different ranks are related.

    A gradient before reduction (`grad:raw`, or the share of one backward pass) belongs to its rank,
    as do buffers of modules. Optimizer state, such as `weight.exp_avg`, is a copy, like its
    parameter.
    """
    if slot.piece is not None and slot.batch_dim is not None:
        sizes = zip(slot.piece.shape, slot.shape, strict=True)
        divided = {dim for dim, (own, whole) in enumerate(sizes) if own != whole}
        return Joint.PARTS if divided - {slot.batch_dim} else Joint.SAMPLES
    if slot.piece is not None:
        return Joint.PIECES
    if slot.kind == "parameter" and not slot.key.pass_.startswith("grad:"):
        return Joint.COPIES
    if slot.kind == "buffer" and "." in slot.key.role:
        return Joint.COPIES
    return Joint.SAMPLES


class Ranks:
    """How slots are joined across ranks.

    Args:
        slots: each rank's slots, [ranks][slots]; None where a rank lacks the slot.
        batches: the ranks that see the same batch, for each batch; None if each sees its own.
    """

    def __init__(
        self, slots: list[list[SlotInfo | None]], batches: Sequence[Sequence[int]] | None = None
    ) -> None:
        known = [next(s for s in column if s is not None) for column in zip(*slots, strict=True)]
        self.joints = np.array([how_joined(slot) for slot in known], np.int64)
        self.batches = [[rank] for rank in range(len(slots))] if batches is None else batches
        self.origins = _origins(slots, self.joints, self.batches)
        """The first rank that holds the same as a rank does, [ranks, slots]; -1 without the slot.

        Tensors of ranks with the same origin are copies. Of samples, none are known to be."""
        self.elements = _elements(slots, self.joints, self.origins)
        self._sizes = np.array([_count(slot.shape, slot.batch_dim) for slot in known])

    def column(
        self, name: str, read: Read, lost: Callable[[str], Lost] = lambda _: None
    ) -> NDArray[np.float32]:
        """Return a column such as "mean.std", "rows" or "histogram.low", joined over all ranks.

        Args:
            name: name of the column.
            read: reads a column of the individual ranks; raises KeyError if none has it.
            lost: returns which of its elements are missing because they are damaged. A lost copy is
                replaced by the copy from another rank. If anything else is lost, the joint element
                is missing.

        Returns:
            float32 [..., slots].
        """
        there, unknown = _present(read, lost)
        out = np.full(there.shape[1:], np.nan)
        for joint, formula in _FORMULAS.items():
            chosen = self.joints == joint
            if not chosen.any():
                continue
            here, used = there[..., chosen], {name}
            if joint is Joint.COPIES and (gone := lost(name)) is not None:
                here = here & ~gone[..., chosen]

            def part(
                column: str, chosen: NDArray[np.bool_] = chosen, used: set[str] = used
            ) -> Floats:
                used.add(column)
                return read(column)[..., chosen]

            with np.errstate(all="ignore"):
                joined = formula(name, part, here, self._parts_of(chosen))
            if joint is not Joint.COPIES:
                for gone in (unknown, *(lost(column) for column in used)):
                    if gone is not None:
                        joined = np.where(gone[..., chosen].any(0), np.nan, joined)
            out[..., chosen] = joined
        return out.astype(np.float32)

    def _parts_of(self, chosen: NDArray[np.bool_]) -> Parts:
        return Parts(self.elements[:, chosen], self._sizes[chosen], self.batches)

    def of_samples(self, table: Floats, names: Sequence[str]) -> NDArray[np.float32]:
        """Return the statistics of samples whose activations are divided: those of the whole.

        Args:
            table: statistics of the parts of samples, [ranks, ..., slots, samples, statistics].
            names: names of the statistics.

        Returns:
            float32 [batches, ..., slots, samples, statistics]; NaN if they cannot be determined.
        """
        shape = (len(self.elements), *(1,) * (table.ndim - 4), self.elements.shape[1], 1)
        there = ~np.isnan(table).all(-1)
        weights = np.where(there, self.elements.reshape(shape), 0.0)
        joined = np.full((len(self.batches), *table.shape[1:]), np.nan, np.float32)
        for batch, members in enumerate(self.batches):
            own, some = table[list(members)], weights[list(members)]
            complete = some.sum(0) == self._sizes[:, None]
            for at, name in enumerate(names):
                read = partial(_read_of, own, some, list(names))
                with np.errstate(all="ignore"):
                    joined[batch, ..., at] = np.where(complete, _whole(name, read, some), np.nan)
        return joined


def _present(read: Read, lost: Callable[[str], Lost]) -> tuple[NDArray[np.bool_], Lost]:
    """Return which ranks have a record of a slot, and for which ranks this is unknown.

    In every record that exists, "nonfinite.mean" and "rows" are numbers.
    """
    there, gone = ~np.isnan(read("nonfinite.mean")), lost("nonfinite.mean")
    if gone is None:
        return there, None
    rows_gone = lost("rows")
    unknown = None if rows_gone is None else gone & rows_gone
    return np.where(gone, ~np.isnan(read("rows")), there), unknown


def _origins(
    slots: list[list[SlotInfo | None]],
    joints: NDArray[np.int64],
    batches: Sequence[Sequence[int]],
) -> NDArray[np.int64]:
    """Return the first rank that holds the same tensor, or the same part of it, [ranks, slots].

    Parts of activations are the same only if they belong to the same batch.
    """
    origins = np.full((len(slots), len(slots[0])), -1)
    batch = {rank: number for number, members in enumerate(batches) for rank in members}
    for at, column in enumerate(zip(*slots, strict=True)):
        first: dict[object, int] = {}
        for rank, slot in enumerate(column):
            if slot is None:
                continue
            held: object = rank
            if joints[at] == Joint.COPIES:
                held = None
            elif joints[at] != Joint.SAMPLES:
                held = slot.piece, batch[rank] if joints[at] == Joint.PARTS else None
            origins[rank, at] = first.setdefault(held, rank)
    return origins


def _elements(
    slots: list[list[SlotInfo | None]], joints: NDArray[np.int64], origins: NDArray[np.int64]
) -> Floats:
    """Return the number of elements of each rank [ranks, slots]; identical parts count once."""
    counts = np.ones(origins.shape)
    for at in np.flatnonzero((joints == Joint.PIECES) | (joints == Joint.PARTS)).tolist():
        for rank, slot in enumerate(column[at] for column in slots):
            if slot is not None and slot.piece is not None:
                own = origins[rank, at] == rank
                counts[rank, at] = _count(slot.piece.shape, slot.batch_dim) if own else 0.0
    return counts


def _count(shape: tuple[int, ...], batch_dim: int | None) -> float:
    """Return the number of elements of a tensor, or of one of its samples."""
    return float(np.prod([size for dim, size in enumerate(shape) if dim != batch_dim]))


class Parts(NamedTuple):
    """What the ranks hold of some slots.

    Attributes:
        elements: the number of elements of each rank that count, [ranks, slots].
        sizes: the number of elements of the whole tensor, [slots]; of activations, per sample.
        batches: the ranks that see the same batch, for each batch.
    """

    elements: Floats
    sizes: Floats
    batches: Sequence[Sequence[int]]

    @property
    def alone(self) -> bool:
        """Whether each rank sees a batch of its own."""
        return len(self.batches) == len(self.elements)


def agreed(values: Floats, batches: Sequence[Sequence[int]]) -> Floats:
    """Return the values of ranks that see the same batch, [batches, ...]; NaN where they differ.

    Args:
        values: [ranks, ...]; NaN where a rank has none.
        batches: the ranks that see the same batch, for each batch.
    """
    joined = []
    for members in batches:
        own = values[list(members)]
        first = np.take_along_axis(own, (~np.isnan(own)).argmax(0)[None], 0)[0]
        same = np.isclose(own, first, rtol=TOLERANCE, atol=0.0) | np.isnan(own)
        joined.append(np.where(same.all(0), first, np.nan))
    return np.stack(joined)


# -- samples -------------------------------------------------------------------------------------


def _of_samples(name: str, read: Read, there: NDArray[np.bool_], parts: Parts) -> Floats:
    if name.startswith("histogram."):
        return _range(name, read(name))
    if not parts.alone:
        read, there = _of_batches(read, there, parts.batches)
    rows = np.where(there, read("rows"), 0.0)
    rows = np.where(np.isnan(rows), 1.0, rows)
    if name == "rows":
        return np.where(there.any(0), rows.sum(0), np.nan)
    statistic, _, how = name.rpartition(".")
    counted = rows > 0
    if how == "abs_max":
        joined = np.where(counted, read(name), -np.inf).max(0)
    else:
        means = np.where(counted, read(f"{statistic}.mean"), 0.0)
        joined = (rows * means).sum(0) / rows.sum(0)
        if how == "std":
            deviations = np.where(counted, read(name), 0.0)
            joined = _deviation(rows, means, deviations, joined)
    nothing = 0.0 if statistic == "nonfinite" else np.nan  # as for an empty batch
    joined = np.where(counted.any(0), joined, nothing)
    return np.where(there.any(0), joined, np.nan)


def _of_batches(
    read: Read, there: NDArray[np.bool_], batches: Sequence[Sequence[int]]
) -> tuple[Read, NDArray[np.bool_]]:
    """Return a function that reads a column of each batch, and `there` of each batch."""

    def of_batch(name: str) -> Floats:
        return agreed(np.where(there, read(name), np.nan), batches)

    return of_batch, np.stack([there[list(members)].any(0) for members in batches])


def _deviation(weights: Floats, means: Floats, deviations: Floats, mean: Floats) -> Floats:
    between = np.where(weights > 0, np.square(means - mean), 0.0)
    within = np.square(deviations)
    return np.asarray(np.sqrt((weights * (within + between)).sum(0) / weights.sum(0)))


def _range(name: str, values: Floats) -> Floats:
    joined = np.fmin.reduce(values) if name.endswith("low") else np.fmax.reduce(values)
    return np.asarray(joined)


# -- copies --------------------------------------------------------------------------------------


def _of_copies(name: str, read: Read, there: NDArray[np.bool_], _parts: Parts) -> Floats:
    first = there.argmax(0)[None]
    return np.asarray(np.take_along_axis(read(name), first, 0)[0])


# -- pieces --------------------------------------------------------------------------------------


def _of_pieces(name: str, read: Read, there: NDArray[np.bool_], parts: Parts) -> Floats:
    if name.startswith("histogram."):
        return _range(name, read(name))
    weights = _weights(there, parts.elements)
    if name == "rows":
        return np.where(there.any(0), 1.0, np.nan)
    statistic, _, how = name.rpartition(".")
    whole = _whole(statistic, lambda s: np.where(weights > 0, read(f"{s}.mean"), 0.0), weights)
    nothing = 0.0 if statistic in ("l2", "nonfinite") else np.nan  # as for an empty tensor
    whole = np.where(weights.any(0), whole, nothing)
    if how == "std":  # over a single sample
        whole = np.where(np.isnan(whole), np.nan, 0.0)
    complete = there.any(0) & (weights.sum(0) == parts.sizes)
    return np.where(complete, np.abs(whole) if how == "abs_max" else whole, np.nan)


def _weights(there: NDArray[np.bool_], elements: Floats) -> Floats:
    """Return the elements that count in each record, [ranks, ..., slots]."""
    shape = (len(elements), *(1,) * (there.ndim - 2), elements.shape[1])
    return np.where(there, elements.reshape(shape), 0.0)


def _of_parts(name: str, read: Read, there: NDArray[np.bool_], parts: Parts) -> Floats:
    if name.startswith("histogram."):
        return _range(name, read(name))
    of_batch, present = _of_batches(read, there, parts.batches)
    rows = np.where(present, of_batch("rows"), 0.0)
    if name == "rows":
        return np.where(present.any(0), rows.sum(0), np.nan)
    statistic, _, how = name.rpartition(".")
    weights = _weights(there, parts.elements)
    wholes = []
    for members in parts.batches:
        own, some = list(members), weights[list(members)]
        if how == "mean" and statistic in (*_WEIGHED, "nonfinite"):
            counted = partial(_counted_means, read, own, some)
            whole = _whole(statistic, counted, some)
        elif name == "abs_max.abs_max":
            whole = _counted(read(name)[own], some).max(0)
        elif statistic == "nonfinite":  # 0 if no part has any
            most = _counted(read("nonfinite.abs_max")[own], some).max(0)
            whole = np.where(most == 0, 0.0, np.nan)
        else:
            whole = np.full(there.shape[1:], np.nan)
        wholes.append(np.where(some.sum(0) == parts.sizes, whole, np.nan))
    each = np.where(present, np.stack(wholes), 0.0)
    joined = each.max(0) if how == "abs_max" else (rows * each).sum(0) / rows.sum(0)
    if how == "std":
        joined = each.max(0)  # 0, or unknown
    return np.where(present.any(0), joined, np.nan)


def _counted(values: Floats, weights: Floats) -> Floats:
    return np.where(weights > 0, values, 0.0)


def _read_of(table: Floats, weights: Floats, names: list[str], name: str) -> Floats:
    """Return a statistic of samples; raise KeyError if the run lacks it."""
    if name not in names:
        raise KeyError(name)
    return _counted(table[..., names.index(name)].astype(np.float64), weights)


def _whole(statistic: str, read: Read, weights: Floats) -> Floats:
    """Return a tensor's statistic from parts with `weights` elements; NaN if undetermined."""
    try:
        if statistic in _WEIGHED:
            return np.asarray((weights * read(statistic)).sum(0) / weights.sum(0))
        if statistic in _EXTREMES:
            neutral = _EXTREMES[statistic]
            values = np.where(weights > 0, read(statistic), neutral)
            return np.asarray(values.min(0) if neutral > 0 else values.max(0))
        if statistic == "nonfinite":
            return np.asarray(read(statistic).sum(0))
        if statistic == "l2":
            return np.asarray(np.sqrt(np.square(read(statistic)).sum(0)))
        if statistic == "rms":
            return np.sqrt(_whole_of(weights * np.square(read(statistic)), weights))
        if statistic in ("std", "snr"):
            means, deviations = read("mean"), read("std")
            mean = _whole_of(weights * means, weights)
            std = _deviation(weights, means, deviations, mean)
            return std if statistic == "std" else np.abs(mean) / std
    except KeyError:  # a required statistic was not recorded
        pass
    return np.full(weights.shape[1:], np.nan)


def _counted_means(read: Read, members: list[int], weights: Floats, statistic: str) -> Floats:
    """Return a statistic averaged over the batch, of these members, as `_counted` does."""
    return _counted(read(f"{statistic}.mean")[members], weights)


def _whole_of(weighed: Floats, weights: Floats) -> Floats:
    return np.asarray(weighed.sum(0) / weights.sum(0))


_WEIGHED = ("mean", "abs_mean", "zero_fraction", "negative_fraction")
_EXTREMES = {"min": np.inf, "max": -np.inf, "abs_max": -np.inf}

_FORMULAS: dict[Joint, Callable[[str, Read, NDArray[np.bool_], Parts], Floats]] = {
    Joint.SAMPLES: _of_samples,
    Joint.COPIES: _of_copies,
    Joint.PIECES: _of_pieces,
    Joint.PARTS: _of_parts,
}


# -- histograms ----------------------------------------------------------------------------------


def join_histograms(
    counts: NDArray[np.generic], low: Floats, high: Floats, spacing: Spacing = "linear"
) -> NDArray[np.int64]:
    """Add histograms that have the same number of bins but different ranges.

    Each count is spread evenly over its bin and assigned to the bins of the joint range; the
    cumulative counts below each edge are then rounded. The total is exact. The count below an edge
    is wrong by at most the counts of the bins that the edge cuts.

    Args:
        counts: [ranks, ..., bins].
        low: lowest edges [ranks, ...]; NaN for empty histograms.
        high: highest edges.
        spacing: how the bins lie between them.

    Returns:
        int64 [..., bins], between the lowest and the highest of all edges.
    """
    bins = counts.shape[-1]
    below = np.zeros((*counts.shape[:-1], bins + 1))
    np.cumsum(counts, axis=-1, out=below[..., 1:])
    bottom, top = np.fmin.reduce(low), np.fmax.reduce(high)
    with np.errstate(all="ignore"):
        edges = edges_of(bottom, top, bins, spacing)
        place = fractions_of(edges, low[..., None], high[..., None], spacing) * bins
        # all values at one point: counted below every higher edge, or in the first bin if all
        # coincide
        point = np.where(edges > low[..., None], float(bins), 0.0)
        place = np.where((high > low)[..., None], place, point)
        place = np.clip(np.nan_to_num(place, nan=0.0), 0.0, bins)
    inside = np.minimum(place.astype(np.int64), bins - 1)
    start = np.take_along_axis(below, inside, -1)
    rise = np.take_along_axis(below, inside + 1, -1) - start
    joined = (start + rise * (place - inside)).sum(0)
    joined[..., -1] = below[..., -1].sum(0)
    flat = ~(top > bottom)
    joined[..., 1:][flat] = joined[..., -1:][flat]
    counted: NDArray[np.int64] = np.diff(np.rint(joined).astype(np.int64), axis=-1)
    return counted
