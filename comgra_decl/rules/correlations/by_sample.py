"""Correlations among the samples of a record, with their losses and categories."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import SlotInfo
from comgra_decl.rules.correlations import statistics as n
from comgra_decl.rules.correlations.by_record import LEAST_STRENGTH, SAME
from comgra_decl.rules.correlations.correlation import Correlation, Side
from comgra_decl.rules.correlations.series import is_loss
from comgra_decl.rules.finding import Place

if TYPE_CHECKING:
    from comgra_decl.query import Run
    from comgra_decl.query.chunks import Chunk

LEAST_SAMPLES = 60
"""How many samples, over all records, must have both."""

_MOST_CATEGORIES = 12
_VALUES = 30_000_000  # how many numbers to hold in memory; beyond that, evenly spaced records


def sampling(run: Run) -> list[tuple[Correlation, n.Floats]]:
    """Returns what correlates among the samples of a record."""
    statistics = [name for name in run.statistics if name != "update_ratio"]
    if not run.sample_count:
        return []
    cube, steps, infos = _samples(run, len(statistics))
    if len(steps) * run.sample_count < LEAST_SAMPLES:
        return []
    slots = [at for at, info in enumerate(infos) if _candidate(info)]
    targets = _losses(cube, infos, statistics) | _categories(run, steps)
    if not slots or not targets:
        return []
    sides = [_side(infos[slot], name) for slot in slots for name in statistics]
    flat = _within(cube[:, slots].transpose(0, 2, 1, 3).reshape(len(steps), run.sample_count, -1))
    goals = _within(np.stack(list(targets.values()), axis=2))
    return _clear(flat, goals, sides, targets=list(targets), steps=steps, width=run.sample_count)


def _clear(
    flat: n.Floats, goals: n.Floats, sides: list[Side], *, targets: list[Side],
    steps: NDArray[np.int64], width: int,
) -> list[tuple[Correlation, n.Floats]]:  # fmt: skip
    """Returns the pairs that chance does not explain; centring costs one sample per record."""
    effects = (flat.T @ goals).astype(np.float64)
    own, theirs = (flat != 0).sum(axis=0), (goals != 0).sum(axis=0)
    counts = np.minimum(own[:, None], theirs[None]) * (1 - 1 / width)
    chances = n.chance(effects, counts)
    chances[(np.abs(effects) > SAME) | (counts < LEAST_SAMPLES)] = 1.0
    shares = n.false_shares(chances.ravel(), chances.size).reshape(chances.shape)
    found = []
    for i, k in zip(*np.nonzero(shares < 0.05), strict=True):
        low, high = n.interval(float(effects[i, k]), float(counts[i, k]))
        row = int(np.argmax(np.abs(flat[:, i] * goals[:, k]))) // width
        correlation = Correlation(
            kind="samples", first=sides[i], second=targets[k], effect=float(effects[i, k]),
            low=low, high=high, records=len(steps), count=int(min(own[i], theirs[k])),
            q=float(shares[i, k]), first_step=int(steps[row]),
        )  # fmt: skip
        if correlation.strength >= LEAST_STRENGTH:
            found.append((correlation, flat[:, i]))
    return found


def _samples(run: Run, statistics: int) -> tuple[n.Floats, NDArray[np.int64], list[SlotInfo]]:
    """Returns [records, slots, samples, statistics] of the training, the steps, and the slots."""
    size = max(1, len(run.slots) * run.sample_count * statistics)
    every = max(1, -(-len(run.steps) * size // _VALUES))
    parts, steps, infos, seen = [], [], [], 0
    for chunk in run.chunks():
        infos = chunk.slots
        train = np.flatnonzero(chunk.train)
        rows = train[(-seen) % every :: every]
        seen += len(train)
        if len(rows):
            parts.append(_cube(chunk, rows, len(infos)))
            steps.append(chunk.steps[rows])
    if not parts:
        return np.zeros((0, 0, 0, 0), np.float32), np.zeros(0, np.int64), infos
    return np.concatenate(parts), np.concatenate(steps), infos


def _cube(chunk: Chunk, rows: NDArray[np.intp], slots: int) -> n.Floats:
    found = [chunk.samples(slot) for slot in range(slots)]
    return np.stack([part[rows] for part in found if part is not None], axis=1)


def _candidate(info: SlotInfo) -> bool:
    computed = info.kind not in ("target", "parameter", "buffer") and not is_loss(info)
    return computed and info.batch_dim is not None and "float" in info.dtype


def _losses(cube: n.Floats, infos: list[SlotInfo], names: list[str]) -> dict[Side, n.Floats]:
    """Returns the mean of each loss with a value per sample, [records, samples]."""
    if "mean" not in names:
        return {}
    return {
        Side(str(_place(info)), _place(info), "mean"): cube[:, at, :, names.index("mean")]
        for at, info in enumerate(infos)
        if info.key.pass_ == "forward" and info.batch_dim is not None and is_loss(info)
    }


def _categories(run: Run, steps: NDArray[np.int64]) -> dict[Side, n.Floats]:
    """Returns which samples belong to each category, if the spec asks for categories."""
    if run.spec.samples.by is None:
        return {}
    labels = [run.samples(int(step))["label"].tolist() for step in steps]
    width = run.sample_count
    names = np.full((len(labels), width), None, object)
    for line, row in zip(names, labels, strict=True):
        line[: len(row)] = row[:width]
    known = sorted({str(x) for x in names.ravel() if x is not None})[:_MOST_CATEGORIES]
    return {
        Side(f"category {name}"): (names.astype(str) == name).astype(np.float32) for name in known
    }


def _within(cube: n.Floats) -> n.Floats:
    """Returns [records x samples, columns]: the deviation of each sample from its record's mean.

    In units of the usual deviation in that record, so that trends of the training cancel out.
    """
    known = np.where(np.isfinite(cube), cube, np.nan)
    there = np.isfinite(known)
    count = np.maximum(there.sum(axis=1, keepdims=True), 1)
    centered = known - np.where(there, known, 0).sum(axis=1, keepdims=True) / count
    spread = np.sqrt(np.where(there, centered**2, 0).sum(axis=1, keepdims=True) / count)
    with np.errstate(all="ignore"):
        scaled = np.where(there & (spread > 0), centered / spread, 0)
    return n.normalized(scaled.reshape(-1, cube.shape[2]).astype(np.float32))


def _place(info: SlotInfo) -> Place:
    return Place(info.key.node, info.key.role, info.key.iteration, info.key.pass_)


def _side(info: SlotInfo, statistic: str) -> Side:
    return Side(f"{statistic} of {_place(info)}", _place(info), statistic)
