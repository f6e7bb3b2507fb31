"""The writer thread, which commits raw steps from a queue whose size in bytes is limited."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from comgra_decl.errors import StoreError
from comgra_decl.records import RawStep, ScalarBatch, StepBatch

from .database import TransientStoreError
from .pace import Backlog, Pace
from .usage import Usage
from .writer import RunWriter

Done = TypeVar("Done")

_log = logging.getLogger("comgra_decl")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0  # seconds between retries while the disk is full
_LOOK = 1.0  # seconds between checks that the thread is alive, while waiting for space


class WriterThread:
    """Commits records in the background, with at most one commit in flight.

    Commits the first record immediately and later ones at least `commit_interval` seconds apart.
    After the first minute of a run, the interval grows to 0.5% of the elapsed time, up to ten
    seconds, because each commit creates a file. A commit is made earlier if half of `queue_bytes`
    is used or a caller waits for space. It is made up to three seconds later if that completes a
    block of records at the current pace, so that the records are not also stored as rows. Logged
    values are stored with the next commit, after at most five seconds, or twenty in runs that last
    hours. While the queue is full, `put` blocks; no data is dropped silently. A commit that fails
    because the disk is full is retried for `patience` seconds. After any other error, which is
    reported once, all later data is dropped, so that training continues.
    """

    def __init__(
        self,
        writer_factory: Callable[[], RunWriter],
        *,
        transform: Callable[[list[RawStep]], list[StepBatch]],
        commit_interval: float,
        queue_bytes: int,
        on_error: Callable[[BaseException], None],
        patience: float = 30.0,
        flush: Callable[[], list[StepBatch]] | None = None,
        last: Callable[[], list[StepBatch]] | None = None,
        committed: Callable[[list[StepBatch], list[ScalarBatch]], None] | None = None,
    ) -> None:
        """Start the thread.

        Args:
            writer_factory: creates or returns the run's writer; called on the thread.
            transform: turns raw steps, in order, into batches; called on the thread.
            commit_interval: minimum seconds between commits; 0: commit each record immediately.
            queue_bytes: maximum number of bytes waiting or being written.
            on_error: called once with the error that ends tracing; called on the thread, unless the
                thread died without reporting the error.
            patience: seconds to wait for space on a full disk.
            flush: needed if `transform` drops or delays steps; called on the thread at the end;
                returns the remaining batches.
            last: called once on the thread; returns batches for the last commit.
            committed: called on the thread with what each commit has stored; must not raise.
        """
        self._factory = writer_factory
        self._transform = transform
        self._limit = queue_bytes
        self._on_error = on_error
        self._patience = patience
        self._flush = flush
        self._last = last
        self._committed = committed
        self._queue: deque[RawStep] = deque()
        self._batches: list[StepBatch] = []  # reduced, for the next commit
        self._ready = 0  # number of steps in `_batches`
        self._waiting_scalars: deque[ScalarBatch] = deque()
        self._scalars: list[ScalarBatch] = []  # settled, for the next commit
        self._scalars_since = 0.0  # arrival time of the first one waiting
        self._bytes = 0  # of waiting, reduced and in-flight data
        self._wanted: list[int] = []  # sizes that callers wait to add
        lock = threading.Lock()
        self._room = threading.Condition(lock)  # wakes callers of `put`
        self._work = threading.Condition(lock)  # wakes the thread; rare: waking takes the GIL
        self._pace = Pace(commit_interval, started=time.monotonic(), in_blocks=flush is None)
        self._closing = False
        self._failed = False
        self._reported_end = False  # the thread has ended and has reported any error
        self._lacks: str | None = None
        self._program_failed = False
        self._writer: RunWriter | None = None
        self._usage = Usage()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="comgra-writer", daemon=True)
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        """The thread; its CPU time is part of the recording cost."""
        return self._thread

    def put(self, raw: RawStep) -> None:
        """Queue one step. Blocks while the queue is full; drops the step after a fatal error."""
        if os.getpid() != self._pid:  # a forked child's copy of the lock may stay locked forever
            return
        self._report_death()
        size = raw.nbytes
        with self._room:
            if not self._has_room(size):
                return
            self._queue.append(raw)
            self._bytes += size
            if len(self._queue) == 1 or self._pressed:
                self._work.notify()

    def put_scalars(self, scalars: ScalarBatch) -> None:
        """Queue logged values, under the same limit as `put`."""
        if os.getpid() != self._pid:
            return
        self._report_death()
        size = scalars.nbytes
        with self._room:
            if not self._has_room(size):
                return
            if not self._waiting_scalars:
                self._scalars_since = time.monotonic()
                self._work.notify()
            self._waiting_scalars.append(scalars)
            self._bytes += size

    def add_scalars(self, scalars: ScalarBatch) -> None:
        """Add values from `transform`. Runs on the thread, which must not wait for space."""
        self._scalars.append(scalars)
        self._release(-scalars.nbytes)

    def close(self, timeout: float | None = None, *, failed: bool = False) -> None:
        """Commit the queue, mark the run as finished and end the thread.

        Args:
            timeout: seconds to wait; data not committed by then is dropped and reported.
            failed: whether an exception has ended the program.
        """
        if os.getpid() != self._pid:
            return
        with self._work:
            self._closing, self._program_failed = True, failed
            self._work.notify()
            self._room.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.fail(StoreError(f"the last records could not be written within {timeout} s."))
        self._report_death()

    def lack(self, error: BaseException) -> None:
        """Record an error that ended the recording; `close` stores it for readers of the run."""
        self._lacks = f"{type(error).__name__}: {error}"

    def fail(self, error: BaseException) -> None:
        """Drop queued data, accept no more, and report the first error. Thread-safe."""
        with self._work:
            first, self._failed = not self._failed, True
            self._queue.clear()
            self._waiting_scalars.clear()
            self._bytes = 0
            self._work.notify()
            self._room.notify_all()
        if first:
            self._on_error(error)

    def _report_death(self) -> None:
        """Report an error if the thread has died without reporting one.

        `_run` reports every error raised inside it, but not errors raised outside it, for example
        by a profiler or debugger that traces all threads.
        """
        if not (self._reported_end or self._thread.is_alive()):
            if self._writer is not None:
                self._writer.release()
            self.fail(StoreError("the writer thread has died"))

    def _has_room(self, size: int) -> bool:
        """Wait, holding the lock, until the queue accepts `size` bytes; False if closed."""
        if not self._fits(size) and not self._ended:
            since = time.monotonic()
            self._wanted.append(size)
            self._work.notify()  # what little is there may wait for its interval otherwise
            try:
                while not self._fits(size) and not self._ended:
                    if not self._room.wait(_LOOK) and not self._thread.is_alive():
                        return False  # the next call reports the error
            finally:
                self._wanted.remove(size)
            self._usage.waited += time.monotonic() - since
        return not self._ended

    def _fits(self, size: int) -> bool:
        """Return whether there is space for `size` bytes; an empty queue takes any size."""
        return not self._bytes or self._bytes + size <= self._limit

    @property
    def _ended(self) -> bool:
        return self._failed or self._closing

    @property
    def _pressed(self) -> bool:
        """Whether a commit is due because half of the queue is used or a caller needs space."""
        if not self._bytes:
            return False
        return 2 * self._bytes >= self._limit or not all(map(self._fits, self._wanted))

    # -- on the thread

    def _run(self) -> None:
        writer: RunWriter | None = None
        try:
            self._usage.start()
            writer = self._writer = self._patiently(self._factory)
            while self._gather(writer):
                self._commit(writer)
            if not self._failed:
                writer.usage = self._usage.document()
                ended = partial(writer.close, error=self._lacks, failed=self._program_failed)
                self._patiently(ended)
        except BaseException as error:  # noqa: BLE001 - training must not be affected
            try:
                self.fail(error)
            finally:
                if not isinstance(error, MemoryError):  # writing needs memory
                    _close_after(writer, error)
        finally:
            if writer is not None:
                writer.release()
            self._reported_end = True
            self._writer = None
            self._batches, self._scalars = [], []  # free memory for training
            self._flush = self._last = None

    def _gather(self, writer: RunWriter) -> bool:
        """Wait until the next commit is due; return False if nothing is left to commit.

        When the queue is nearly full, steps are reduced early, to a fraction of their raw size.
        """
        while True:
            with self._work:
                while not self._ended and not self._pressed:
                    left = self._pause(writer)
                    if left <= 0:
                        break
                    self._work.wait(None if left == math.inf else left)
                if self._failed:
                    return False
                due = self._closing or self._pause(writer) <= 0
                steps = [self._queue.popleft() for _ in range(self._share(writer))]
                # when the queue is nearly full, steps go first, because logged values would end the
                # commit within a block
                scalars = (
                    list(self._waiting_scalars) if due or (self._pressed and not steps) else []
                )
                closing = self._closing
                if scalars:
                    self._waiting_scalars.clear()
            self._reduce(steps)
            self._settle(scalars)
            if closing:
                self._end()
            elif due and not self._batches:  # all dropped or delayed: retry later
                self._pace.postpone(time.monotonic())
            if (due or scalars or self._pressed) and (self._batches or self._scalars):
                return True
            if closing:
                return False

    def _backlog(self, writer: RunWriter) -> Backlog:
        return Backlog(
            committed=writer.records,
            ready=self._ready,
            queued=len(self._queue),
            block=writer.block_steps,
            numbers_since=self._scalars_since if self._waiting_scalars else None,
        )

    def _pause(self, writer: RunWriter) -> float:
        """Return the seconds until the next commit is due; 0 or less if due now."""
        return self._pace.pause(time.monotonic(), self._backlog(writer))

    def _share(self, writer: RunWriter) -> int:
        """Return how many of the queued steps to take now."""
        return len(self._queue) if self._closing else self._pace.share(self._backlog(writer))

    def _reduce(self, steps: list[RawStep]) -> None:
        """Turn raw steps into batches, which take less memory."""
        if not steps:
            return
        raw = sum(step.nbytes for step in steps)
        for step in steps:
            if step.wait is not None:
                step.wait()
                step.wait = None
        batches = self._transform(steps)
        self._batches += batches
        self._ready += sum(len(batch.steps) for batch in batches)
        self._release(raw - sum(batch.nbytes for batch in batches))

    def _end(self) -> None:
        """Collect the delayed and final batches; do nothing when called again."""
        flush, self._flush = self._flush, None
        last, self._last = self._last, None
        held_back = flush() if flush is not None else []
        for batch in [*held_back, *(last() if last is not None else [])]:
            self._batches.append(batch)
            self._ready += len(batch.steps)
            self._release(-batch.nbytes)

    def _settle(self, scalars: list[ScalarBatch]) -> None:
        for part in scalars:
            if part.settle is not None:
                part.settle()
                part.settle = None
        self._scalars += scalars

    def _commit(self, writer: RunWriter) -> None:
        batches, scalars = self._batches, self._scalars
        writer.usage = self._usage.document()
        self._patiently(lambda: writer.commit(batches, scalars))
        if self._committed is not None:
            self._committed(batches, scalars)
        self._batches, self._ready, self._scalars = [], 0, []
        self._pace.committed(time.monotonic())
        self._release(sum(b.nbytes for b in batches) + sum(part.nbytes for part in scalars))
        self._merge_files(writer)

    def _merge_files(self, writer: RunWriter) -> None:
        """Merge files of earlier commits until the next commit is due."""
        while not self._ended:
            with self._work:
                if (self._pressed or self._pause(writer) <= 0) and not writer.crowded:
                    return
            if not writer.merge_files():
                return

    def _release(self, size: int) -> None:
        """Free queue space and wake callers of `put`."""
        with self._room:
            self._bytes = max(0, self._bytes - size)
            self._room.notify_all()

    def _patiently(self, action: Callable[[], Done]) -> Done:
        """Retry an action that fails on a full disk; warn once.

        `patience` is counted from the end of the first attempt, because an unreachable store can
        delay that attempt for much longer.
        """
        give_up = math.inf
        pause = _FIRST_PAUSE
        while True:
            try:
                return action()
            except TransientStoreError as error:
                if time.monotonic() > give_up or self._failed:
                    raise
                if pause == _FIRST_PAUSE:
                    give_up = time.monotonic() + self._patience
                    _log.warning("comgra: %s; keeping the data and trying again", error)
            with self._work:
                self._work.wait_for(lambda: self._failed, pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _close_after(writer: RunWriter | None, error: BaseException) -> None:
    """Record the error in the run if it is still writable."""
    if writer is None:
        return
    try:
        writer.close(error=f"{type(error).__name__}: {error}")
    except Exception as second:  # noqa: BLE001 - it is already being reported
        _log.debug("comgra: could not mark the run as stopped: %s", second)
