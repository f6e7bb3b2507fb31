"""Convert the tables of a run to data frames, and small tables to HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.store.dense import MISSING
from comgra_decl.store.layout import SYSTEM_COLUMNS, RecordColumn
from comgra_decl.store.sessions import Session

from .view import RecordView

_TABLE = "border-collapse:collapse;font:13px system-ui,sans-serif"
_CAPTION = "text-align:left;font-weight:600;padding:4px 0"
_CELL = "text-align:left;padding:3px 16px 3px 0;border-top:1px solid rgba(128,128,128,.25)"

FINDING_COLUMNS = (
    "rule",
    "severity",
    "node",
    "role",
    "iteration",
    "pass",
    "first_step",
    "last_step",
    "message",
    "advice",
    "also",
    "because",
    "after_step",
)


_PLACE = ("node", "role", "iteration")


def records_table(view: RecordView) -> pd.DataFrame:
    """Return one row per record; `batch_size` is <NA> and `structure` None where unknown."""
    facts = view.records
    return pd.DataFrame(
        {
            "step": facts[:, RecordColumn.STEP].astype(np.int64),
            "type": decoded(facts[:, RecordColumn.TYPE], view.names("type")),
            "mode": decoded(facts[:, RecordColumn.MODE], view.names("mode")),
            "time": facts[:, RecordColumn.TIME],
            "structure": decoded(facts[:, RecordColumn.STRUCTURE], view.names("structure")),
            "batch_size": _counts(facts[:, RecordColumn.BATCH_SIZE]),
            "cost": facts[:, RecordColumn.COST],
            "kept": _kept_reasons(view),
            "tags": tags_by_code(view)[facts[:, RecordColumn.TAGS].astype(np.int64)],
        },
        index=pd.RangeIndex(len(facts), name="record"),
    )


def sessions_table(sessions: list[Session], started: float) -> pd.DataFrame:
    """Return one row per session; see `Run.sessions`."""
    return pd.DataFrame(
        {
            "started": [started if s.started is None else s.started for s in sessions],
            "step": pd.array([s.step for s in sessions], dtype="Int64"),
            "first_record": [s.record for s in sessions],
        },
        index=pd.RangeIndex(len(sessions), name="session"),
    )


def _kept_reasons(view: RecordView) -> NDArray[np.object_]:
    """Return the triggers of `keep` that stored each record, [n]; None for scheduled records."""
    reasons: NDArray[np.object_] = np.full(view.n, None, object)
    steps = view.records[:, RecordColumn.STEP]
    for first, last in (view.document("keep") or {}).get("steps", ()):
        # reading the facts of individual records is slow, so read them only for these steps
        for record in np.flatnonzero((steps >= first) & (steps <= last)).tolist():
            kept = view.extra(record).get("kept")
            reasons[record] = ", ".join(kept) if kept else None
    return reasons


def tags_by_code(view: RecordView) -> NDArray[np.object_]:
    """Return the labels of records other than their type, a tuple for each code."""
    listed: list[tuple[str, ...]] = [(), *map(_tags, view.names("tags"))]
    tags = np.empty(len(listed), object)
    tags[:] = listed
    return tags


def _tags(text: str) -> tuple[str, ...]:
    return tuple(map(str, json.loads(text)))


def slots_table(view: RecordView) -> pd.DataFrame:
    """Return one row per slot; `batch_dim` is <NA> for tensors without one."""
    slots = view.slots
    return pd.DataFrame(
        {
            "node": _texts(slot.key.node for slot in slots),
            "role": _texts(slot.key.role for slot in slots),
            "iteration": np.array([slot.key.iteration for slot in slots], np.int64),
            "pass": _texts(slot.key.pass_ for slot in slots),
            "kind": _texts(slot.kind for slot in slots),
            "dtype": _texts(slot.dtype for slot in slots),
            "shape": [slot.shape for slot in slots],
            "batch_dim": pd.array([slot.batch_dim for slot in slots], dtype="Int64"),
            "module_class": _texts(slot.module_class for slot in slots),
            "names": [slot.names for slot in slots],
        },
        index=pd.RangeIndex(len(slots), name="slot"),
    )


def _texts(found: Iterable[str]) -> NDArray[np.object_]:
    """Return a column of strings; with object dtype even if empty, unlike pandas."""
    return np.array([*found], object)


def kpis_table(view: RecordView) -> pd.DataFrame:
    """Return one row per scalar, in logging order.

    After the scalars come the KPIs stored with a record, except for names and types that already
    occur among the scalars.
    """
    scalars, recorded = _scalars_table(view), _recorded_kpis_table(view)
    if recorded.empty or scalars.empty:
        return recorded if scalars.empty else scalars
    known = set(zip(scalars["name"], scalars["type"], strict=True))
    pairs = zip(recorded["name"], recorded["type"], strict=True)
    news = np.array([pair not in known for pair in pairs])
    return pd.concat([scalars, recorded[news]], ignore_index=True)


def notes_table(view: RecordView) -> pd.DataFrame:
    """Return one row per note, in order."""
    notes = view.notes
    return pd.DataFrame(
        {
            "step": np.array([note.step for note in notes], np.int64),
            "type": np.array([note.type for note in notes], object),
            "time": np.array([note.time for note in notes], np.float64),
            "text": np.array([note.text for note in notes], object),
        }
    )


def _scalars_table(view: RecordView) -> pd.DataFrame:
    scalars = view.scalars[~view.superseded_scalars]
    return pd.DataFrame(
        {
            "step": scalars["step"].astype(np.int64),
            "type": decoded(scalars["type"], view.names("scalar_type")),
            "name": decoded(scalars["name"], view.names("scalar")),
            "value": scalars["value"].astype(np.float64),
        }
    )


def _recorded_kpis_table(view: RecordView) -> pd.DataFrame:
    names = view.names("kpi")
    columns = [view.series("kpi", SYSTEM_COLUMNS + code) for code in range(len(names))]
    values = np.stack(columns, axis=1) if columns else np.empty((view.n, 0))
    # NaN is a valid value of a KPI; a missing KPI is a NaN with different bits
    there = values.view(np.uint64) != MISSING.view(np.uint64)
    for code in range(len(names)):
        there[:, code] &= view.records[:, RecordColumn.KPIS] > SYSTEM_COLUMNS + code
    there[view.superseded] = False
    records, codes = np.nonzero(there)
    facts = view.records[records]
    return pd.DataFrame(
        {
            "step": facts[:, RecordColumn.STEP].astype(np.int64),
            "type": decoded(facts[:, RecordColumn.TYPE], view.names("type")),
            "name": decoded(codes.astype(np.float64), names),
            "value": values[records, codes],
        }
    )


def findings_table(document: Mapping[str, Any] | None) -> pd.DataFrame:
    """Return one row per finding in a document stored by the rules."""
    lines = [_finding_line(finding) for finding in (document or {}).get("findings", [])]
    return pd.DataFrame(lines, columns=list(FINDING_COLUMNS), dtype=None if lines else object)


def _finding_line(finding: Mapping[str, Any]) -> dict[str, Any]:
    place = finding.get("place") or {}
    named = {"pass": place.get("pass_"), **{name: place.get(name) for name in _PLACE}}
    return {name: finding.get(name) for name in FINDING_COLUMNS} | named


def decoded(codes: NDArray[Any], names: list[str]) -> NDArray[np.object_]:
    """Return the names for codes; None for the code -1."""
    lookup = np.array([*names, None], dtype=object)  # code -1 selects the last entry, None
    decoded: NDArray[np.object_] = lookup[codes.astype(np.int64)]
    return decoded


def _counts(values: NDArray[np.float64]) -> pd.api.extensions.ExtensionArray:
    known = values >= 0
    return pd.arrays.IntegerArray(values.astype(np.int64), ~known)


def table_html(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a small HTML table; all text is escaped."""
    head = "".join(f'<th style="{_CELL};opacity:.65">{escape(text)}</th>' for text in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<table style="{_TABLE}"><caption style="{_CAPTION}">{escape(title)}</caption>'
        f"<tr>{head}</tr>{body}</table>"
    )
