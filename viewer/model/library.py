"""Facts, metrics and series of all runs, read in the background and shared by all sessions."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError, UnknownNameError
from comgra_decl.query import (
    Clock,
    Run,
    RunRow,
    RunSummary,
    at_steps,
    clock_of,
    metrics_of,
    open_run,
    row_in,
)
from comgra_decl.viewer.model.cache import size_of
from comgra_decl.viewer.model.stretches import line_of_slot

if TYPE_CHECKING:
    from comgra_decl.viewer.model.catalogue import Catalogue

HELD = 256 << 20
"""Maximum size of the metrics and series in memory, in bytes."""

_RECENT = 30.0
"""Seconds for which numbers count as being on screen.

Such numbers are not removed to make room for others, because they would then have to be read again.
"""

_LOG = logging.getLogger(__name__)

XAxis = Literal["step", "time", "samples"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to draw of a run: a metric or, with a node, a statistic of a tensor.

    Attributes:
        run: Name of the run below the root.
        metric: Name of the metric, as in `RunRow.last` or `RunRow.automatic`; "" for a tensor.
        node, role, iteration, pass_: The tensor.
        statistic, over, type: The statistic, its aggregate over the batch, and the step type.
    """

    run: str
    metric: str = ""
    node: str = ""
    role: str = ""
    iteration: int = 0
    pass_: str = "forward"
    statistic: str = ""
    over: str = "mean"
    type: str = ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Numbers of one run by step, with the clock that turns steps into times and samples.

    Empty if the run lacks the metric or the tensor, or if `left_out` is set because there was no
    room for it.
    """

    steps: NDArray[np.int64]
    values: Floats
    clock: Clock
    left_out: bool = False

    def x(self, axis: XAxis) -> Floats:
        """Return the position of each value on an axis."""
        return at_steps(self.clock, self.steps, axis)


@dataclass(frozen=True, slots=True)
class _Held:
    """Numbers of a run, and the summary of the run when they were read."""

    summary: RunSummary | None
    found: Recorded

    @property
    def size(self) -> int:
        """Size in bytes."""
        return size_of(self.found)


class Library:
    """Reads all runs in a catalogue, one by one, on a background thread.

    Requests from sessions come first. `version` is incremented whenever something has been read.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.version = 0
        self._catalogue = catalogue
        self._rows: dict[str, tuple[RunSummary, RunRow | str]] = {}
        self._held: OrderedDict[Wanted, _Held] = OrderedDict()
        self._used: dict[Wanted, float] = {}
        self._size = 0
        self._asked: dict[Wanted, None] = {}  # in order
        self._due: list[str] = []
        self._reading = ""
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None

    def refresh(self) -> None:
        """Detect new and changed runs; returns immediately."""
        summaries = self._catalogue.summaries
        with self._lock:
            self._due = [
                name
                for name, summary in summaries.items()
                if self._rows.get(name, (None,))[0] != summary and name != self._reading
            ]
            gone = self._rows.keys() - summaries.keys()
            for name in gone:
                del self._rows[name]
            self.version += bool(gone)
        self._work()

    def rows(self) -> dict[str, RunRow]:
        """Return the rows read so far by name of the run, newest run first."""
        known = dict(self._rows)
        found = {name: known[name][1] for name in self._catalogue.summaries if name in known}
        return {name: row for name, row in found.items() if isinstance(row, RunRow)}

    def names(self) -> list[str]:
        """Return the names of all listed runs, read or not, newest first."""
        return list(self._catalogue.summaries)

    def problems(self) -> dict[str, str]:
        """Return why runs could not be read, by name."""
        listed = self._catalogue.summaries
        known = [(name, row) for name, (_, row) in list(self._rows.items()) if name in listed]
        return {name: row for name, row in known if isinstance(row, str)}

    def get(self, wanted: Wanted) -> Recorded | None:
        """Return what is wanted, or None until it has been read.

        For a run with new records, returns the previous numbers until the new ones have been read.
        """
        with self._lock:
            held = self._held.get(wanted)
            if held is not None:
                self._held.move_to_end(wanted)
                self._used[wanted] = time.monotonic()
            if held is None or held.summary != self._stamp(wanted.run):
                self._asked[wanted] = None
        self._work()
        return None if held is None else held.found

    def wait(self) -> None:
        """Wait until everything has been read."""
        while (worker := self._worker) is not None:
            worker.join()

    def _stamp(self, run: str) -> RunSummary | None:
        return self._catalogue.summaries.get(run)

    # --- on the background thread ------------------------------------------------------------

    def _work(self) -> None:
        with self._lock:
            if self._worker is None and (self._asked or self._due):
                self._worker = threading.Thread(
                    target=self._read_all, name="comgra_decl library", daemon=True
                )
                self._worker.start()

    def _read_all(self) -> None:
        while True:
            with self._lock:
                self._reading = ""
                if not (self._asked or self._due):
                    self._worker = None
                    break
                wanted = next(iter(self._asked), None)
                name = self._due.pop(0) if wanted is None else wanted.run
                self._reading = name if wanted is None else ""
            summary = self._stamp(name)
            if wanted is None and summary is not None:
                row = self._row(summary)
                with self._lock:
                    self._rows[name] = summary, row
            elif wanted is not None:
                self._hold(wanted, _Held(summary, _recorded(summary, wanted)))
            with self._lock:
                self.version += 1
        self._catalogue.index.save()

    def _row(self, summary: RunSummary) -> RunRow | str:
        """Return the row of a run, or why it cannot be read."""
        if summary.error is not None and summary.state in ("damaged", "unreadable"):
            return summary.error
        try:
            return row_in(self._catalogue.index, summary)
        except Exception as error:  # noqa: BLE001 - the table shows it, and other runs are read
            if not isinstance(error, ComgraError):
                _LOG.exception("cannot read %s", summary.path)
            return str(error) or type(error).__name__

    def _hold(self, wanted: Wanted, new: _Held) -> None:
        with self._lock:
            del self._asked[wanted]
            self._drop(wanted)
            now = time.monotonic()
            while self._held and self._size + new.size > HELD:
                oldest = next(iter(self._held))
                if now - self._used[oldest] < _RECENT:
                    new = replace(new, found=replace(_NOTHING, left_out=True))
                    break
                self._drop(oldest)
            self._held[wanted] = new
            self._used[wanted] = now
            self._size += new.size

    def _drop(self, wanted: Wanted) -> None:
        old = self._held.pop(wanted, None)
        self._used.pop(wanted, None)
        self._size -= 0 if old is None else old.size


_NO_CLOCK = Clock(np.empty(0, np.int64), np.empty(0), np.empty(0))
_NOTHING = Recorded(np.empty(0, np.int64), np.empty(0), _NO_CLOCK)


def _recorded(summary: RunSummary | None, wanted: Wanted) -> Recorded:
    if summary is None:
        return _NOTHING
    try:
        return _read(open_run(summary.path), wanted)
    except (UnknownNameError, KeyError):
        return _NOTHING
    except ComgraError as error:  # a damaged run; the table of runs says so
        _LOG.warning("%s", error)
        return _NOTHING
    except Exception:  # noqa: BLE001 - other runs are read nevertheless
        _LOG.exception("cannot read %s", summary.path)
        return _NOTHING


def _read(run: Run, wanted: Wanted) -> Recorded:
    if wanted.metric:
        steps, values = metrics_of(run, automatic=True)[wanted.metric]
        return Recorded(steps, values, clock_of(run))
    slot = run.slot(wanted.node, role=wanted.role, of=wanted.pass_, iteration=wanted.iteration)
    steps, values = line_of_slot(slot, wanted.statistic, wanted.over, wanted.type or None)
    known = ~np.isnan(values)
    return Recorded(steps[known], values[known], clock_of(run))
