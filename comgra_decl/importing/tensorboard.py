"""Import TensorBoard's logs: one run for each folder that contains event files."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from comgra_decl.errors import EventFileError, StoreError
from comgra_decl.record.secrets import masked
from comgra_decl.records import STATISTICS, Note, ScalarBatch, StepBatch, StepInfo
from comgra_decl.sinks import naming
from comgra_decl.spec import Spec
from comgra_decl.store import RunMeta, RunWriter
from comgra_decl.store.drafts import drafted
from comgra_decl.store.location import Remote, Where, location

from .event_files import EventLog, Text, Value, event_files, read_log

_log = logging.getLogger("comgra_decl")

Progress = Callable[[str, int, int], None]

IMPORTED = "imported"
"""Name of the document that tells what an imported run was made of."""

_AT_ONCE = 1 << 14
"""Largest number of records or values in a commit."""

_OURS = re.compile(r"[^\n]*, recorded in `[^\n]*`")
"""The text "run" of logs that were exported from our runs."""

_UNSAFE = re.compile(r"[^\w.+=@-]+")
"""What names of folders do not contain."""


@dataclass(frozen=True)
class Imported:
    """An imported run.

    Attributes:
        path: folder of the run.
        source: folder of the event files.
        values: number of values of metrics.
        metrics: number of metrics.
        settings: number of settings.
        notes: number of notes.
        left_out: how many things of each kind were not imported.
    """

    path: Path
    source: Path
    values: int
    metrics: int
    settings: int
    notes: int
    left_out: Mapping[str, int]


def import_tensorboard(
    logs: str | os.PathLike[str], to: Where, *, progress: Progress | None = None
) -> list[Imported]:
    """Import the scalars, hyperparameters and texts of event files as runs.

    Each folder that contains event files becomes a run in the folder `to`, named after its path
    below `logs`. Folders whose files contain no event are skipped with a warning. Scalars become
    metrics, hyperparameters the config, and texts notes. Each step with a scalar has a record
    without tensors, whose time is that of the first scalar. Values equal those in the files to the
    bit. The runs appear only when all of them are complete.

    Args:
        logs: a log folder of TensorBoard, or one event file.
        to: folder for the runs: a group, which may exist.
        progress: called with the current action, the amount done, and the total.

    Returns:
        The imported runs, in the order of their folders.

    Raises:
        EventFileError: there is no event, or a file is not an event file.
        MissingPackageError: TensorBoard is not installed.
        StoreError: a run exists, or `to` is in a bucket or cannot be written.
    """
    place = location(to)
    if isinstance(place, Remote):
        raise StoreError(f"logs are imported into a folder, not into a bucket: {str(place)!r}")
    group, root = place.absolute(), Path(logs).expanduser().absolute()
    found = event_files(root)
    names = _names(root if root.is_dir() else root.parent, found)
    for name in names.values():
        if os.path.lexists(group / name):
            raise StoreError(f"{str(group / name)!r} already exists; choose another target.")
    runs = []
    with drafted(group / "logs", "importing") as draft:
        for done, (folder, files) in enumerate(found.items()):
            log = read_log(folder, files)
            if log.started is None:  # a program that ended before it wrote anything
                _log.warning("%r contains no event and is not imported.", str(folder))
                continue
            runs.append(_write(log, draft / names[folder], group / names[folder]))
            if progress is not None:
                progress("importing", done + 1, len(found))
        if not runs:
            raise EventFileError(f"the event files in {str(root)!r} contain no event.")
        for run in runs:
            (draft / run.path.name).rename(run.path)
    return runs


def _names(root: Path, folders: Sequence[Path] | Mapping[Path, Any]) -> dict[Path, str]:
    """Return a name for the run of each folder; numbers tell apart those that would be equal."""
    names: dict[Path, str] = {}
    for folder in folders:
        parts = folder.relative_to(root).parts or (root.name,)
        wanted = name = _UNSAFE.sub("_", "-".join(parts)).lstrip(".") or "log"
        number = 1
        while name in names.values():
            number += 1
            name = f"{wanted}-{number}"
        names[folder] = name
    return names


def _write(log: EventLog, draft: Path, path: Path) -> Imported:
    ours = any(t.tag == "run" and _OURS.fullmatch(t.text) for t in log.texts)
    metrics = [_metric(value.tag, ours) for value in log.values]
    notes = [_note(text, ours) for text in log.texts]
    imported = Imported(
        path,
        log.folder,
        len(metrics),
        len({*metrics}),
        len(log.settings),
        len(notes),
        dict(log.left_out),
    )
    writer = RunWriter.create(draft, _meta(log))
    document = {
        "tool": "TensorBoard",
        "source": str(log.folder),
        "files": log.files,
        "values": imported.values,
        "settings": imported.settings,
        "notes": imported.notes,
        "left_out": imported.left_out,
    }
    writer.commit(
        [StepBatch.of_documents({IMPORTED: document})],
        [ScalarBatch(np.empty(0, np.int64), np.empty(0), [], [], notes)],
    )
    for records in _records(log):
        writer.commit([records])
    for first in range(0, len(metrics), _AT_ONCE):
        part = log.values[first : first + _AT_ONCE]
        writer.commit([], [_scalars(part, metrics[first : first + _AT_ONCE])])
    writer.close()
    return imported


def _meta(log: EventLog) -> RunMeta:
    return RunMeta(
        statistics=STATISTICS,
        sample_count=0,
        bins=None,
        spec=Spec().model_dump(mode="json"),
        config=masked(log.settings),
        facts={"imported": {"tool": "TensorBoard", "source": str(log.folder)}},
        started=log.started or 0.0,
    )


def _metric(tag: str, ours: bool) -> tuple[str, str]:
    """Return the name and the type of a metric; in logs of our runs, those of the run's metric."""
    if ours and tag.startswith(naming.METRICS):
        try:
            found = naming.parsed(tag)
        except ValueError:
            return tag, naming.TRAIN
        if not isinstance(found, naming.SeriesName):
            return found
    return tag, naming.TRAIN


def _note(text: Text, ours: bool) -> Note:
    head, _, type_ = text.tag.partition("/")
    if ours and head == "notes" and type_:
        return Note(text.step, type_, text.time, text.text)
    return Note(text.step, naming.TRAIN, text.time, f"{text.tag}: {text.text}")


def _records(log: EventLog) -> Iterator[StepBatch]:
    """Yield a record without tensors for each step, at the time of its first scalar."""
    times: dict[int, float] = {}
    for value in log.values:
        times.setdefault(value.step, value.time)
    steps = sorted(times)
    nothing = np.empty(0, np.int32)
    for first in range(0, len(steps), _AT_ONCE):
        infos = [
            StepInfo(step, times[step], naming.TRAIN, naming.TRAIN)
            for step in steps[first : first + _AT_ONCE]
        ]
        count = len(infos)
        yield StepBatch(
            steps=infos,
            slots=nothing,
            aggregates=np.empty((count, 0, len(STATISTICS), 3), np.float32),
            samples=np.empty((count, 0, 0, len(STATISTICS)), np.float32),
            counts=None,
            ranges=None,
            values=[{} for _ in infos],
            kpis=[{} for _ in infos],
            new_slots=[],
            new_structures=[],
        )


def _scalars(values: Sequence[Value], metrics: Sequence[tuple[str, str]]) -> ScalarBatch:
    return ScalarBatch(
        steps=np.array([value.step for value in values], np.int64),
        values=np.array([value.value for value in values], np.float64),
        names=[name for name, _ in metrics],
        types=[type_ for _, type_ in metrics],
    )
