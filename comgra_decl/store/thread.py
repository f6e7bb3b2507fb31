"""The writer thread: takes raw steps from the training, bounded by bytes, and commits them."""

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
from comgra_decl.records import RawStep, Said, StepBatch

from .database import TransientStoreError
from .usage import Usage
from .writer import RunWriter

Done = TypeVar("Done")

_log = logging.getLogger("comgra_decl")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0  # seconds between attempts while the disk is full
_SAID_PATIENCE = 5.0  # seconds for which what was said of steps waits for a record to go with,
_SAID_SHARE, _SAID_LONGEST = 0.01, 20.0  # more in old runs: a commit of its own takes 4 kB
_BLOCK_PATIENCE = 3.0  # most seconds that records wait for the rest of their block
_STRETCH, _LONGEST_INTERVAL = 0.005, 10.0  # share of a run's age between its commits: few files
_LOOK = 1.0  # seconds between looks, while waiting for room, whether the thread still lives


class WriterThread:
    """Commits records in the background, at most one commit in flight.

    The first record is committed at once, later ones at least `commit_interval` seconds apart; in
    a run older than a minute the interval grows to 0.5 % of its age, at most ten seconds, because
    each commit makes a file. Earlier when half of `queue_bytes` is taken, up to three seconds later
    when at the present pace a block of records will be whole by then: it need not be stored as
    rows as well. What was said of
    steps goes along, after five seconds at the latest (twenty in a run of hours). While the queue
    is full, `put` blocks: nothing is lost silently. A commit that fails because the disk is full is
    repeated for `patience` seconds; any other error is reported once, and from then on everything
    is dropped, so that the training goes on.
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
    ) -> None:
        """Starts the thread.

        Args:
            writer_factory: makes (or hands over) the run's writer; called on the thread.
            transform: turns raw steps, in order, into batches; called on the thread.
            commit_interval: least seconds between commits; 0: commit whatever there is, always.
            queue_bytes: most bytes waiting or being written.
            on_error: told of the error that ends the tracing, once; on the thread, unless that has
                died unheard.
            patience: seconds for which a full disk is waited for.
            flush: given where `transform` drops steps or holds them back; returns, on the thread,
                what is left of those when no more come.
            last: asked once, on the thread, for what goes into the last commit.
        """
        self._factory = writer_factory
        self._transform = transform
        self._interval = commit_interval
        self._limit = queue_bytes
        self._on_error = on_error
        self._patience = patience
        self._flush = flush
        self._last = last
        self._queue: deque[RawStep] = deque()
        self._batches: list[StepBatch] = []  # reduced, for the next commit
        self._ready = 0  # steps in them
        self._waiting_said: deque[Said] = deque()
        self._said: list[Said] = []  # settled, for the next commit
        self._said_since = 0.0  # when the first of those waiting came
        self._bytes = 0  # waiting, reduced and in flight
        lock = threading.Lock()
        self._room = threading.Condition(lock)  # for those who put
        self._work = threading.Condition(lock)  # for the thread: woken rarely, it costs the GIL
        self._due = 0.0
        self._started = time.monotonic()
        self._since = 0.0  # end of the last commit
        self._closing = False
        self._failed = False
        self._told_end = False  # the thread has ended, and all that there is to say is said
        self._lacks: str | None = None
        self._usage = Usage()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="comgra-writer", daemon=True)
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        """The thread itself, whose processor time is part of what recording costs."""
        return self._thread

    def put(self, raw: RawStep) -> None:
        """Hands over one step; blocks while the queue is full, drops it after a fatal error."""
        if os.getpid() != self._pid:  # a forked child: its copy of the lock may be held for ever
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

    def put_said(self, said: Said) -> None:
        """Hands over what was said of steps, under the same limit as `put`."""
        if os.getpid() != self._pid:
            return
        self._report_death()
        size = said.nbytes
        with self._room:
            if not self._has_room(size):
                return
            if not self._waiting_said:
                self._said_since = time.monotonic()
                self._work.notify()
            self._waiting_said.append(said)
            self._bytes += size

    def say(self, said: Said) -> None:
        """Adds what `transform` itself has to say; on the thread, which must not wait for room."""
        self._said.append(said)
        self._release(-said.nbytes)

    def close(self, timeout: float | None = None) -> None:
        """Commits what is waiting, marks the run as finished and ends the thread.

        Args:
            timeout: seconds to wait; what is not committed by then is given up and reported.
        """
        if os.getpid() != self._pid:
            return
        with self._work:
            self._closing = True
            self._work.notify()
            self._room.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.fail(StoreError(f"the last records could not be written within {timeout} s."))
        self._report_death()

    def lack(self, error: BaseException) -> None:
        """Takes note that nothing more comes because of an error, for those who read the run."""
        self._lacks = f"{type(error).__name__}: {error}"

    def fail(self, error: BaseException) -> None:
        """Drops what waits, takes nothing more, and reports the first error; from any thread."""
        with self._work:
            first, self._failed = not self._failed, True
            self._queue.clear()
            self._waiting_said.clear()
            self._bytes = 0
            self._work.notify()
            self._room.notify_all()
        if first:
            self._on_error(error)

    def _report_death(self) -> None:
        """Fails if the thread has died without a word: nothing would be written any more.

        It answers for whatever is raised below `_run`. What it cannot catch is raised around
        that: by a profiler or debugger that follows all threads, say.
        """
        if not (self._told_end or self._thread.is_alive()):
            self.fail(StoreError("the thread that writes has died"))

    def _has_room(self, size: int) -> bool:
        """Waits, with the lock held, until the queue takes `size` bytes; False: it is over."""
        if self._bytes and self._bytes + size > self._limit and not self._ended:
            since = time.monotonic()
            while self._bytes and self._bytes + size > self._limit and not self._ended:
                if not self._room.wait(_LOOK) and not self._thread.is_alive():
                    return False  # the next call reports it
            self._usage.waited += time.monotonic() - since
        return not self._ended

    @property
    def _ended(self) -> bool:
        return self._failed or self._closing

    @property
    def _pressed(self) -> bool:
        """Half of the queue is taken: make room now, so that the training need not wait."""
        return self._bytes > 0 and 2 * self._bytes >= self._limit

    # -- on the thread

    def _run(self) -> None:
        writer: RunWriter | None = None
        try:
            self._usage.start()
            writer = self._patiently(self._factory)
            while self._gather(writer):
                self._commit(writer)
            if not self._failed:
                writer.usage = self._usage.document()
                ended = partial(writer.close, error=self._lacks)
                self._patiently(ended)
        except BaseException as error:  # noqa: BLE001 - the training must never notice
            try:
                self.fail(error)
            finally:
                if not isinstance(error, MemoryError):  # writing takes some
                    _close_after(writer, error)
        finally:
            self._told_end = True
            self._batches, self._said = [], []  # the training may need their memory
            self._flush = self._last = None

    def _gather(self, writer: RunWriter) -> bool:
        """Waits until the next commit is due; False when nothing is left to commit.

        Under pressure the steps are reduced meanwhile, to a fraction of their raw size.
        """
        while True:
            with self._work:
                while not self._ended and not self._pressed:
                    left = self._pause(writer, time.monotonic())
                    if left <= 0:
                        break
                    self._work.wait(None if left == math.inf else left)
                if self._failed:
                    return False
                due = self._closing or self._pause(writer, time.monotonic()) <= 0
                steps = [self._queue.popleft() for _ in range(self._share(writer))]
                # under pressure steps go first: numbers would end the commit within a block
                said = list(self._waiting_said) if due or (self._pressed and not steps) else []
                closing = self._closing
                if said:
                    self._waiting_said.clear()
            self._reduce(steps)
            self._settle(said)
            if closing:
                self._end()
            elif due and not self._batches:  # all dropped or held back: look again in a while
                now = time.monotonic()
                self._due = now + self._spacing(now)
            if (due or said or self._pressed) and (self._batches or self._said):
                return True
            if closing:
                return False

    def _pause(self, writer: RunWriter, now: float) -> float:
        """How many seconds the next commit can wait; 0 or less: it is due."""
        said = math.inf
        if self._waiting_said:
            patience = min(_SAID_LONGEST, _SAID_SHARE * (now - self._started))
            said = max(self._due, self._said_since + max(_SAID_PATIENCE, patience)) - now
        return min(said, self._pause_of_records(writer, now))

    def _spacing(self, now: float) -> float:
        """How many seconds to leave between two commits of a run of this age."""
        if not self._interval:
            return 0.0
        return max(self._interval, min(_LONGEST_INTERVAL, _STRETCH * (now - self._started)))

    def _pause_of_records(self, writer: RunWriter, now: float) -> float:
        waiting = self._ready + len(self._queue)
        if not waiting:
            return math.inf
        block, waited = writer.block_steps, now - self._since
        if now < self._due or not self._interval or self._flush is not None:
            return self._due - now
        if block is None or waiting >= block:
            return self._due - now
        missing = -(writer.records + waiting) % block
        rest = missing * waited / waiting
        return rest if waited + rest <= _BLOCK_PATIENCE else 0.0

    def _share(self, writer: RunWriter) -> int:
        """How many of the waiting steps to take now.

        A fast run fills whole blocks between two commits. Ending the commit at a block's end
        saves storing the rest twice (as rows now, in a block later); it waits for the next one.
        """
        queued, block = len(self._queue), writer.block_steps
        waiting = self._ready + queued
        if self._closing or block is None or waiting < block or self._flush is not None:
            return queued
        return max(0, (writer.records + waiting) // block * block - writer.records - self._ready)

    def _reduce(self, steps: list[RawStep]) -> None:
        """Turns raw steps into batches, which take less room."""
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
        """Asks once for what is still held back."""
        flush, self._flush = self._flush, None
        last, self._last = self._last, None
        held_back = flush() if flush is not None else []
        for batch in [*held_back, *(last() if last is not None else [])]:
            self._batches.append(batch)
            self._ready += len(batch.steps)
            self._release(-batch.nbytes)

    def _settle(self, said: list[Said]) -> None:
        for part in said:
            if part.settle is not None:
                part.settle()
                part.settle = None
        self._said += said

    def _commit(self, writer: RunWriter) -> None:
        batches, said = self._batches, self._said
        writer.usage = self._usage.document()
        self._patiently(lambda: writer.commit(batches, said))
        self._batches, self._ready, self._said = [], 0, []
        self._since = time.monotonic()
        self._due = self._since + self._spacing(self._since)
        self._release(sum(b.nbytes for b in batches) + sum(part.nbytes for part in said))

    def _release(self, size: int) -> None:
        """Makes room for those who put."""
        with self._room:
            self._bytes = max(0, self._bytes - size)
            self._room.notify_all()

    def _patiently(self, action: Callable[[], Done]) -> Done:
        """Repeats a commit, or the creation of a run, that a full disk refuses; says so once.

        Patience begins where the first attempt ends: a store out of reach may hold that up longer.
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
    """Leaves word in the run, if it can still be written."""
    if writer is None:
        return
    try:
        writer.close(error=f"{type(error).__name__}: {error}")
    except Exception as second:  # noqa: BLE001 - it is already being reported
        _log.debug("comgra: could not mark the run as stopped: %s", second)
