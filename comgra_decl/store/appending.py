"""Resume an existing run: check whether it can be extended, and return facts for tracing."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from comgra_decl.errors import StoreError
from comgra_decl.records import SlotInfo

from .database import database_path
from .last_seen import remove_last_seen
from .location import Where, location
from .locking import settled
from .meta import RunMeta, writer_alive
from .reader import Reader
from .view import View
from .writer import RunWriter

SILENCE = 300.0
"""Seconds without a commit after which a writer on another machine is considered dead. If the
writer is still alive, its next commit fails, and it stops.
"""


@dataclass(frozen=True)
class Past:
    """Facts about a resumed run.

    Attributes:
        slots: its slots.
        step: its last training step; None without records.
        view: what it contained when it was resumed.
    """

    slots: list[SlotInfo]
    step: int | None
    view: View


def append_to(path: Where, meta: RunMeta) -> tuple[RunWriter, Past]:
    """Open an existing run for appending.

    Args:
        path: the run's folder, or its location in a bucket.
        meta: metadata of the resuming program. Settings that determine the arrays on disk must
            match.

    Raises:
        StoreError: the run is being written, has different storage settings, or cannot be written.
        RunNotFoundError: there is no run.
        DamagedRunError: the run cannot be read.
    """
    Reader(path)  # raises before anything is locked
    with settled(location(path)):
        reader = Reader(path)
        _refuse_living(reader)
        _refuse_another_form(reader, meta)
        writer = RunWriter.resume(reader, meta)
    view = reader.view
    return writer, Past(list(view.slots), last_step(reader), view)


def last_step(reader: Reader) -> int | None:
    """Return the last training step among the run's records and scalars."""
    view = reader.view
    logged = view.scalars["step"][~view.superseded_scalars]
    known = [int(logged.max())] if len(logged) else []
    if reader.head["step"] is not None:
        known.append(int(reader.head["step"]))
    return max(known, default=None)


def _refuse_living(reader: Reader) -> None:
    if reader.head["closed"]:
        return
    writer, last = reader.writer, float(reader.head["time"])
    if writer_alive(writer, last_commit=last, patience=SILENCE):
        raise StoreError(
            f"the run in {str(reader.path)!r} is still being written, by process "
            f"{writer.get('pid')} on {writer.get('host')!r} (last commit "
            f"{max(0.0, time.time() - last):.0f} s ago); a run can have only one writer. End that "
            "process first, or start a new run (run.resume=false)"
        )


def _refuse_another_form(reader: Reader, meta: RunMeta) -> None:
    """Raise if a resumed run would change its statistics, samples or bins."""
    before = reader.meta
    pairs = {
        "stats": (list(before.statistics), list(meta.statistics)),
        "samples.count": (before.sample_count, meta.sample_count),
        "histogram.bins": (before.bins, meta.bins),
        "histogram.spacing": (before.spacing, meta.spacing),
        "histogram.elements": (before.counts_dtype, meta.counts_dtype),
    }
    changed = [
        f"{key} was {was!r} and is now {now!r}" for key, (was, now) in pairs.items() if was != now
    ]
    if changed:
        raise StoreError(
            f"the run in {str(reader.path)!r} cannot be resumed with different storage settings: "
            f"{'; '.join(changed)}. Use the same settings, or start a new run "
            "(run.resume=false)"
        )


def discard_unused(path: Path, uuid: str) -> None:
    """Remove a run that this process has just created, if the run contains no records.

    Args:
        path: the run's folder; kept if it contains anything else.
        uuid: UUID of the run; any other run is left alone.
    """
    reader = Reader(path)
    if reader.meta.uuid != uuid or reader.head["n"]:
        return
    shutil.rmtree(database_path(path))
    remove_last_seen(path)
    with suppress(OSError):
        (path / "spec.yaml").unlink()
    with suppress(OSError):
        path.rmdir()
