"""Join data other than statistics across ranks: records, metrics, notes, samples, histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.bins import Spacing
from comgra_decl.records import Note, SlotInfo
from comgra_decl.store.dense import MISSING
from comgra_decl.store.layout import SYSTEM_COLUMNS, RecordColumn
from comgra_decl.store.scalars import LOST, ROW
from comgra_decl.store.view import View

from .differences import Difference, differences_warning
from .joining import Joint, Ranks, agreed, join_histograms
from .member import Member
from .readings import Lost, Reading

if TYPE_CHECKING:
    import pandas as pd


def common_records(views: Sequence[View]) -> list[NDArray[np.int64]]:
    """Return, for each rank, the records that exist on all ranks, in order.

    Records match if they have the same step and mode. The k-th record of a step on one rank
    corresponds to the k-th record of that step on the other ranks.
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
    """Return step, mode, occurrence and number of each record that was not superseded."""
    import pandas as pd

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
    """Return the means of the scalars over the ranks, and the names for their codes."""
    import pandas as pd

    tables = [_scalars(view) for view in views]
    joined = pd.concat([table.assign(rank=rank) for rank, table in enumerate(tables)])
    names: dict[str, list[str]] = {"scalar": [], "scalar_type": []}
    if any((view.scalars["step"] == LOST).any() for view in views):
        # records were lost: the first remaining record of a step may have been its second
        last = joined.groupby(["name", "type", "step"])["occurrence"].transform("max")
        joined = joined[last == 0]
    if joined.empty:
        return np.empty(0, ROW), names
    keys = ["name", "type", "step", "occurrence"]
    sources = joined.groupby(["name", "type"])["rank"].transform("nunique").to_numpy()
    group = joined.groupby(keys, sort=False).ngroup().to_numpy()  # in order of appearance
    logged = np.bincount(group)
    first = np.unique(group, return_index=True)[1]
    means = np.bincount(group, weights=joined["value"].to_numpy()) / logged
    whole = np.flatnonzero(logged == sources[first])
    kept = joined.iloc[first[whole]]
    rows = np.empty(len(kept), ROW)
    rows["step"], rows["value"] = kept["step"].to_numpy(), means[whole]
    for field, table in (("name", "scalar"), ("type", "scalar_type")):
        codes, uniques = pd.factorize(kept[field])
        rows[field], names[table] = codes, list(uniques)
    return rows[np.argsort(rows["step"], kind="stable")], names


def _scalars(view: View) -> pd.DataFrame:
    import pandas as pd

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


def kpi_of(member: Member, name: str) -> NDArray[np.float64]:
    """Return a KPI of the common records on one rank; `MISSING` where it has none."""
    codes = member.view.names("kpi")
    if name not in codes:
        return np.full(len(member.records), MISSING)
    at = SYSTEM_COLUMNS + codes.index(name)
    values = member.view.series("kpi", at)[member.records]
    unknown = member.view.records[member.records, RecordColumn.KPIS] <= at
    return np.where(unknown, MISSING, values)


def join_kpi(columns: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return a KPI of the common records, averaged over the ranks; `MISSING` if no rank has it.

    Args:
        columns: the KPI on each rank.
    """
    table = np.stack(columns)
    there = table.view(np.uint64) != MISSING.view(np.uint64)
    with np.errstate(all="ignore"):
        means = np.where(there, table, 0.0).sum(0) / there.sum(0)
    return np.where(there.any(0), means, MISSING)


def join_notes(notes: Sequence[list[Note]], ranks: Sequence[int]) -> list[Note]:
    """Return the first rank's notes, and further notes from other ranks, prefixed by the rank."""
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
    """Return the first rank's report with the warnings of all ranks and of their comparison."""
    joined = dict(reports[0] or {})
    warnings = list(joined.get("warnings", []))
    for rank, report in zip(ranks[1:], reports[1:], strict=True):
        new = [w for w in (report or {}).get("warnings", []) if w not in warnings]
        warnings += [f"rank {rank}: {warning}" for warning in new]
    if differences:
        warnings.append(differences_warning(differences))
    return joined | {"warnings": warnings}


def join_findings(
    documents: Sequence[dict[str, Any] | None], ranks: Sequence[int]
) -> dict[str, Any] | None:
    """Return the first rank's findings, and further ones from other ranks, prefixed by the rank.

    During recording, the rules on each rank checked only the rank's own part of the batch.
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
    """Return the rule and the node of a finding."""
    place = finding.get("place")
    return finding["rule"], None if place is None else place["node"]


# -- samples, histograms, values -----------------------------------------------------------------


def join_samples(
    tables: Reading, ranks: Ranks, names: Sequence[str], whole: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Concatenate the samples of all batches: [..., slots, batches * samples, statistics].

    A tensor that is copied to all ranks or split across them has only sample 0, which is the tensor
    itself.

    Args:
        tables: [ranks, ..., slots, samples, statistics].
        ranks: how the slots are joined.
        names: names of the statistics.
        whole: statistics [..., slots, statistics] of tensors split across the ranks.
    """
    joints = ranks.joints
    parts = joints == Joint.PARTS
    each: NDArray[np.float32] = tables.data
    if parts.any() or len(ranks.batches) < len(each):
        each = np.asarray(agreed(tables.data, ranks.batches), np.float32)
        if parts.any():
            each[..., parts, :, :] = ranks.of_samples(tables.data, names)[..., parts, :, :]
    joined: NDArray[np.float32] = np.concatenate(each, axis=-2)
    alike = (joints == Joint.COPIES) | (joints == Joint.PIECES)
    if alike.any():
        joined[..., alike, 1:, :] = np.nan
        first = tables[..., 0, :]  # [ranks, ..., slots, statistics]
        there = (~np.isnan(first.data)).any(-1, keepdims=True)
        if first.lost is not None:
            there = there & ~first.lost
        copies = np.take_along_axis(first.data, there.argmax(0)[None], 0)[0]
        joined[..., alike, 0, :] = copies[..., alike, :]
    pieces = joints == Joint.PIECES
    if whole is not None:
        joined[..., pieces, 0, :] = whole[..., pieces, :]
    return joined


def join_places(found: Sequence[tuple[Sequence[int], int]], count: int) -> list[int]:
    """Return the indices, in the global batch, of the samples in a record.

    Args:
        found: for each rank, the indices of its samples in its own batch, and the batch's size.
        count: samples recorded per rank; missing ones get the index -1.
    """
    places: list[int] = []
    start = 0
    for number, (own, size) in enumerate(found):
        places += [-1] * (number * count - len(places))
        places += [start + at for at in own]
        start += max(0, size)
    return places


def join_extra(parts: Sequence[dict[str, Any]], count: int) -> dict[str, Any]:
    """Return the first rank's extra facts, with the labels of the samples of all ranks."""
    if any("labels" in part for part in parts):
        labels: list[Any] = []
        for number, part in enumerate(parts):
            labels += [None] * (number * count - len(labels)) + part.get("labels", [])
        parts[0]["labels"] = labels
    return parts[0]


def join_counts(
    tables: Reading, statistics: Reading, ranks: Ranks, spacing: Spacing
) -> tuple[NDArray[np.int64], Lost]:
    """Add histograms [..., slots, bins]; for copies, take those of the first rank that has any.

    Args:
        tables: counts [ranks, ..., slots, bins].
        statistics: [ranks, ..., slots, columns], whose last two columns are the ranges.
        ranks: how the slots are joined.
        spacing: how the bins lie between the ends of a histogram.

    Returns:
        The counts, and a mask [..., slots] of the counts that are missing because data from a rank
        is lost.
    """
    counts = tables.data.astype(np.int64)
    low, high = (statistics.data[..., at].astype(np.float64) for at in (-2, -1))
    joints = ranks.joints
    counts[np.broadcast_to(_repeated(counts, ranks), counts.shape[:-1])] = 0
    there = (counts.sum(-1) > 0).argmax(0)
    single = np.take_along_axis(counts, there[None, ..., None], 0)[0]
    copies = joints == Joint.COPIES
    joined = np.where(copies[:, None], single, join_histograms(counts, low, high, spacing))
    parts = [r.lost.any(-1) for r in (tables, statistics[..., -2:]) if r.lost is not None]
    if not parts:
        return joined, None
    gone = np.logical_or.reduce(parts)  # [ranks, ..., slots]
    missing = gone.any(0) & ~(copies & single.any(-1))
    joined[missing] = 0
    return joined, missing


def _repeated(counts: NDArray[np.int64], ranks: Ranks) -> NDArray[np.bool_]:
    """Return the histograms [ranks, ..., slots] that do not count: of repeated parts and samples.

    If the samples of the same batch have different histograms, none of them counts.
    """
    divided = np.isin(ranks.joints, (Joint.PIECES, Joint.PARTS))
    inner = (1,) * (counts.ndim - 3)
    known = ((ranks.elements == 0) & divided).reshape(len(counts), *inner, -1)
    left_out: NDArray[np.bool_] = np.broadcast_to(known, counts.shape[:-1]).copy()
    samples = ranks.joints == Joint.SAMPLES
    for members in (list(each) for each in ranks.batches if len(each) > 1):
        own = counts[members]
        there = own.any(-1)
        first = np.take_along_axis(own, there.argmax(0)[None, ..., None], 0)
        same = ((own == first).all(-1) | ~there).all(0)
        keep = same & (np.arange(len(members)).reshape(-1, *(1,) * same.ndim) == there.argmax(0))
        left_out[members] |= ~keep & samples
    return left_out


def assemble(
    shape: tuple[int, ...],
    slots: Sequence[SlotInfo | None],
    parts: Sequence[NDArray[Any] | None],
) -> NDArray[Any] | None:
    """Assemble a tensor from the parts on the ranks; return None if any part is missing.

    Args:
        shape: shape of the whole tensor.
        slots: each rank's slot, which describes its part.
        parts: each rank's part, [samples, *shape of the part without the batch dim]; one sample if
            there is no batch dim.

    Returns:
        [samples, *shape without the batch dim].
    """
    there = [part for part in parts if part is not None]
    batch_dim = next(slot.batch_dim for slot in slots if slot is not None)
    shape = tuple(size for dim, size in enumerate(shape) if dim != batch_dim)
    whole = np.zeros((len(there[0]), *shape), there[0].dtype)
    filled = np.zeros(shape, bool)
    for slot, part in zip(slots, parts, strict=True):
        if slot is None or slot.piece is None or part is None:
            continue
        spans = list(zip(slot.piece.offset, slot.piece.shape, strict=True))
        spans = [span for dim, span in enumerate(spans) if dim != batch_dim]
        where = tuple(slice(start, start + extent) for start, extent in spans)
        whole[:, *where], filled[where] = part, True
    return whole if filled.all() else None


def joint_slots(listed: list[list[SlotInfo | None]]) -> list[SlotInfo]:
    """Return the slots of all ranks, renumbered, given those of each rank."""
    columns = zip(*listed, strict=True)
    first = [next(slot for slot in column if slot is not None) for column in columns]
    return [replace(slot, id=number) for number, slot in enumerate(first)]
