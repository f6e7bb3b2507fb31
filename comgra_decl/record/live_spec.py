"""Watch the run's spec file for edits during training, and measure the cost of recording.

A separate thread does both about once a second. The training thread never accesses a file, and the
writer thread sleeps while there is nothing to write.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from comgra_decl.errors import SpecError
from comgra_decl.record.placement import SPEC_FILE as SPEC_FILE
from comgra_decl.record.secrets import stored_spec
from comgra_decl.store.last_seen import write_last_seen

if TYPE_CHECKING:
    from comgra_decl.hooks.schedule.budget import Meter
    from comgra_decl.spec import Spec
    from comgra_decl.store.location import Location

_log = logging.getLogger("comgra_decl")

_HEADER = """\
# The spec of this run. During training, changes to nodes, exclude, schedule, types and graph take
# effect at the next step. Invalid changes are ignored and reported in the log.
"""

_DUMPER: type[yaml.SafeDumper | yaml.CSafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""Takes a tenth of the time where PyYAML has been built with libyaml, as its wheels are."""

_SHARE, _LONGEST_GAP = 0.005, 10.0
"""The time between two reports of the latest step: a share of the elapsed time, up to a maximum."""

_INTERVAL = 1.0
"""Seconds between two checks."""


class SpecFile:
    """The spec file of a run in progress, which may be edited.

    In a bucket, the file is written but not watched for changes.

    Args:
        folder: the run's folder, or its location in a bucket.
        spec: the spec in effect.
        leads: whether this process writes the file; other ranks of the run only read it.
    """

    def __init__(self, folder: Location, spec: Spec, *, leads: bool = True) -> None:
        self._path = folder / SPEC_FILE
        self._spec, self._stored = spec, stored_spec(spec)
        self._stamp: tuple[int, int, int] | None = None
        self._mistake = ""
        if not leads:
            return
        content = yaml.dump(self._stored.model_dump(mode="json"), Dumper=_DUMPER, sort_keys=False)
        if not isinstance(folder, Path):
            from comgra_decl.store.remote import Objects

            Objects(folder).write(SPEC_FILE, content.encode())
            return
        (folder / SPEC_FILE).write_text(_HEADER + content, encoding="utf-8")
        self._stamp = self._stamp_now()

    def changed(self) -> tuple[Spec, str] | None:
        """Return the new spec and its changed keys, comma-separated, or None if nothing changed.

        Raises:
            SpecError: the file is invalid, or changes keys that cannot change during a run. The
                file is not read again until it changes once more. An invalid file that is saved
                again unchanged raises no second error.
        """
        stamp = self._stamp_now()
        if stamp in (self._stamp, None):
            return None
        from comgra_decl.spec.live import changed_keys, refusals
        from comgra_decl.spec.loading import load_spec

        assert isinstance(self._path, Path)
        try:
            spec = load_spec(self._path, known=self._spec.expressions)
        except SpecError as error:
            if stamp != self._stamp_now():  # read while it was being written; read it again
                return None
            self._stamp = stamp
            if str(error) == self._mistake:  # saved again as it was
                return None
            self._mistake = str(error)
            raise
        self._stamp, self._mistake = stamp, ""
        stored = stored_spec(spec)
        problems = refusals(self._stored, stored)
        if problems:
            raise SpecError(problems)
        keys = changed_keys(self._stored, stored)
        self._spec, self._stored = spec, stored
        return (spec, ", ".join(keys)) if keys else None

    def _stamp_now(self) -> tuple[int, int, int] | None:
        if not isinstance(self._path, Path):
            return None
        try:
            found = self._path.stat()
        except OSError:  # an editor may be replacing it
            return None
        if not found.st_size:  # an editor is about to write it
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


class Attendant:
    """Monitors a run from a separate thread.

    Args:
        folder: the run's folder, or its location in a bucket.
        spec: the spec in effect.
        meter: receives the measurements.
        writer: the thread whose CPU time is measured.
        run: the folder of the whole run, if `folder` belongs to one of its ranks.
        look: called at each check to inspect the program.
        seen: returns the facts to store in the run's folder in case the process is killed.
        change: called with a new spec (None if an edit was invalid) and a note for the run.
    """

    def __init__(
        self,
        folder: Location,
        spec: Spec,
        *,
        meter: Meter,
        writer: threading.Thread | None,
        change: Callable[[Spec | None, str], None],
        look: Callable[[], None] = lambda: None,
        run: Location | None = None,
        seen: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._folder = folder
        self._seen = seen
        self._began = self._reported = time.monotonic()
        self._file = SpecFile(run or folder, spec, leads=run in (None, folder))
        self._meter = meter
        self._writer = writer
        self._change = change
        self._also = look
        self._measures = spec.schedule.limits_disk
        self._written_before = 0
        if not isinstance(folder, Path):
            from comgra_decl.store.remote import written_bytes

            self._written_before = written_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="comgra-attendant", daemon=True)

    def start(self) -> None:
        """Start monitoring."""
        self._thread.start()

    def stop(self) -> None:
        """Stop monitoring."""
        self._end.set()

    def wait(self, seconds: float = 2.0) -> None:
        """Wait, after `stop`, until any check in progress has ended."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def look(self) -> None:
        """Run all checks once; never raises."""
        try:
            self._also()
            self._read_spec()
            self._measure()
            self._report()
        except Exception as error:  # noqa: BLE001 - the training must never notice
            _log.debug("comgra: %s could not be checked: %s", self._folder, error)

    def _run(self) -> None:
        while not self._end.wait(_INTERVAL):
            self.look()

    def _read_spec(self) -> None:
        try:
            changed = self._file.changed()
        except SpecError as error:
            problems = "\n".join(f"  {problem}" for problem in error.problems)
            _log.error("the change to %s has no effect:\n%s", self._folder / SPEC_FILE, problems)
            self._change(None, f"A change to {SPEC_FILE} has no effect:\n{problems}")
            return
        if changed is not None:
            spec, keys = changed
            self._measures = spec.schedule.limits_disk
            self._change(spec, f"{SPEC_FILE} was changed: {keys}")

    def _report(self) -> None:
        """Store the latest step and memory use in the run's folder, less often in a long run."""
        now = time.monotonic()
        gap = min(_LONGEST_GAP, _SHARE * (now - self._began))
        if self._seen is None or not isinstance(self._folder, Path) or now - self._reported < gap:
            return
        self._reported = now
        write_last_seen(self._folder, self._seen())

    def _measure(self) -> None:
        if self._writer is not None:
            self._meter.writer_seconds = processor_seconds(self._writer)
        if self._measures:
            self._meter.disk_bytes = self._stored_bytes()
            self._meter.polls += 1

    def _stored_bytes(self) -> int:
        """Return the run's size in bytes; in a bucket, the bytes written by this process so far."""
        if isinstance(self._folder, Path):
            return folder_bytes(self._folder)
        from comgra_decl.store.remote import written_bytes

        return written_bytes() - self._written_before


def processor_seconds(thread: threading.Thread) -> float:
    """Return the CPU time of a thread in seconds; 0 if it is unavailable."""
    if thread.ident is None or not thread.is_alive() or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def folder_bytes(folder: Path) -> int:
    """Return the total size of all files below a folder, in bytes."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size  # noqa: PTH116, PTH118 - speed
            except OSError:  # deleted since it was listed
                continue
    return total
