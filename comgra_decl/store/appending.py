"""Going on with a run that exists: who may, and what a tracer must know of it."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from comgra_decl.errors import StoreError
from comgra_decl.records import SlotInfo

from .database import database_path
from .location import Where, location
from .locking import settled
from .meta import RunMeta, writer_alive
from .reader import Reader
from .writer import RunWriter

SILENCE = 300.0
"""Seconds without a commit after which a writer on another machine, of which nothing else can be
known from here, is taken to be gone. Should it live, its next commit fails and it stops."""


@dataclass(frozen=True)
class Past:
    """What a run holds already: its slots, and its last training step (None: no record yet)."""

    slots: list[SlotInfo]
    step: int | None


def append_to(path: Where, meta: RunMeta) -> tuple[RunWriter, Past]:
    """Goes on with the run in a folder.

    Args:
        path: the run's folder, or its place in a bucket.
        meta: of the program that goes on with it; what shapes the arrays on disk must be the same.

    Raises:
        StoreError: it is being written, has another form, or cannot be written.
        RunNotFoundError: there is no run.
        DamagedRunError: it cannot be read.
    """
    Reader(path)  # says what is wrong before anything is locked
    with settled(location(path)):
        reader = Reader(path)
        _refuse_living(reader)
        _refuse_another_form(reader, meta)
        writer = RunWriter.resume(reader, meta)
    view = reader.view
    return writer, Past(list(view.slots), last_step(reader))


def last_step(reader: Reader) -> int | None:
    """Returns the last training step that the run knows of: of its records and numbers."""
    view = reader.view
    said = view.scalars["step"][~view.superseded_scalars]
    known = [int(said.max())] if len(said) else []
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
            f"{writer.get('pid')} on {writer.get('host')!r} (last heard of "
            f"{max(0.0, time.time() - last):.0f} s ago); one run has one writer. End that process "
            "first, or record another run (run.resume=false)"
        )


def _refuse_another_form(reader: Reader, meta: RunMeta) -> None:
    """A resumed run has the statistics, samples and bins that it began with."""
    before = reader.meta
    pairs = {
        "stats": (list(before.statistics), list(meta.statistics)),
        "samples.count": (before.sample_count, meta.sample_count),
        "histogram.bins": (before.bins, meta.bins),
        "histogram.elements": (before.counts_dtype, meta.counts_dtype),
    }
    changed = [
        f"{key} was {was!r} and is now {now!r}" for key, (was, now) in pairs.items() if was != now
    ]
    if changed:
        raise StoreError(
            f"the run in {str(reader.path)!r} cannot be resumed with another form of what it "
            f"stores: {'; '.join(changed)}. Use the same as before, or record another run "
            "(run.resume=false)"
        )


def discard_unused(path: Path, uuid: str) -> None:
    """Takes a run away that this process has just made and that holds no record.

    Args:
        path: the run's folder; it stays if it holds anything else.
        uuid: the run that is meant; any other is left alone.
    """
    reader = Reader(path)
    if reader.meta.uuid != uuid or reader.head["n"]:
        return
    shutil.rmtree(database_path(path))
    with suppress(OSError):
        (path / "spec.yaml").unlink()
    with suppress(OSError):
        path.rmdir()
