"""The tables of a run: its records, slots and KPIs."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.store.dense import MISSING
from comgra_decl.store.layout import SYSTEM_COLUMNS, RecordColumn
from comgra_decl.store.view import View

NOTE_COLUMNS = ("step", "type", "time", "text")
FINDING_COLUMNS = (
    "rule",
    "severity",
    "node",
    "role",
    "iteration",
    "pass",
    "first_step",
    "message",
)


def records_table(view: View) -> pd.DataFrame:
    """Returns one line per record; `batch_size` is <NA> and `structure` None where unknown."""
    facts = view.records
    return pd.DataFrame(
        {
            "step": facts[:, RecordColumn.STEP].astype(np.int64),
            "type": _decoded(facts[:, RecordColumn.TYPE], view.names("type")),
            "mode": _decoded(facts[:, RecordColumn.MODE], view.names("mode")),
            "time": facts[:, RecordColumn.TIME],
            "structure": _decoded(facts[:, RecordColumn.STRUCTURE], view.names("structure")),
            "batch_size": _counts(facts[:, RecordColumn.BATCH_SIZE]),
            "cost": facts[:, RecordColumn.COST],
        },
        index=pd.RangeIndex(len(facts), name="record"),
    )


def slots_table(view: View) -> pd.DataFrame:
    """Returns one line per slot; `batch_dim` is <NA> for tensors without one."""
    slots = view.slots
    return pd.DataFrame(
        {
            "node": [slot.key.node for slot in slots],
            "role": [slot.key.role for slot in slots],
            "iteration": np.array([slot.key.iteration for slot in slots], np.int64),
            "pass": [slot.key.pass_ for slot in slots],
            "kind": [slot.kind for slot in slots],
            "dtype": [slot.dtype for slot in slots],
            "shape": [slot.shape for slot in slots],
            "batch_dim": pd.array([slot.batch_dim for slot in slots], dtype="Int64"),
            "module_class": [slot.module_class for slot in slots],
            "names": [slot.names for slot in slots],
        },
        index=pd.RangeIndex(len(slots), name="slot"),
    )


def kpis_table(view: View) -> pd.DataFrame:
    """Returns one line per recorded KPI value, in order of record, then of first appearance."""
    names = view.names("kpi")
    columns = [view.series("kpi", SYSTEM_COLUMNS + code) for code in range(len(names))]
    values = np.stack(columns, axis=1) if columns else np.empty((view.n, 0))
    # a KPI that was NaN is a value; one that was not recorded carries other bits
    there = values.view(np.uint64) != MISSING.view(np.uint64)
    for code in range(len(names)):
        there[:, code] &= view.records[:, RecordColumn.KPIS] > SYSTEM_COLUMNS + code
    records, codes = np.nonzero(there)
    facts = view.records[records]
    return pd.DataFrame(
        {
            "step": facts[:, RecordColumn.STEP].astype(np.int64),
            "type": _decoded(facts[:, RecordColumn.TYPE], view.names("type")),
            "name": _decoded(codes.astype(np.float64), names),
            "value": values[records, codes],
        }
    )


def empty_table(columns: tuple[str, ...]) -> pd.DataFrame:
    """Returns a table without lines."""
    return pd.DataFrame({name: pd.Series(dtype=object) for name in columns})


def _decoded(codes: NDArray[np.float64], names: list[str]) -> NDArray[np.object_]:
    lookup = np.array([*names, None], dtype=object)  # code -1: the last, None
    decoded: NDArray[np.object_] = lookup[codes.astype(np.int64)]
    return decoded


def _counts(values: NDArray[np.float64]) -> pd.api.extensions.ExtensionArray:
    known = values >= 0
    return pd.arrays.IntegerArray(values.astype(np.int64), ~known)
