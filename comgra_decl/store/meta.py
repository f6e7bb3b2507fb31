"""Metadata of a run that is available before its first record, and the identity of its writer."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from comgra_decl.bins import Spacing
from comgra_decl.errors import DamagedRunError, FormatError
from comgra_decl.records import AGGREGATES

from .layout import BOUND_SINCE, FORMAT, MIN_READER, SHAPES_SINCE, SPACED_SINCE, VERSION
from .plausible import check_meta


@dataclass
class RunMeta:
    """Metadata of a run, stored once at its creation.

    `statistics` names the statistics of every slot, `sample_count` is the number of samples
    recorded per slot, and `bins` the number of histogram bins (None: no histograms). `spec`,
    `config` and `facts` are JSON-serialisable. `started` is in Unix seconds. `counts_rows`: whether
    the run stores the number of samples behind each aggregate. `bound`: whether checksums cover
    their key. `tells_shapes`: whether records store the shapes of their tensors.
    """

    statistics: tuple[str, ...]
    sample_count: int
    bins: int | None
    spec: dict[str, Any]
    config: dict[str, Any] | None
    facts: dict[str, Any]
    started: float
    uuid: str = field(default_factory=lambda: uuid.uuid4().hex)
    writer: dict[str, Any] = field(default_factory=dict)
    spacing: Spacing = "linear"
    counts_rows: bool = True
    bound: bool = True
    tells_shapes: bool = True

    @property
    def counts_dtype(self) -> str:
        """Dtype of histogram counts: uint16 if no bin can overflow it."""
        elements = (self.spec.get("histogram") or {}).get("elements")
        return "uint16" if isinstance(elements, int) and elements < 1 << 16 else "uint32"

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the `agg` arrays: statistic by statistic, then the others.

        "rows" is the number of samples that were aggregated. "shape" is 0 if a tensor has the shape
        given in the slot table, and 1 + its row in the "shape" name table otherwise. The range of
        the histogram comes last.
        """
        names = [f"{statistic}.{how}" for statistic in self.statistics for how in AGGREGATES]
        names += ["rows"] if self.counts_rows else []
        names += ["shape"] if self.tells_shapes else []
        return names + (["histogram.low", "histogram.high"] if self.bins else [])

    def to_json(self) -> dict[str, Any]:
        """Return the document `meta/run.json`."""
        return {
            "format": FORMAT,
            **versions(self),
            "uuid": self.uuid,
            "started": self.started,
            "writer": self.writer,
            "statistics": list(self.statistics),
            "aggregates": list(AGGREGATES),
            "columns": self.columns,
            "sample_count": self.sample_count,
            "bins": self.bins,
            **({} if self.spacing == "linear" else {"spacing": self.spacing}),
            "spec": self.spec,
            "config": self.config,
            "facts": self.facts,
        }

    @classmethod
    def from_json(cls, document: Any, *, where: str) -> RunMeta:
        """Read `meta/run.json`. Raises FormatError if too new, DamagedRunError if invalid."""
        if not isinstance(document, Mapping) or document.get("format") != FORMAT:
            raise DamagedRunError(f"{where}: 'meta/run.json' does not describe a {FORMAT!r}.")
        check_version(document, where=where)
        try:
            meta = cls(
                statistics=tuple(map(str, document["statistics"])),
                sample_count=int(document["sample_count"]),
                bins=None if document["bins"] is None else int(document["bins"]),
                spec=dict(document["spec"]),
                config=document["config"],
                facts=dict(document["facts"]),
                started=float(document["started"]),
                uuid=str(document["uuid"]),
                writer=dict(document["writer"]),
                spacing=document.get("spacing", "linear"),
                counts_rows="rows" in document.get("columns", ()),
                bound=document["version"] >= BOUND_SINCE,
                tells_shapes="shape" in document.get("columns", ()),
            )
            check_meta(meta)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DamagedRunError(f"{where}: key 'meta/run.json' is invalid: {error}.") from error
        return meta


def versions(meta: RunMeta) -> dict[str, int]:
    """Return the format version of a document, and the version needed to read it."""
    number = SHAPES_SINCE if meta.tells_shapes else BOUND_SINCE if meta.bound else BOUND_SINCE - 1
    number = number if meta.spacing == "linear" else SPACED_SINCE
    return {"version": number, "min_reader": number}


def check_version(document: Mapping[str, Any], *, where: str) -> None:
    """Refuse a document of an older format, or one that needs a newer reader."""
    needed, written = document.get("min_reader", 0), document.get("version")
    if isinstance(written, int) and written < MIN_READER:
        raise FormatError(
            f"{where}: written in format version {written!r}; this version of comgra-decl reads "
            f"versions from {MIN_READER} on. Open it with the version that wrote it "
            "('writer' in its 'meta/run.json')."
        )
    if not isinstance(needed, int) or needed > VERSION:
        raise FormatError(
            f"{where}: written in format version {document.get('version')!r}, which needs a "
            f"reader of version {needed!r}; this one reads up to {VERSION}. "
            "Upgrade comgra-decl to open it."
        )


class FolderHandle:
    """An open handle to a run's folder, which shows other processes that the run is being written.

    If a writer stops because its disk fails, it may be unable to store that fact in the run. It
    then closes the handle, so `holds_folder` returns False although the writer's process is still
    alive.
    """

    def __init__(self, folder: Path) -> None:
        self.number: int | None = None
        with suppress(OSError):  # systems on which a folder cannot be opened
            self.number = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def close(self) -> None:
        """Close the handle. Idempotent."""
        number, self.number = self.number, None
        if number is not None:
            with suppress(OSError):  # the program has closed all files
                os.close(number)


def process_identity() -> dict[str, Any]:
    """Return what `writer_alive` needs to recognize this process: number, start and machine."""
    pid = os.getpid()
    return {"pid": pid, "process_start": _process_start(pid), "machine": _machine()}


def writer_identity(handle: FolderHandle | None = None) -> dict[str, Any]:
    """Return the identity of this process, so that a reader can tell whether it is alive.

    Args:
        handle: shows that it writes; None in a bucket.
    """
    return {
        **process_identity(),
        **({} if handle is None or handle.number is None else {"handle": handle.number}),
        "host": socket.gethostname(),
        "versions": {name: _version(name) for name in ("comgra-decl", "tensorstore", "numpy")},
    }


def writer_alive(writer: Mapping[str, Any], *, last_commit: float, patience: float = 3600) -> bool:
    """Return whether the writer of an unclosed run is probably alive.

    On the same machine and in the same process namespace, checks whether the process exists.
    Otherwise, or if the number cannot be that of a process, the writer counts as alive for
    `patience` seconds after its last commit.
    """
    pid = writer.get("pid")
    known = type(pid) is int and pid > 0  # 0 and below are groups of processes
    if writer.get("machine") != _machine() or not known:
        return abs(time.time() - last_commit) < patience  # a clock may be wrong, but not by more
    assert pid is not None
    if not _exists(pid):
        return False
    started = _process_start(pid)
    return started is None or started == writer.get("process_start")


def holds_folder(writer: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a living writer on this machine still has its run's folder open.

    Returns True if this is unknown, because the writer has no handle or belongs to another user.
    """
    pid, number = writer.get("pid"), writer.get("handle")
    if writer.get("machine") != _machine() or type(pid) is not int or type(number) is not int:
        return True
    handles = Path(f"/proc/{pid}/fd")
    try:
        if not os.access(handles, os.R_OK | os.X_OK):
            return True
        own = folder.stat()
        try:
            return os.path.samestat((handles / str(number)).stat(), own)
        except FileNotFoundError:
            return False
    except OSError:
        return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return _process_state(pid) not in ("Z", "X")  # a zombie is dead


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the command name; empty if missing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _process_state(pid: int) -> str | None:
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def _process_start(pid: int) -> str | None:
    fields = _stat_fields(pid)
    return fields[19] if len(fields) > 19 else None


def _machine() -> str:
    """Identify this boot and process namespace (containers share the boot)."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        pass  # not Linux: use the host name
    return "|".join(parts)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
