"""Sends what a program records to other tools while it trains.

Each sink has a thread of its own, so that a tool that is slow, hangs or fails affects neither the
program nor the run on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from comgra_decl.errors import SelectionError
from comgra_decl.records import AUTOMATIC, ScalarBatch, SlotInfo, StepBatch

from .api import About, Moment, Sink
from .feed import Feed, Metrics, Records
from .graph import graph_of
from .selection import Selection

_log = logging.getLogger("comgra_decl")

WAIT = 20.0
"""Seconds that the end of a run waits for a sink."""

_QUEUE_BYTES = 64 << 20
"""Largest size of what waits for a sink; what does not fit is left out and counted."""

_Committed = tuple[Sequence[StepBatch], Sequence[ScalarBatch]]


class LiveSink:
    """Feed one sink on a thread of its own. No method raises, and only `close` waits.

    Attributes:
        name: name of the tool.
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
    ) -> None:
        """Start the thread.

        Args:
            name: name of the tool, for messages.
            make: creates the sink; called on the thread.
            about: facts about the run.
            selection: what the sink receives.
            slots: slots of a resumed run.
            queue_bytes: largest size of what waits for the sink.
        """
        self.name = name
        self._link: dict[str, str] | None = None
        self._begun = threading.Event()  # or never will
        self._make = make
        self._about = about
        self._selection = selection
        self._earlier = slots
        self._limit = queue_bytes
        self._queue: deque[tuple[_Committed, int]] = deque()
        self._waiting = 0
        self._left_out = 0
        self._state: str | None = None
        self._off = False
        self._started = False  # whether there has been something to send
        self._work = threading.Condition()
        self._own: set[str] = set()  # names of metrics that the program logs
        self._thread = threading.Thread(target=self._run, name=f"comgra-{name}", daemon=True)
        self._thread.start()

    def put(self, batches: Sequence[StepBatch], scalars: Sequence[ScalarBatch]) -> None:
        """Queue what was committed; leaves it out if too much is waiting."""
        size = sum(batch.nbytes for batch in batches) + sum(part.nbytes for part in scalars)
        with self._work:
            if self._off or self._state is not None:
                return
            if self._waiting + size > self._limit and self._queue:
                self._left_out += sum(len(batch.steps) for batch in batches)
                # slots and graphs are announced only once
                batches = [_announced(batch) for batch in batches]
                scalars, size = (), 0
            self._started = True
            self._queue.append(((batches, scalars), size))
            self._waiting += size
            self._work.notify()

    def link_within(self, wait: float) -> dict[str, str] | None:
        """Return where the tool's run is found; None if it has not begun after `wait` seconds."""
        with self._work:
            idle = not self._started
        if not idle:
            self._begun.wait(wait)
        return self._link

    def close(self, state: str, *, wait: float = WAIT) -> None:
        """Send the rest and ends the sink; gives up after `wait` seconds."""
        with self._work:
            self._state = state
            self._work.notify()
        self._thread.join(wait)
        if self._thread.is_alive():
            self._off = True
            _log.warning(
                "comgra: %s did not accept everything within %g s; the rest was not sent",
                self.name,
                wait,
            )
        elif self._left_out and not self._off:
            _log.warning(
                "comgra: %s was too slow: %d records were not sent to it",
                self.name,
                self._left_out,
            )

    # -- on the thread

    def _run(self) -> None:
        try:
            found = self._next()
            if found is None:  # nothing was recorded
                return
            sink = self._make()
            feed = Feed(sink, self._selection, statistics=self._about.statistics)
            sink.begin(self._about)
            self._link = sink.link
            self._begun.set()
            self._see(feed, self._earlier)
            while found is not None:
                self._send(sink, feed, found)
                found = self._next()
            sink.end(self._state or "stopped")
        except BaseException as error:  # noqa: BLE001  (training must not be affected)
            with self._work:
                self._off = True
                self._queue.clear()
            _log.warning(
                "comgra: nothing more is sent to %s (%s: %s); recording and training continue",
                self.name,
                type(error).__name__,
                error,
            )
        finally:
            self._begun.set()

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
            _log.warning("comgra: %s receives only metrics and findings: %s", self.name, error)

    def _send(self, sink: Sink, feed: Feed, committed: _Committed) -> None:
        batches, scalars = committed
        for part in scalars:
            self._send_scalars(feed, part)
        for batch in batches:
            self._see(feed, batch.new_slots)
            for structure in batch.new_structures:
                at = Moment(*_first(batch))
                sink.graph(at, graph_of(structure, feed.slots))
            feed.records(
                Records(
                    [Moment(info.step, info.time) for info in batch.steps],
                    [info.type for info in batch.steps],
                    batch.slots,
                    batch.aggregates,
                    batch.counts,
                    batch.ranges,
                )
            )
            if "findings" in batch.documents:
                feed.findings(batch.documents["findings"], _first(batch)[1])

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


def _announced(batch: StepBatch) -> StepBatch:
    """Return a batch without its records."""
    left = StepBatch.of_documents(batch.documents)
    left.new_slots, left.new_structures = batch.new_slots, batch.new_structures
    left.aggregates = np.empty((0, 0, 0, 0), np.float32)
    return left
