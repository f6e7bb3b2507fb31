"""When the writer thread commits: at once, rarely, and at the ends of record blocks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.store.pace import Backlog, Pace
from tests.store.threads import PATIENCE, FakeWriter, raw, thread_of, until


def test_the_first_record_is_committed_at_once() -> None:
    writer = FakeWriter()
    thread, _ = thread_of(writer, commit_interval=1000)
    thread.put(raw(0))
    until(lambda: writer.commits == [[0]])
    thread.put(raw(1))
    thread.put(raw(2))
    thread.close(PATIENCE)
    assert writer.commits == [[0], [1, 2]], "the second waited for the interval, the end does not"


def test_steps_that_arrive_meanwhile_share_a_commit() -> None:
    writer = FakeWriter()
    thread, _ = thread_of(writer, commit_interval=0.0)
    writer.gate.clear()
    for step in range(50):
        thread.put(raw(step))
        if step == 0:
            until(lambda: not thread._queue)
    writer.gate.set()
    thread.close(PATIENCE)
    assert writer.commits == [[0], list(range(1, 50))]


def test_a_half_full_queue_does_not_wait_for_the_interval() -> None:
    writer = FakeWriter()
    size = raw(0).nbytes
    thread, _ = thread_of(writer, commit_interval=1000, queue_bytes=10 * size)
    for step in range(100):
        thread.put(raw(step))
    until(lambda: writer.records >= 95)
    thread.close(PATIENCE)
    assert writer.records == 100


def test_a_fast_run_ends_its_commits_with_whole_blocks() -> None:
    writer = FakeWriter()
    writer.block_steps = 128
    thread, _ = thread_of(writer, commit_interval=0.0)
    writer.gate.clear()
    thread.put(raw(0))
    until(lambda: not thread._queue)
    for step in range(1, 400):
        thread.put(raw(step))
    writer.gate.set()
    until(lambda: writer.records == 400)
    thread.close(PATIENCE)
    assert [len(commit) for commit in writer.commits] == [1, 383, 16]


def test_under_pressure_steps_are_reduced_before_their_commit_is_due() -> None:
    writer = FakeWriter()
    large = raw(0, size=1000)
    thread, _ = thread_of(writer, commit_interval=1000, queue_bytes=20 * large.nbytes)
    thread.put(raw(0))
    until(lambda: writer.commits == [[0]])
    for step in range(1, 41):
        thread.put(raw(step, size=1000))
    assert writer.commits == [[0]], "reduced they take little room"
    thread.close(PATIENCE)
    assert writer.commits == [[0], list(range(1, 41))]


def test_without_an_interval_no_record_waits_for_its_block() -> None:
    writer = FakeWriter()
    writer.block_steps = 256
    thread, _ = thread_of(writer, commit_interval=0)
    for step in range(5):
        thread.put(raw(step))
        until(lambda expected=step: writer.records == expected + 1)  # type: ignore[misc]
    assert [len(commit) for commit in writer.commits] == [1] * 5
    thread.close(PATIENCE)


# -- the decisions alone, at times that the tests choose
# -------------------------------------------


class Line(NamedTuple):
    """Commits of a run: when, and up to which record."""

    times: list[float]
    records: list[int]


def committed(
    arrivals: Iterable[float], interval: float, *, block: int | None = None, end: float
) -> Line:
    """Returns the commits of a run whose steps arrive at these times."""
    pace = Pace(interval, started=0.0)
    line = Line([], [])
    queued, now = 0, 0.0
    coming = deque(arrivals)
    while True:
        stored = line.records[-1] if line.records else 0
        backlog = Backlog(stored, 0, queued, block)
        due = now + max(0.0, pace.pause(now, backlog))
        arrival = coming[0] if coming else math.inf
        if min(due, arrival) > end:
            return line
        if arrival <= due:
            now, queued = coming.popleft(), queued + 1
            continue
        now, taken = due, pace.share(backlog)
        if not taken:
            pace.postpone(now)
            continue
        queued -= taken
        line.times.append(now)
        line.records.append(stored + taken)
        pace.committed(now)


def test_commits_keep_the_interval() -> None:
    line = committed(np.arange(1, 200) * 0.005, 0.05, end=60)
    assert line.times[0] == 0.005, "the first record does not wait"
    assert np.diff(line.times).min() >= 0.05 - 1e-9
    assert np.diff(line.times).max() < 0.06
    assert line.records[-1] == 199


def test_records_wait_a_little_for_the_rest_of_their_block() -> None:
    line = committed(np.arange(1, 258) * 0.002, 0.02, block=128, end=0.514)
    assert line.records == [1, 128, 256]


def test_records_do_not_wait_for_a_block_that_takes_more_than_three_seconds() -> None:
    arrivals = np.arange(1, 9) * 0.05  # a block would take 6.4 s
    line = committed(arrivals, 0.02, block=128, end=60)
    assert line.records == [*range(1, 9)]
    assert np.subtract(line.times, arrivals).max() < 0.021


def test_a_run_that_stops_within_its_block_commits_all_the_same() -> None:
    line = committed(np.arange(1, 101) * 0.01, 0.05, block=128, end=60)
    assert line.records[-1] == 100
    assert line.times[-1] <= 1.0 + 3.0


@given(
    gaps=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60),
    interval=st.sampled_from([0.0, 0.02, 0.25, 3.0]),
    block=st.sampled_from([None, 1, 8, 128]),
)
def test_every_record_is_committed_soon_and_no_commit_is_too_early(
    gaps: list[float], interval: float, block: int | None
) -> None:
    arrivals = np.cumsum(gaps)
    line = committed(arrivals, interval, block=block, end=1e6)
    assert line.records[-1] == len(gaps)
    assert line.times[0] == arrivals[0], "the first record does not wait"
    assert (np.diff(line.times) >= interval - 1e-9).all()
    waited = [
        line.times[next(i for i, upto in enumerate(line.records) if upto > record)] - arrival
        for record, arrival in enumerate(arrivals)
    ]
    longest = max(interval, min(10.0, 0.005 * line.times[-1])) if interval else 0.0
    # once for the interval, once for the block, and again if the block was complete without it
    assert max(waited) <= 2 * longest + 3.0 + 1e-6


@pytest.mark.parametrize(
    ("age", "interval", "expected"),
    [(0, 0.25, 0.25), (50, 0.25, 0.25), (400, 0.25, 2.0), (1e5, 0.25, 10.0), (1e5, 60, 60)],
)
def test_the_older_a_run_the_rarer_its_commits(
    age: float, interval: float, expected: float
) -> None:
    assert Pace(interval, started=7.0).spacing(7.0 + age) == pytest.approx(expected)


@pytest.mark.parametrize("gap", [0.2, 1.0, 3.0])
def test_the_files_of_a_long_run_grow_with_its_time_and_not_with_its_records(gap: float) -> None:
    """Each commit is a file. 0.2 seconds between records are 100,000 records."""
    line = committed(np.arange(gap, 20_000, gap), 0.5, block=256, end=20_000)
    assert line.records[-1] > 0.99 * 20_000 / gap - 60
    # 0.5 s apart up to 100 s, then 0.5% of the age, and 10 s from 2,000 s on
    assert len(line.times) <= 100 / 0.5 + math.log(2000 / 100) / 0.005 + 18_000 / 10 + 1


def test_without_an_interval_nothing_waits_whatever_the_age() -> None:
    assert Pace(0.0, started=0.0).spacing(1e6) == 0


@pytest.mark.parametrize(("age", "patience"), [(0, 5.0), (400, 5.0), (1000, 10.0), (1e5, 20.0)])
def test_numbers_without_a_record_wait_for_one(age: float, patience: float) -> None:
    pace = Pace(0.25, started=0.0)
    pace.committed(age)
    backlog = Backlog(5, 0, 0, numbers_since=age)
    assert pace.pause(age, backlog) == pytest.approx(max(patience, pace.spacing(age)))
    assert pace.pause(age + patience + 10, backlog) <= 0


def test_nothing_is_due_while_nothing_waits() -> None:
    assert Pace(0.25, started=0.0).pause(1e6, Backlog(0, 0, 0, 128)) == math.inf
