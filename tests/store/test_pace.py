"""When the writer thread commits: at once, rarely, and where blocks of records end."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.store.threads import PATIENCE, FakeWriter, raw, thread_of, until


def test_the_first_record_is_committed_at_once() -> None:
    writer = FakeWriter()
    thread, _ = thread_of(writer, commit_interval=1000)
    thread.put(raw(0))
    until(lambda: writer.commits == [[0]])
    thread.put(raw(1))
    thread.put(raw(2))
    time.sleep(0.05)
    assert writer.commits == [[0]], "the second waits for the interval"
    thread.close(PATIENCE)
    assert writer.commits == [[0], [1, 2]], "the end does not"


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


def test_commits_keep_the_interval() -> None:
    writer = FakeWriter()
    thread, _ = thread_of(writer, commit_interval=0.05)
    for step in range(40):
        thread.put(raw(step))
        time.sleep(0.005)
    thread.close(PATIENCE)
    gaps = np.diff(writer.times[:-1])  # the last one is that of `close`
    assert gaps.min() >= 0.05
    assert [step for commit in writer.commits for step in commit] == list(range(40))


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


def test_records_wait_a_little_for_the_rest_of_their_block() -> None:
    writer = FakeWriter()
    writer.block_steps = 128
    thread, _ = thread_of(writer, commit_interval=0.02)
    for step in range(257):
        thread.put(raw(step))
        time.sleep(0.002)  # a block takes a quarter of a second, much longer than the interval
    until(lambda: writer.records >= 256)
    thread.close(PATIENCE)
    assert len(writer.commits) < 7, "at every interval it would be a dozen or more"


def test_records_of_a_slow_run_do_not_wait_for_their_block() -> None:
    writer = FakeWriter()
    writer.block_steps = 128
    thread, _ = thread_of(writer, commit_interval=0.02)
    for step in range(8):
        thread.put(raw(step))
        time.sleep(0.05)
    assert writer.records >= 6
    thread.close(PATIENCE)


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


@pytest.mark.parametrize(
    ("age", "interval", "expected"),
    [(0, 0.25, 0.25), (50, 0.25, 0.25), (400, 0.25, 2.0), (1e5, 0.25, 10.0), (1e5, 60, 60)],
)
def test_the_older_a_run_the_rarer_its_commits(
    age: float, interval: float, expected: float
) -> None:
    thread, _ = thread_of(FakeWriter(), commit_interval=interval)
    thread.close(PATIENCE)
    assert thread._spacing(thread._started + age) == pytest.approx(expected)


def test_without_an_interval_nothing_waits_whatever_the_age() -> None:
    thread, _ = thread_of(FakeWriter(), commit_interval=0)
    thread.close(PATIENCE)
    assert thread._spacing(thread._started + 1e6) == 0


def test_without_an_interval_no_record_waits_for_its_block() -> None:
    writer = FakeWriter()
    writer.block_steps = 256
    thread, _ = thread_of(writer, commit_interval=0)
    for step in range(5):
        thread.put(raw(step))
        until(lambda expected=step: writer.records == expected + 1)  # type: ignore[misc]
    assert [len(commit) for commit in writer.commits] == [1] * 5
    thread.close(PATIENCE)
