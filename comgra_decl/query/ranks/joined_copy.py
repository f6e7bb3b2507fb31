"""Joined statistics of a finished run of several ranks, written once so that reading is cheap.

`write_joined` stores them as one database, `ranks/joined`. The databases of the ranks stay, and
whatever else is read comes from them. The joined database names the state of each rank from which
it was made. If a rank has changed since, or the database is damaged, it is not used.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from comgra_decl.errors import ComgraError, DamagedRunError, StoreError
from comgra_decl.records import AGGREGATES, StepBatch, StepInfo
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.copying import Progress
from comgra_decl.store.database import database_exists
from comgra_decl.store.drafts import drafted
from comgra_decl.store.layout import RecordColumn
from comgra_decl.store.levels import SPAN, level_columns
from comgra_decl.store.location import Location, Remote
from comgra_decl.store.view import View

from .view import JoinedView

JOINED = "joined"
_FACT = "joined"
_log = logging.getLogger("comgra_decl")


def state_of(readers: Mapping[int, Reader]) -> dict[str, Any]:
    """Return what identifies the records of each rank: run, number of records and of sessions."""
    return {
        str(rank): [reader.meta.uuid, int(reader.head["n"]), len(reader.head.get("sessions", ()))]
        for rank, reader in readers.items()
    }


def joined_view(ranks: Location, readers: Mapping[int, Reader]) -> View | None:
    """Return the joined statistics of a run on this machine; None if there are none that fit.

    Args:
        ranks: the folder with the databases of the ranks.
        readers: readers of all ranks.
    """
    if isinstance(ranks, Remote) or not all(reader.head["closed"] for reader in readers.values()):
        return None
    place = ranks / JOINED
    if place.is_symlink() or not database_exists(place):
        return None
    try:
        reader = Reader(place)
        fits = reader.head["closed"] and reader.meta.facts.get(_FACT) == state_of(readers)
        return reader.view if fits else None
    except ComgraError as error:
        _log.warning("comgra: joined statistics are not used: %s", error)
        return None


def write_joined(
    ranks: Path, view: JoinedView, readers: Mapping[int, Reader], progress: Progress | None = None
) -> Path:
    """Write the joined statistics of a run, and replace earlier ones.

    Args:
        ranks: the folder with the databases of the ranks.
        view: the records of all ranks together.
        readers: readers of all ranks.
        progress: called with the progress.

    Returns:
        The folder of the new database.

    Raises:
        DamagedRunError: a part of a rank is damaged; nothing was written.
        StoreError: the folder is not writable.
    """
    target = ranks / JOINED
    if target.is_symlink():
        raise StoreError(f"{str(target)!r} is a link; remove it first.")
    meta = replace(
        view.meta,
        sample_count=0,
        bins=None,
        counts_rows=False,
        tells_shapes=False,
        bound=True,
        facts={_FACT: state_of(readers)},
    )
    with drafted(target, "joining") as draft:
        writer = RunWriter.create(draft / "new", meta)
        for first in range(0, view.n, SPAN):
            writer.commit([_batch(view, first, min(first + SPAN, view.n))])
            if view.damage:
                raise DamagedRunError(f"{view.damage[0]}. Nothing was joined.")
            if progress is not None:
                progress("joining", min(first + SPAN, view.n), view.n)
        writer.close()
        shutil.rmtree(target, ignore_errors=True)
        (draft / "new").rename(target)
    return target


def _batch(view: JoinedView, first: int, last: int) -> StepBatch:
    """Return the joined statistics of some records."""
    records, slots = slice(first, last), slice(0, len(view.slots))
    count = level_columns(view.meta)
    table = [view.joined_tile(column, records, slots) for column in range(count)]
    shape = (last - first, len(view.slots), len(view.meta.statistics), len(AGGREGATES))
    types, modes = view.names("type"), view.names("mode")
    facts = view.records[records]
    return StepBatch(
        steps=[
            StepInfo(
                step=int(row[RecordColumn.STEP]),
                time=float(row[RecordColumn.TIME]),
                type=types[int(row[RecordColumn.TYPE])],
                mode=modes[int(row[RecordColumn.MODE])],
            )
            for row in facts
        ],
        slots=np.arange(len(view.slots), dtype=np.int32),
        aggregates=np.stack(table, axis=-1).reshape(shape),
        samples=np.empty((*shape[:2], 0, shape[2]), np.float32),
        counts=None,
        ranges=None,
        values=[{}] * (last - first),
        kpis=[{}] * (last - first),
        new_slots=[] if first else list(view.slots),
        new_structures=[],
    )
