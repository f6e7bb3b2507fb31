"""The run's own spec, which may be edited while the training runs, and what is measured meanwhile.

Both are looked at about once a second by a thread of their own: the training thread never touches
a file, and the writer thread sleeps while there is nothing to write.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from comgra_decl.errors import SpecError
from comgra_decl.record.placement import SPEC_FILE as SPEC_FILE

if TYPE_CHECKING:
    from comgra_decl.hooks.schedule.budget import Meter
    from comgra_decl.spec import Spec
    from comgra_decl.store.location import Location

_log = logging.getLogger("comgra_decl")

_HEADER = """\
# What is recorded of this run. Changes of nodes, exclude, schedule, types and graph take effect at
# the training's next step, while it runs; a mistake is said in its log and changes nothing.
"""

_INTERVAL = 1.0
"""Seconds between two looks."""


class SpecFile:
    """The spec of a run in progress, as a file that may be edited.

    In a bucket it is written too, but not looked at again.

    Args:
        folder: the run's folder, or its place in a bucket.
        spec: what is in effect.
        leads: whether this process writes the file; other ranks of the run only follow it.
    """

    def __init__(self, folder: Location, spec: Spec, *, leads: bool = True) -> None:
        self._path = folder / SPEC_FILE
        self._spec = spec
        self._stamp: tuple[int, int, int] | None = None
        if not leads:
            return
        content = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False)
        if not isinstance(folder, Path):
            from comgra_decl.store.remote import Objects

            Objects(folder).write(SPEC_FILE, content.encode())
            return
        (folder / SPEC_FILE).write_text(_HEADER + content, encoding="utf-8")
        self._stamp = self._stamp_now()

    def changed(self) -> tuple[Spec, str] | None:
        """Returns the spec that is in effect from now on and what of it is new, or None.

        Raises:
            SpecError: the file was changed in a way that cannot take effect; it is not read again
                until it changes once more.
        """
        stamp = self._stamp_now()
        if stamp in (self._stamp, None):
            return None
        self._stamp = stamp
        from comgra_decl.spec import load_spec
        from comgra_decl.spec.live import changed_keys, refusals

        assert isinstance(self._path, Path)
        spec = load_spec(self._path)
        problems = refusals(self._spec, spec)
        if problems:
            raise SpecError(problems)
        keys = changed_keys(self._spec, spec)
        self._spec = spec
        return (spec, ", ".join(keys)) if keys else None

    def _stamp_now(self) -> tuple[int, int, int] | None:
        if not isinstance(self._path, Path):
            return None
        try:
            found = self._path.stat()
        except OSError:  # an editor may replace it
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


class Attendant:
    """Looks after a run from a thread of its own.

    Args:
        folder: the run's folder, or its place in a bucket.
        spec: what is in effect.
        meter: kept up to date.
        writer: the thread whose processor time counts.
        run: the folder of the whole run, where `folder` is only that of one of its ranks.
        look: called at each look; it looks after the program itself.
        change: told a new spec (None if an edit was wrong) and what to note in the run.
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
    ) -> None:
        self._folder = folder
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
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Looks no longer."""
        self._end.set()

    def look(self) -> None:
        """Looks once; never raises."""
        try:
            self._also()
            self._read_spec()
            self._measure()
        except Exception as error:  # noqa: BLE001 - the training must never notice
            _log.debug("comgra: %s could not be looked at: %s", self._folder, error)

    def _run(self) -> None:
        while not self._end.wait(_INTERVAL):
            self.look()

    def _read_spec(self) -> None:
        try:
            changed = self._file.changed()
        except SpecError as error:
            problems = "\n".join(f"  {problem}" for problem in error.problems)
            _log.error("the change of %s has no effect:\n%s", self._folder / SPEC_FILE, problems)
            self._change(None, f"A change of {SPEC_FILE} has no effect:\n{problems}")
            return
        if changed is not None:
            spec, keys = changed
            self._measures = spec.schedule.limits_disk
            self._change(spec, f"{SPEC_FILE} was changed: {keys}")

    def _measure(self) -> None:
        if self._writer is not None:
            self._meter.writer_seconds = processor_seconds(self._writer)
        if self._measures:
            self._meter.disk_bytes = self._stored_bytes()
            self._meter.polls += 1

    def _stored_bytes(self) -> int:
        """Returns the run's size; in a bucket what this process has written since it began."""
        if isinstance(self._folder, Path):
            return folder_bytes(self._folder)
        from comgra_decl.store.remote import written_bytes

        return written_bytes() - self._written_before


def processor_seconds(thread: threading.Thread) -> float:
    """Returns the processor time that a thread has had; 0 where that cannot be known."""
    if thread.ident is None or not thread.is_alive() or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def folder_bytes(folder: Path) -> int:
    """Returns the size of all files below a folder, in bytes."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size  # noqa: PTH116, PTH118 - speed
            except OSError:  # taken away since it was listed
                continue
    return total
