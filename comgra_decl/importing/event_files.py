"""Read TensorBoard's event files with TensorBoard's own reader; needs no TensorFlow."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from comgra_decl.errors import EventFileError, near_paths, needed

EXTRA = "tensorboard"

_FRAME = 16
"""Bytes that a file stores around each event."""

_TIME = re.compile(r"\d{9,}\.\d+")

_KINDS = {
    "audio": "audio clips",
    "histograms": "histograms",
    "images": "images",
    "mesh": "meshes",
    "pr_curves": "precision-recall curves",
    "custom_scalars": "layouts of charts",
    "tensor": "tensors",
}
"""Names of what is left out, by the plugin of TensorBoard that shows it."""


class Value(NamedTuple):
    """A number that was logged under a tag; `time` is in Unix seconds."""

    tag: str
    step: int
    time: float
    value: float


class Text(NamedTuple):
    """A text that was logged under a tag; `time` is in Unix seconds."""

    tag: str
    step: int
    time: float
    text: str


@dataclass
class EventLog:
    """What the event files of one folder contain.

    Attributes:
        folder: the folder.
        files: number of event files.
        started: the earliest time in them, in Unix seconds; None if they contain no event.
        values: numbers in the order in which they were written.
        texts: texts in the same order.
        settings: hyperparameters by name.
        left_out: how many things of each kind were not read.
    """

    folder: Path
    files: int = 0
    started: float | None = None
    values: list[Value] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)


def event_files(logs: Path) -> dict[Path, list[Path]]:
    """Return the event files at or below a path by their folder, each in the order of their names.

    Links to folders and hidden folders are skipped. `SummaryWriter.add_hparams` writes into a
    folder of its own, named after the time, below that of the writer. If there is one such folder,
    its files count as those of the writer; several are runs of their own.

    Raises:
        EventFileError: the path does not exist, a folder cannot be read, or there is no event file.
    """
    if logs.is_file():
        return {logs.parent: [logs]}
    if not logs.exists():
        raise EventFileError(f"{str(logs)!r} does not exist{near_paths(logs) or '.'}")
    found: dict[Path, list[Path]] = {}
    for place, below, names in os.walk(logs, onerror=_refuse):
        below[:] = sorted(name for name in below if not name.startswith("."))
        files = [Path(place, name) for name in sorted(names) if _is_named_so(name)]
        if files := [file for file in files if file.is_file()]:
            found[Path(place)] = files
    if not found:
        raise EventFileError(
            f"there is no event file of TensorBoard in {str(logs)!r} or below: none has a name "
            "like 'events.out.tfevents.*'."
        )
    for folder in [*found]:
        if folder not in found:  # moved
            continue
        of_time = [each for each in found if each.parent == folder and _TIME.fullmatch(each.name)]
        if len(of_time) == 1:
            found[folder] += found.pop(of_time[0])
    return found


def _refuse(error: OSError) -> None:
    raise EventFileError(f"{error.filename!r} cannot be read: {error.strerror}.") from error


def _is_named_so(name: str) -> bool:
    return "tfevents" in name and not name.endswith(".profile-empty")


def read_log(folder: Path, files: list[Path]) -> EventLog:
    """Read event files, old and new style.

    Raises:
        EventFileError: a file is not an event file.
        MissingPackageError: TensorBoard is not installed.
    """
    log = EventLog(folder)
    reading = _Reading(log)
    for file in files:
        reading.read(file)
    return log


class _Reading:
    """Reads the files of one log; knows the kind of each tag, which only its first event tells."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._loader = needed(
            "tensorboard.backend.event_processing.event_file_loader", EXTRA
        ).RawEventFileLoader
        self._event = needed("tensorboard.compat.proto.event_pb2", EXTRA).Event
        self._decode_error = needed("google.protobuf.message", EXTRA).DecodeError
        self._migrate = needed("tensorboard.data_compat", EXTRA).migrate_value
        self._array = needed("tensorboard.util.tensor_util", EXTRA).make_ndarray
        self._kinds: dict[str, str] = {}

    def read(self, file: Path) -> None:
        """Add the content of a file to the log."""
        size = file.stat().st_size
        if not size:  # the program ended before it wrote anything
            return
        self._log.files += 1
        used = 0
        for content in self._loader(str(file)).Load():
            event = self._parsed(content)
            if not used and (event is None or not event.file_version.startswith("brain.Event:")):
                break
            used += len(content) + _FRAME
            if event is None:
                self._log.left_out["unreadable events"] += 1
            else:
                self._add(event)
        if not used:
            raise EventFileError(
                f"{str(file)!r} is not an event file of TensorBoard: it does not begin with the "
                "version of the format."
            )
        if used < size:
            self._log.left_out["bytes at the end of a damaged file"] += size - used

    def _parsed(self, content: bytes) -> Any:
        try:
            return self._event.FromString(content)
        except self._decode_error:
            return None

    def _add(self, event: Any) -> None:
        log = self._log
        time = float(event.wall_time)
        if time > 0:
            log.started = time if log.started is None else min(log.started, time)
        what = event.WhichOneof("what")
        if what in ("graph_def", "meta_graph_def"):
            log.left_out["graphs"] += 1
        elif what == "tagged_run_metadata":
            log.left_out["profiles"] += 1
        elif what == "summary":
            for value in event.summary.value:
                self._add_value(self._migrate(value), int(event.step), time)

    def _add_value(self, value: Any, step: int, time: float) -> None:
        log, tag = self._log, str(value.tag)
        plugin = str(value.metadata.plugin_data.plugin_name) or self._kinds.get(tag, "")
        self._kinds.setdefault(tag, plugin)
        if plugin == "hparams":
            self._add_settings(value)
        elif plugin == "scalars":
            number = self._number(value)
            if number is None:
                log.left_out["numbers of unknown form"] += 1
            elif step < 0:
                log.left_out["numbers at negative steps"] += 1
            else:
                log.values.append(Value(tag, step, time, number))
        elif plugin == "text":
            lines = [_decoded(line) for line in self._array(value.tensor).ravel().tolist()]
            tag = tag.removesuffix("/text_summary")  # which torch appends
            log.texts.append(Text(tag, max(0, step), time, "\n".join(lines)))
        else:
            log.left_out[_KINDS.get(plugin or "tensor", f"summaries of {plugin!r}")] += 1

    def _number(self, value: Any) -> float | None:
        try:
            array = self._array(value.tensor)
        except (TypeError, ValueError):
            return None
        one = array.size == 1 and array.dtype.kind in "fiub"
        return float(array.astype(np.float64).item()) if one else None

    def _add_settings(self, value: Any) -> None:
        data = needed("tensorboard.plugins.hparams.plugin_data_pb2", EXTRA).HParamsPluginData
        content = data.FromString(value.metadata.plugin_data.content)
        for name, setting in content.session_start_info.hparams.items():
            kind = setting.WhichOneof("kind")
            self._log.settings[str(name)] = None if kind is None else _plain(getattr(setting, kind))


def _plain(setting: Any) -> Any:
    """Return a setting as JSON data; event files contain whole numbers as floats."""
    if isinstance(setting, float):
        if not np.isfinite(setting):
            return str(setting)
        return int(setting) if setting.is_integer() and abs(setting) < 2**53 else setting
    return setting if isinstance(setting, bool | str) else str(setting)


def _decoded(line: Any) -> str:
    return line.decode("utf-8", "replace") if isinstance(line, bytes) else str(line)
