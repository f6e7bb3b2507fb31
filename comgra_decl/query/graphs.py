"""Find the dependency graph for a step."""

from __future__ import annotations

import numpy as np

from comgra_decl.records import EARLIER_STEP, Structure
from comgra_decl.store.layout import RecordColumn

from .snapshot import Snapshot


def structure(snapshot: Snapshot, step: int | None, type_: str | None) -> Structure | None:
    """Return the graph of a record, or of the nearest record before (or after) that has one."""
    digest = structure_hash(snapshot, step, type_)
    return None if digest is None else snapshot.view.structure(digest)


def structure_hash(snapshot: Snapshot, step: int | None, type_: str | None) -> str | None:
    """Return the hash of the graph that `structure` returns, without reading the graph."""
    records = snapshot.records(type_)
    if not len(records):
        return None
    at = int(records[-1]) if step is None else snapshot.record(step, type_)
    codes = snapshot.view.records[records, RecordColumn.STRUCTURE]
    known = records[codes >= 0]
    if not len(known):
        return None
    before = max(0, int(np.searchsorted(known, at, side="right")) - 1)
    code = int(snapshot.view.records[known[before], RecordColumn.STRUCTURE])
    return str(snapshot.view.names("structure")[code])


def edges(snapshot: Snapshot, step: int | None, type_: str | None) -> list[tuple[str, str]]:
    """Return the node pairs of the graph that `structure` returns, each once, without self-loops.

    If a node contains a tensor from an earlier step, its name is followed by `EARLIER_STEP`.
    """
    graph = structure(snapshot, step, type_)
    if graph is None:
        return []
    names = [k.node + EARLIER_STEP * k.role.endswith(EARLIER_STEP) for k in graph.keys]
    pairs = ((names[a], names[b]) for a, b, _ in graph.edges)
    return list(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))
