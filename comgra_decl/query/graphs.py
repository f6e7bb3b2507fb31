"""The dependency graph valid at a step."""

from __future__ import annotations

import numpy as np

from comgra_decl.records import EARLIER_STEP, Structure
from comgra_decl.store.layout import RecordColumn

from .snapshot import Snapshot


def structure(snapshot: Snapshot, step: int | None, type_: str | None) -> Structure | None:
    """Returns the graph of a record or, where it has none, of the nearest one before (or after)."""
    digest = structure_hash(snapshot, step, type_)
    return None if digest is None else snapshot.view.structure(digest)


def structure_hash(snapshot: Snapshot, step: int | None, type_: str | None) -> str | None:
    """Returns the hash of that graph, which takes no reading."""
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
    """Returns the node pairs of that graph, each once, without loops.

    What comes from an earlier step has the name of its node with `EARLIER_STEP` behind.
    """
    graph = structure(snapshot, step, type_)
    if graph is None:
        return []
    names = [k.node + EARLIER_STEP * k.role.endswith(EARLIER_STEP) for k in graph.keys]
    pairs = ((names[a], names[b]) for a, b, _ in graph.edges)
    return list(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))
