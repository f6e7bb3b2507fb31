"""Correlations among the samples of a record, with their losses and categories."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import SlotInfo
from comgra_decl.rules.base import Scene
from comgra_decl.rules.correlations import statistics as n
from comgra_decl.rules.correlations.by_group import differences
from comgra_decl.rules.correlations.by_record import LEAST_STRENGTH, SAME
from comgra_decl.rules.correlations.correlation import Candidate, Correlation, Side
from comgra_decl.rules.correlations.origin import Origin, Origins, is_loss
from comgra_decl.rules.finding import Place
from comgra_decl.rules.graph import predictions

if TYPE_CHECKING:
    from comgra_decl.query import Run
    from comgra_decl.query.chunks import Chunk

LEAST_SAMPLES = 60
"""Minimum number of samples, over all records, with both quantities."""

_MOST_CATEGORIES = 12
_VALUES = 30_000_000  # maximum numbers in memory; beyond that, evenly spaced records are used


_DETERMINED = 0.98  # share of a tensor's variance above which it equals the category


def sampling(run: Run, scene: Scene) -> list[Candidate]:
    """Return the correlations across the samples of a record.

    Args:
        run: as of its last `refresh`.
        scene: the facts about the run.
    """
    statistics = [name for name in run.statistics if name != "update_ratio"]
    if not run.sample_count:
        return []
    cube, steps, infos = _samples(run, len(statistics))
    if len(steps) * run.sample_count < LEAST_SAMPLES:
        return []
    origins = Origins(scene)
    losses = _losses(cube, infos, names=statistics, origins=origins)
    categories = _categories(run, steps)
    graded = losses or _graded(cube, infos, names=statistics, scene=scene)
    found = _differing(graded, categories, steps)
    slots = [at for at, info in enumerate(infos) if _candidate(info, origins)]
    targets = losses | categories
    if not slots or not targets:
        return found
    sides = [_side(infos[slot], name) for slot in slots for name in statistics]
    stands = [origins.of(infos[slot]) for slot in slots for _ in statistics]
    flat = _within(cube[:, slots].transpose(0, 2, 1, 3).reshape(len(steps), run.sample_count, -1))
    goals = _within(np.stack(list(targets.values()), axis=2))
    skip = _known(flat, goals, losses=len(losses), graded=bool(graded), origins=stands)
    return found + _clear(
        flat, goals, sides, targets=list(targets), steps=steps, skip=skip, origins=stands
    )


def _known(
    flat: n.Floats, goals: n.Floats, *, losses: int, graded: bool, origins: list[Origin]
) -> n.Bools:
    """Return a mask of shape [candidates, targets] of the pairs that are trivially related.

    Gradients follow from the loss and contain no more information about a category than the losses
    do (or the gradients used in their place). A tensor that is the same for all samples of a
    category is equivalent to the category.
    """
    skip = np.zeros((flat.shape[1], goals.shape[1]), np.bool_)
    if graded:
        skip |= np.array([origin == Origin.BACKWARD for origin in origins])[:, None]
    labels = goals[:, losses:]
    if labels.shape[1]:
        basis, _ = np.linalg.qr(labels.astype(np.float64))
        skip[((basis.T @ flat) ** 2).sum(axis=0) > _DETERMINED, losses:] = True
    return skip


def _clear(
    flat: n.Floats, goals: n.Floats, sides: list[Side], *, targets: list[Side],
    steps: NDArray[np.int64], skip: n.Bools, origins: list[Origin],
) -> list[Candidate]:  # fmt: skip
    """Return the statistically significant pairs; centring uses up one sample per record."""
    width = len(flat) // len(steps)
    effects = (flat.T @ goals).astype(np.float64)
    own, theirs = (flat != 0).sum(axis=0), (goals != 0).sum(axis=0)
    counts = np.minimum(own[:, None], theirs[None]) * (1 - 1 / width)
    chances = n.chance(effects, counts)
    skip = skip | (np.abs(effects) > SAME) | (counts < LEAST_SAMPLES)
    shares = np.ones(chances.shape)
    shares[~skip] = n.false_shares(chances[~skip], int((~skip).sum()))
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
            found.append(Candidate(correlation, flat[:, i], origins[i]))
    return found


def _differing(
    losses: dict[Side, n.Floats], categories: dict[Side, n.Floats], steps: NDArray[np.int64]
) -> list[Candidate]:
    """Return the categories whose samples have unusually high or low losses."""
    if not losses or not categories:
        return []
    loss = np.stack(list(losses.values()), axis=2)
    label = np.stack(list(categories.values()), axis=2)
    width = loss.shape[1]
    ranks = np.stack([n.ranked(record) for record in loss])
    centred = label - label.mean(axis=1, keepdims=True)
    known = (ranks != 0).sum(axis=(0, 1))
    free = np.tile(known * (1 - 1 / width), (len(categories), 1))
    return differences(
        label.reshape(-1, len(categories)) > 0,
        centred.reshape(-1, len(categories)),
        raw=loss.reshape(-1, len(losses)),
        ranks=ranks.reshape(-1, len(losses)),
        free=free,
        firsts=list(categories),
        seconds=list(losses),
        steps_of=lambda at: int(steps[at // width]),
        records=len(steps),
    )


def _samples(run: Run, statistics: int) -> tuple[n.Floats, NDArray[np.int64], list[SlotInfo]]:
    """Return training data [records, slots, samples, statistics], the steps and the slots."""
    size = max(1, len(run.slots) * run.sample_count * statistics)
    every = max(1, -(-len(run.steps) * size // _VALUES))
    parts, steps, infos, seen = [], [], [], 0
    for chunk in run.chunks(probes=False):
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


def _candidate(info: SlotInfo, origins: Origins) -> bool:
    computed = info.kind not in ("parameter", "buffer") and not origins.belongs_to_loss(info.key)
    return computed and info.batch_dim is not None and "float" in info.dtype


def _losses(
    cube: n.Floats, infos: list[SlotInfo], *, names: list[str], origins: Origins
) -> dict[Side, n.Floats]:
    """Return the mean of all losses that have a value per sample, [records, samples].

    If no tensor is marked as a loss, tensors computed from a target with one value per sample are
    used.
    """
    if "mean" not in names:
        return {}
    sliced = [
        (at, info)
        for at, info in enumerate(infos)
        if info.key.pass_ == "forward" and info.batch_dim is not None and info.kind != "target"
    ]
    chosen = [(at, info) for at, info in sliced if is_loss(info)] or [
        (at, info)
        for at, info in sliced
        if origins.belongs_to_loss(info.key) and info.kind == "computed" and len(info.shape) == 1
    ]
    return {
        Side(str(_place(info)), _place(info), "mean"): cube[:, at, :, names.index("mean")]
        for at, info in chosen
    }


def _graded(
    cube: n.Floats, infos: list[SlotInfo], *, names: list[str], scene: Scene
) -> dict[Side, n.Floats]:
    """Return the gradient magnitude at the prediction, used if there is no loss per sample.

    It grows with the loss of a sample if the loss is a squared error or a cross-entropy.
    """
    known = {scene.table.infos[slot].key for slot in predictions(scene)}
    chosen = [
        (at, info)
        for at, info in enumerate(infos)
        if info.key.pass_ == "grad"
        and info.batch_dim is not None
        and info.key._replace(pass_="forward") in known
    ]
    if not chosen or "l2" not in names:
        return {}
    at, info = min(chosen, key=lambda pair: pair[0])  # the first one reached by a backward pass
    place = _place(info)
    side = Side(f"gradient of the loss at {info.key.node}", place, "l2")
    return {side: cube[:, at, :, names.index("l2")]}


def _categories(run: Run, steps: NDArray[np.int64]) -> dict[Side, n.Floats]:
    """Return which samples belong to each category, if the spec requests categories."""
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
    """Return [records x samples, columns]: the deviation of each sample from its record's mean.

    The deviations are divided by the typical deviation in that record, so that trends over the run
    cancel out.
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
