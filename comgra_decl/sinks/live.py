"""Sends what a program records to other tools while it trains.

Each sink has a thread of its own, so that a tool that is slow, hangs or fails affects neither the
program nor the run on disk.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from comgra_decl.bins import Spacing
from comgra_decl.errors import SelectionError, shown
from comgra_decl.records import AUTOMATIC, ScalarBatch, SlotInfo, StepBatch
from comgra_decl.store.copying import copy_run
from comgra_decl.store.last_seen import remove_last_seen

from .api import About, Moment, Sink
from .feed import Feed, Metrics, Records
from .graph import graph_of
from .points import NewestPoints
from .selection import Selection

_log = logging.getLogger("comgra_decl")

WAIT = 20.0
"""Seconds that the end of a run waits for all sinks together."""

ARTIFACT_WAIT = 600.0
"""Seconds that the end of a run waits for a sink that stores a copy of the run."""

FINDINGS = "findings"
"""Name of the document that sinks receive."""

_QUEUE_BYTES = 64 << 20
"""Largest size of what waits for a sink; what does not fit is left out and counted."""

_Committed = tuple[list[StepBatch], Sequence[ScalarBatch]]


class LiveSink:
    """Feed one sink on a thread of its own. No method raises; `link_within` and `join` wait.

    Attributes:
        name: name of the tool.
        stores_run: whether the tool receives a copy of the run when it has ended.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        *,
        about: About,
        selection: Selection,
        slots: Sequence[SlotInfo] = (),
        queue_bytes: int = _QUEUE_BYTES,
        artifact: bool = False,
        points: bool = False,
        spacing: Spacing = "linear",
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        Args:
            name: name of the tool, for messages.
            make: creates the sink; called on the thread.
            about: facts about the run.
            selection: what the sink receives.
            slots: slots of a resumed run.
            queue_bytes: largest size of what waits for the sink.
            artifact: whether the tool receives a copy of the run when it has ended.
            points: whether the tool receives recorded values as points.
            spacing: of the bins of histograms.
            begun: called on the thread when the tool has created its run.
        """
        self.name = name
        self._spacing = spacing
        self._link: dict[str, str] | None = None
        self._begun = threading.Event()  # or never will
        self._make = make
        self._about = about
        self._selection = selection
        self._earlier = slots
        self._limit = queue_bytes
        self.stores_run = artifact
        self._queue: deque[tuple[_Committed, int]] = deque()
        self._waiting = 0
        self._on_begun = begun
        self._pictured = {slot.id for slot in slots if selection.pictured(slot.key)}
        self._points = NewestPoints(selection) if points else None
        if self._points is not None:
            self._points.see(slots)
        self._left_out = [0, 0]  # records; metrics and notes
        self._state: str | None = None
        self._off = False
        self._started = False  # whether there has been something to send
        self._work = threading.Condition()
        self._own: set[str] = set()  # names of metrics that the program logs
        self._thread = threading.Thread(target=self._run, name=f"comgra-{name}", daemon=True)
        self._thread.start()

    def expect(self) -> None:
        """Have the tool create its run now, because something will be sent; cheap to repeat."""
        if self._started:
            return
        with self._work:
            self._started = True
            self._work.notify()

    def put(self, batches: Sequence[StepBatch], scalars: Sequence[ScalarBatch]) -> None:
        """Queue what was committed; leaves it out if too much is waiting.

        Nothing is queued before the first record or metric, so that a run without any has no
        counterpart in the tool.
        """
        kept = [self._needed(batch) for batch in batches]
        size = sum(batch.nbytes for batch in kept) + sum(part.nbytes for part in scalars)
        with self._work:
            if self._off or self._state is not None:
                return
            if not (self._started or scalars or any(b.steps or b.new_slots for b in kept)):
                return
            self._started = True
            if self._points is not None:
                for batch in batches:
                    self._points.keep(batch)
            if self._waiting + size > self._limit and self._queue:
                self._leave_out(kept, scalars)
            else:
                self._queue.append(((kept, scalars), size))
                self._waiting += size
            self._work.notify()

    def _needed(self, batch: StepBatch) -> StepBatch:
        """Return what the sink reads of a batch: no samples, previews, and values but pictures."""
        histograms = self._selection.histograms
        self._pictured |= {s.id for s in batch.new_slots if self._selection.pictured(s.key)}
        values = [
            {slot: by_slot[slot] for slot in self._pictured & by_slot.keys()}
            for by_slot in batch.values
        ]
        return replace(
            batch,
            steps=[replace(info, extra={}, previews={}) for info in batch.steps],
            samples=np.empty((0, 0, 0, 0), np.float32),
            counts=batch.counts if histograms else None,
            ranges=batch.ranges if histograms else None,
            values=values if any(values) else [],
            kpis=[],
            documents={name: batch.documents[name] for name in batch.documents if name == FINDINGS},
            rows=None,
            shapes=(),
        )

    def _leave_out(self, batches: list[StepBatch], scalars: Sequence[ScalarBatch]) -> None:
        """Count what does not fit; keep slots and graphs, which are announced only once."""
        self._left_out[0] += sum(len(batch.steps) for batch in batches)
        self._left_out[1] += sum(len(part.names) + len(part.notes) for part in scalars)
        (last, _), size = self._queue[-1]
        if size:
            last = []
            self._queue.append(((last, ()), 0))
        last[:] = [_announced([*last, *batches])]

    def link_within(self, wait: float) -> dict[str, str] | None:
        """Return where the tool's run is found; None if it has not begun after `wait` seconds."""
        with self._work:
            idle = not self._started
        if not idle:
            self._begun.wait(wait)
        return self._link

    @property
    def begun_late(self) -> bool:
        """Whether the tool has been asked for a run, but has not created it yet."""
        with self._work:
            return self._started and not self._begun.is_set()

    def end(self, state: str) -> None:
        """Have the rest sent, and then the sink ended."""
        with self._work:
            self._state = state
            self._work.notify()

    def join(self, deadline: float) -> bool:
        """Return whether the sink ended before `deadline`, in seconds of `time.monotonic`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._work:
            off, self._off = self._off, True
        if self._thread.is_alive():
            return False
        records, others = self._left_out
        if (records or others) and not off:
            _warn(
                f"{self.name} was too slow: {records} records and {others} metrics and notes were "
                "not sent to it"
            )
        return True

    # -- on the thread

    def _run(self) -> None:
        sink = None
        try:
            if not self._expected():
                return
            sink = self._make()
            feed = Feed(
                sink,
                self._selection,
                statistics=self._about.statistics,
                spacing=self._spacing,
            )
            sink.begin(self._about)
            self._link = sink.link
            self._on_begun()
            self._begun.set()
            self._see(feed, self._earlier)
            while (found := self._next()) is not None:
                self._send(sink, feed, found)
                self._send_points(sink, feed)
            self._send_points(sink, feed, last=True)
            if self.stores_run:
                self._store_run(sink)
            sink.end(self._state or "stopped")
        except BaseException as error:  # noqa: BLE001  (training must not be affected)
            with self._work:
                self._off = True
                self._queue.clear()
            _warn(
                f"nothing more is sent to {self.name} ({type(error).__name__}: {error}); "
                "recording and training continue"
            )
            if sink is not None:
                with suppress(BaseException):  # the tool may be unable to end its run, too
                    sink.end("stopped")
        finally:
            self._begun.set()

    def _store_run(self, sink: Sink) -> None:
        """Have the tool store a copy of the run, which has been written completely by now."""
        try:
            with TemporaryDirectory(prefix="comgra-") as folder:
                copied = Path(folder, "run")
                copy_run(self._about.path, copied, compact=True)
                remove_last_seen(copied)  # the run itself still has it, because it is being closed
                sink.artifact(copied)
        except Exception as error:  # noqa: BLE001  (the run itself is complete)
            _warn(
                f"{self.name} has no copy of the run ({type(error).__name__}: {error}); the run "
                f"itself is in {self._about.path}"
            )

    def _expected(self) -> bool:
        """Wait until something is expected; return False if nothing was recorded."""
        with self._work:
            self._work.wait_for(lambda: self._started or self._state is not None)
            return self._started

    def _next(self) -> _Committed | None:
        """Wait for what comes next; None at the end."""
        with self._work:
            self._work.wait_for(lambda: self._queue or self._state is not None)
            if not self._queue or self._off:
                return None
            found, size = self._queue.popleft()
            self._waiting -= size
            return found

    def _see(self, feed: Feed, slots: Sequence[SlotInfo]) -> None:
        if not slots:
            return
        try:
            feed.see(slots)
        except SelectionError as error:
            _warn(f"{self.name} receives only metrics and findings: {error}")

    def _send(self, sink: Sink, feed: Feed, committed: _Committed) -> None:
        batches, scalars = committed
        for part in scalars:
            self._send_scalars(feed, part)
        for batch in batches:
            self._see(feed, batch.new_slots)
            for structure in batch.new_structures:
                at = Moment(*_first(batch))
                sink.graph(at, graph_of(structure, feed.slots))
            refused = feed.records(
                Records(
                    [Moment(info.step, info.time) for info in batch.steps],
                    [info.type for info in batch.steps],
                    batch.slots,
                    batch.aggregates,
                    batch.counts,
                    batch.ranges,
                )
            )
            for type_, error in refused.items():
                _warn(f"{self.name} receives no series of {shown(type_)}: {error}")
            for info, values in zip(batch.steps, batch.values, strict=False):  # or no values at all
                feed.pictures(Moment(info.step, info.time), values)
            if FINDINGS in batch.documents:
                feed.findings(batch.documents[FINDINGS], _first(batch)[1])

    def _send_points(self, sink: Sink, feed: Feed, *, last: bool = False) -> None:
        """Send the newest values, unless it is too early to send them again."""
        if self._points is not None:
            self._points.write(feed.chosen, sink.points, last=last)

    def _send_scalars(self, feed: Feed, part: ScalarBatch) -> None:
        """Send logged values, which have no time of their own; omits shadowed automatic ones."""
        now = time.time()
        self._own.update(name for name in part.names if not name.startswith(AUTOMATIC))
        kept = [
            i
            for i, name in enumerate(part.names)
            if not (name.startswith(AUTOMATIC) and name.removeprefix(AUTOMATIC) in self._own)
        ]
        feed.metrics(
            Metrics(
                [Moment(int(part.steps[i]), now) for i in kept],
                [part.types[i] for i in kept],
                [part.names[i] for i in kept],
                [float(part.values[i]) for i in kept],
            )
        )
        feed.notes(part.notes)


def _first(batch: StepBatch) -> tuple[int, float]:
    return (batch.steps[0].step, batch.steps[0].time) if batch.steps else (0, time.time())


def _announced(batches: Sequence[StepBatch]) -> StepBatch:
    """Return the slots, the last graph and the last findings of batches, without their records."""
    left = StepBatch.of_documents({})
    for batch in batches:
        left.new_slots = [*left.new_slots, *batch.new_slots]
        left.new_structures = batch.new_structures[-1:] or left.new_structures
        left.documents = batch.documents or left.documents
    return left


def close_sinks(sinks: Sequence[LiveSink], state: str, *, wait: float | None = None) -> None:
    """Send the rest and end the sinks, all at the same time.

    Args:
        sinks: the sinks.
        state: how the run has ended.
        wait: seconds after which to give up; None: 20 s, or ten minutes for a copy of the run.
    """
    began = time.monotonic()
    for sink in sinks:
        sink.end(state)
    for sink in sinks:
        limit = wait if wait is not None else ARTIFACT_WAIT if sink.stores_run else WAIT
        if not sink.join(began + limit):
            _warn(
                f"{sink.name} did not accept everything within {limit:g} s; the rest was not sent"
            )


def _warn(text: str) -> None:
    """Log a warning; write to stderr if the program's logging fails."""
    try:
        _log.warning("comgra: %s", text)
    except Exception:  # noqa: BLE001  (a handler or filter of the program may raise)
        with suppress(Exception):
            sys.stderr.write(f"comgra: {text}\n")
