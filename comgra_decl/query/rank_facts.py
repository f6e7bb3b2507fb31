"""What else the ranks of a run have in common: records, numbers, notes, samples, histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.records import Note, SlotInfo, SlotKey
from comgra_decl.store.dense import MISSING
from comgra_decl.store.layout import SYSTEM_COLUMNS, RecordColumn
from comgra_decl.store.scalars import LOST, ROW
from comgra_decl.store.view import View

from .joining import Joint, join_histograms

_TOLERANCE = 1e-5
"""Relative difference above which sums over equal tensors do not differ by rounding alone."""


class Difference(NamedTuple):
    """A tensor that ought to be the same on all ranks: where it was first seen not to be.

    `size` is the largest relative difference of any of its statistics.
    """

    key: SlotKey
    step: int
    size: float


def common_records(views: Sequence[View]) -> list[NDArray[np.int64]]:
    """Returns, for each rank, its records that all ranks have: of one step and mode, in order.

    The k-th record of a step on one rank is the k-th of that step on the others.
    """
    if not views:
        return []
    keys = ["step", "mode", "occurrence"]
    joined = _keys(views[0]).rename(columns={"record": "0"})
    for rank, view in enumerate(views[1:], start=1):
        joined = joined.merge(_keys(view).rename(columns={"record": str(rank)}), on=keys)
    joined = joined.sort_values("0", kind="stable")
    return [joined[str(rank)].to_numpy(np.int64) for rank in range(len(views))]


def _keys(view: View) -> pd.DataFrame:
    """Returns step, mode, which one of those it is, and number of the records that count."""
    records = np.flatnonzero(~view.superseded)
    facts = view.records[records]
    modes = np.array([*view.names("mode"), ""], object)
    table = pd.DataFrame(
        {
            "step": facts[:, RecordColumn.STEP].astype(np.int64),
            "mode": modes[facts[:, RecordColumn.MODE].astype(np.int64)],
            "record": records,
        }
    )
    table["occurrence"] = table.groupby(["step", "mode"]).cumcount()
    return table


# -- numbers -------------------------------------------------------------------------------------


def join_scalars(views: Sequence[View]) -> tuple[NDArray[np.void], dict[str, list[str]]]:
    """Returns the ranks' means of the numbers of steps, and the names of their codes."""
    tables = [_scalars(view) for view in views]
    joined = pd.concat([table.assign(rank=rank) for rank, table in enumerate(tables)])
    names: dict[str, list[str]] = {"scalar": [], "scalar_type": []}
    if any((view.scalars["step"] == LOST).any() for view in views):
        # the second of a step may have become the first
        last = joined.groupby(["name", "type", "step"])["occurrence"].transform("max")
        joined = joined[last == 0]
    if joined.empty:
        return np.empty(0, ROW), names
    keys = ["name", "type", "step", "occurrence"]
    speakers = joined.groupby(["name", "type"])["rank"].transform("nunique").to_numpy()
    group = joined.groupby(keys, sort=False).ngroup().to_numpy()  # in order of appearance
    said = np.bincount(group)
    first = np.unique(group, return_index=True)[1]
    means = np.bincount(group, weights=joined["value"].to_numpy()) / said
    whole = np.flatnonzero(said == speakers[first])
    kept = joined.iloc[first[whole]]
    rows = np.empty(len(kept), ROW)
    rows["step"], rows["value"] = kept["step"].to_numpy(), means[whole]
    for field, table in (("name", "scalar"), ("type", "scalar_type")):
        codes, uniques = pd.factorize(kept[field])
        rows[field], names[table] = codes, list(uniques)
    return rows[np.argsort(rows["step"], kind="stable")], names


def _scalars(view: View) -> pd.DataFrame:
    rows = view.scalars[~view.superseded_scalars]
    table = pd.DataFrame(
        {
            "step": rows["step"].astype(np.int64),
            "value": rows["value"].astype(np.float64),
            "name": np.array([*view.names("scalar"), None], object)[rows["name"].astype(np.int64)],
            "type": np.array([*view.names("scalar_type"), None], object)[
                rows["type"].astype(np.int64)
            ],
        }
    )
    table["occurrence"] = table.groupby(["name", "type", "step"]).cumcount()
    return table


def join_kpi(members: Sequence[tuple[View, NDArray[np.int64]]], code: int) -> NDArray[np.float64]:
    """Returns the ranks' mean of a number that is kept with the records; `MISSING` where none is.

    Args:
        members: each rank's view and its common records.
        code: of the number's name on the first rank.
    """
    name = members[0][0].names("kpi")[code]
    columns = []
    for view, records in members:
        if name in view.names("kpi"):
            at = SYSTEM_COLUMNS + view.names("kpi").index(name)
            values = view.series("kpi", at)[records]
            unknown = view.records[records, RecordColumn.KPIS] <= at
            columns.append(np.where(unknown, MISSING, values))
    table = np.stack(columns)
    there = table.view(np.uint64) != MISSING.view(np.uint64)
    with np.errstate(all="ignore"):
        means = np.where(there, table, 0.0).sum(0) / there.sum(0)
    return np.where(there.any(0), means, MISSING)


def join_notes(notes: Sequence[list[Note]], ranks: Sequence[int]) -> list[Note]:
    """Returns the first rank's notes, and what only others have written, with their rank."""
    joined = list(notes[0])
    known = {(note.step, note.text) for note in joined}
    for rank, written in zip(ranks[1:], notes[1:], strict=True):
        joined += [
            note._replace(text=f"rank {rank}: {note.text}")
            for note in written
            if (note.step, note.text) not in known
        ]
    return sorted(joined, key=lambda note: note.time)


def join_reports(
    reports: Sequence[dict[str, Any] | None],
    ranks: Sequence[int],
    differences: Sequence[Difference],
) -> dict[str, Any]:
    """Returns the first rank's report with the warnings of all, and about the ranks themselves."""
    joined = dict(reports[0] or {})
    warnings = list(joined.get("warnings", []))
    for rank, report in zip(ranks[1:], reports[1:], strict=True):
        new = [w for w in (report or {}).get("warnings", []) if w not in warnings]
        warnings += [f"rank {rank}: {warning}" for warning in new]
    if differences:
        warnings.append(_told(differences))
    return joined | {"warnings": warnings}


def join_findings(
    documents: Sequence[dict[str, Any] | None], ranks: Sequence[int]
) -> dict[str, Any] | None:
    """Returns the first rank's findings, and what only others have found, with their rank.

    The rules of each rank have looked at its own part of the batch, while it was recorded.
    """
    there = [(r, d) for r, d in zip(ranks, documents, strict=True) if d is not None]
    if not there:
        return None
    joined = list(there[0][1]["findings"])
    known = {_about(finding) for finding in joined}
    for rank, document in there[1:]:
        for finding in document["findings"]:
            if _about(finding) not in known:
                known.add(_about(finding))
                joined.append(finding | {"message": f"Rank {rank}: {finding['message']}"})
    return there[0][1] | {"findings": joined}


def _about(finding: dict[str, Any]) -> tuple[str, str | None]:
    """Returns the rule, and the node that its finding is about."""
    place = finding.get("place")
    return finding["rule"], None if place is None else place["node"]


def _told(differences: Sequence[Difference]) -> str:
    first = min(differences, key=lambda difference: difference.step)
    names = [f"{d.key.node} {d.key.role} ({d.key.pass_})" for d in differences]
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return (
        f"{len(differences)} tensors that ought to be the same on all ranks are not, seen first "
        f"at step {first.step}: {shown}; what is shown of them is the first rank's"
    )


def differing(
    copies: Sequence[SlotInfo],
    steps: NDArray[np.int64],
    rows: Callable[[int], NDArray[Any]],
    columns: Sequence[str],
) -> list[Difference]:
    """Returns which of some tensors are not the same on all ranks, in up to 16 records.

    Args:
        copies: tensors that ought to be the same.
        steps: of each common record.
        rows: returns the statistics [ranks, copies, columns] of a record.
        columns: their names.
    """
    looked = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 16)).astype(np.int64))
    found: dict[int, Difference] = {}
    for record in looked.tolist():
        for at, size in unequal(rows(record), columns):
            if at not in found:
                found[at] = Difference(copies[at].key, int(steps[record]), size)
    return list(found.values())


def unequal(rows: NDArray[np.float32], columns: Sequence[str]) -> Iterator[tuple[int, float]]:
    """Yields (place, relative difference) of the tensors whose statistics differ between ranks.

    Args:
        rows: [ranks, tensors, columns]; NaN where a rank has no such record.
        columns: their names.
    """
    at = [i for i, name in enumerate(columns) if name.endswith(".mean")]
    there = ~np.isnan(rows[..., columns.index("nonfinite.mean")])
    values = rows[..., at].astype(np.float64)
    scale = np.nanmax(np.where(np.isfinite(values), np.abs(values), 0.0), (0, 2))
    for place in np.flatnonzero(there.sum(0) > 1).tolist():
        mine = values[there[:, place], place]
        with np.errstate(all="ignore"):
            spread = np.abs(mine - mine[0]) / max(float(scale[place]), np.finfo(np.float32).tiny)
        same = (mine == mine[0]) | (np.isnan(mine) & np.isnan(mine[0]))
        size = float(np.where(same, 0.0, np.nan_to_num(spread, nan=np.inf)).max())
        if size > _TOLERANCE:
            yield place, size


def differences_table(differences: Sequence[Difference]) -> pd.DataFrame:
    """Returns one line per tensor, see `Run.rank_differences`."""
    keys = [difference.key for difference in differences]
    return pd.DataFrame(
        {
            "node": np.array([key.node for key in keys], object),
            "role": np.array([key.role for key in keys], object),
            "iteration": np.array([key.iteration for key in keys], np.int64),
            "pass": np.array([key.pass_ for key in keys], object),
            "first_step": np.array([d.step for d in differences], np.int64),
            "difference": np.array([d.size for d in differences], np.float64),
        }
    )


# -- samples, histograms, values -----------------------------------------------------------------


def join_samples(
    tables: Sequence[NDArray[np.float32]],
    joints: NDArray[np.int64],
    whole: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """Lays the samples of the ranks one after another: [..., slots, ranks * samples, statistics].

    A tensor that all ranks have, or have parts of, is its own sample 0.

    Args:
        tables: of each rank, [..., slots, samples, statistics].
        joints: how the slots are joined.
        whole: statistics [..., slots, statistics] of tensors that ranks have parts of.
    """
    joined = np.concatenate(tables, axis=-2)
    alike = joints != Joint.SAMPLES
    if alike.any():
        joined[..., alike, 1:, :] = np.nan
        first = np.stack([table[..., 0, :] for table in tables])  # [ranks, ..., slots, statistics]
        there = (~np.isnan(first)).any(-1, keepdims=True).argmax(0)[None]
        copies = np.take_along_axis(first, there, 0)[0]
        joined[..., alike, 0, :] = copies[..., alike, :]
    pieces = joints == Joint.PIECES
    if whole is not None:
        joined[..., pieces, 0, :] = whole[..., pieces, :]
    return joined


def join_places(views: Sequence[View], records: Sequence[int], count: int) -> list[int]:
    """Returns the places, in the global batch, of the samples that a record holds of each rank.

    Args:
        views: of the ranks.
        records: the record's number on each of them.
        count: samples recorded per rank; -1 stands for those that a rank lacks.
    """
    places: list[int] = []
    start = 0
    for number, (view, record) in enumerate(zip(views, records, strict=True)):
        places += [-1] * (number * count - len(places))
        places += [start + at for at in view.samples(record)]
        start += max(0, int(view.records[record, RecordColumn.BATCH_SIZE]))
    return places


def join_extra(parts: Sequence[dict[str, Any]], count: int) -> dict[str, Any]:
    """Returns the first rank's free-form facts, with the labels of all ranks' samples."""
    if any("labels" in part for part in parts):
        labels: list[Any] = []
        for number, part in enumerate(parts):
            labels += [None] * (number * count - len(labels)) + part.get("labels", [])
        parts[0]["labels"] = labels
    return parts[0]


def without(
    table: NDArray[Any], lost: Sequence[NDArray[np.bool_] | None], first: int
) -> NDArray[Any]:
    """Returns a table [records, slots, ...] from record `first` on without what slots have lost."""
    for column, records in enumerate(lost):
        if records is not None:
            gone = records[first : first + len(table)]
            table[gone, column] = np.nan if table.dtype.kind == "f" else 0
    return table


def lost_on_any(
    whose: Sequence[tuple[View, NDArray[np.int64], int]], family: str
) -> NDArray[np.bool_] | None:
    """Returns which common records of a slot were found to be damaged on any rank; None if none.

    Args:
        whose: of each rank its view, its common records, and the slot's number there (-1: none).
        family: of arrays. Samples and histograms are joined by the statistics beside them.
    """
    found = []
    for view, records, slot in whose:
        for name in (family, "agg") if slot >= 0 else ():
            lost = view.lost(name, slot)
            if lost is not None:
                found.append(lost[records])
    return np.logical_or.reduce(found) if found else None


def join_counts(
    tables: Sequence[NDArray[Any]], statistics: NDArray[np.float64], joints: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Adds histograms [..., slots, bins]; of copies, takes the first rank's that has one.

    Args:
        tables: counts of each rank.
        statistics: [ranks, ..., slots, columns], whose last two columns are the ranges.
        joints: how the slots are joined.
    """
    counts = np.stack(tables).astype(np.int64)
    low, high = statistics[..., -2], statistics[..., -1]
    there = (counts.sum(-1) > 0).argmax(0)
    single = np.take_along_axis(counts, there[None, ..., None], 0)[0]
    copies = (joints == Joint.COPIES)[:, None]
    return np.where(copies, single, join_histograms(counts, low, high))


def assemble(
    shape: tuple[int, ...],
    slots: Sequence[SlotInfo | None],
    parts: Sequence[NDArray[Any] | None],
) -> NDArray[Any] | None:
    """Puts a tensor together of which each rank holds a part; None if any is missing.

    Args:
        shape: of the whole tensor.
        slots: each rank's slot, which says what part it is.
        parts: [1, *shape of the part] of each rank.

    Returns:
        [1, *shape].
    """
    kinds = [part.dtype for part in parts if part is not None]
    whole = np.zeros((1, *shape), kinds[0])
    filled = np.zeros(shape, bool)
    for slot, part in zip(slots, parts, strict=True):
        if slot is None or slot.piece is None or part is None:
            continue
        spans = zip(slot.piece.offset, slot.piece.shape, strict=True)
        where = tuple(slice(start, start + extent) for start, extent in spans)
        whole[0][where], filled[where] = part[0], True
    return whole if filled.all() else None


def joint_slots(listed: list[list[SlotInfo | None]]) -> list[SlotInfo]:
    """Returns the slots of all ranks, given each rank's own, numbered anew."""
    columns = zip(*listed, strict=True)
    first = [next(slot for slot in column if slot is not None) for column in columns]
    return [replace(slot, id=number) for number, slot in enumerate(first)]


def arranged(table: NDArray[Any], ids: NDArray[np.int64], axis: int) -> NDArray[Any]:
    """Returns a rank's slots in joint order; NaN (counts: 0) where it has none."""
    shape = [*table.shape]
    there = (ids >= 0) & (ids < shape[axis])
    shape[axis] = len(ids)
    out = np.full(shape, np.nan if table.dtype.kind == "f" else 0, table.dtype)
    index: list[Any] = [slice(None)] * table.ndim
    index[axis] = np.flatnonzero(there)
    out[tuple(index)] = table.take(ids[there], axis=axis)
    return out
