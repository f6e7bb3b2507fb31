"""The writer thread: in order, bounded, prompt, and never in the way of the training."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comgra_decl.errors import StoreError
from comgra_decl.records import Layout, RawStep, Said, SlotInfo, StepBatch, StepInfo
from comgra_decl.store import Reader, RunWriter, WriterThread
from comgra_decl.store.database import TransientStoreError
from tests.store.test_commits import in_fork
from tests.store.truth import meta_of, slot_info

_ZERO = np.zeros(1, np.int64)
LAYOUT = Layout(
    slots=np.zeros(1, np.int32),
    tensors=_ZERO,
    starts=_ZERO,
    samples=_ZERO,
    elements=_ZERO,
    batched=np.zeros(1, bool),
)
PATIENCE = 20.0  # seconds until a test gives up waiting


def raw(step: int, size: int = 100, slots: list[SlotInfo] | None = None) -> RawStep:
    info = StepInfo(step=step, time=float(step), type="train", mode="train")
    return RawStep(info, LAYOUT, np.full((1, size), step, np.float64), slots or [])


def transform(steps: list[RawStep]) -> list[StepBatch]:
    """One slot whose every statistic is the number of the step."""
    count = len(steps)
    numbers = np.array([step.info.step for step in steps], np.float32)
    return [
        StepBatch(
            steps=[step.info for step in steps],
            slots=np.zeros(1, np.int32),
            aggregates=np.broadcast_to(numbers[:, None, None, None], (count, 1, 3, 3)).copy(),
            samples=np.broadcast_to(numbers[:, None, None, None], (count, 1, 2, 3)).copy(),
            counts=np.zeros((count, 1, 4), np.uint32),
            ranges=np.zeros((count, 1, 2), np.float32),
            values=[{}] * count,
            kpis=[{}] * count,
            new_slots=[slot for step in steps for slot in step.new_slots],
            new_structures=[],
        )
    ]


class FakeWriter:
    """Remembers commits; fails or waits when told to."""

    block_steps: int | None = None

    def __init__(self) -> None:
        self.commits: list[list[int]] = []
        self.said: list[Said] = []
        self.times: list[float] = []
        self.closed: list[str | None] = []
        self.failures: Iterator[BaseException] = iter(())
        self.gate = threading.Event()
        self.gate.set()

    @property
    def records(self) -> int:
        return sum(map(len, self.commits))

    def commit(self, batches: list[StepBatch], said: Sequence[Said] = ()) -> None:
        self.said += said
        self.gate.wait(PATIENCE)
        for failure in self.failures:
            raise failure
        self.times.append(time.monotonic())
        self.commits.append([info.step for batch in batches for info in batch.steps])

    def close(self, *, error: str | None = None) -> None:
        self.closed.append(error)


def thread_of(writer: Any, **options: Any) -> tuple[WriterThread, list[BaseException]]:
    errors: list[BaseException] = []
    defaults: dict[str, Any] = {
        "transform": transform,
        "commit_interval": 0.02,
        "queue_bytes": 1 << 20,
        "on_error": errors.append,
    }
    return WriterThread(lambda: writer, **{**defaults, **options}), errors


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def test_everything_put_is_in_the_run_in_order(tmp_path: Path) -> None:
    thread, errors = thread_of(RunWriter.create(tmp_path / "run", meta_of()))
    thread.put(raw(0, slots=[slot_info(0)]))
    for step in range(1, 1000):
        thread.put(raw(step))
    thread.close(PATIENCE)
    reader = Reader(tmp_path / "run")
    assert errors == []
    assert reader.state == "finished"
    assert reader.view.series("agg", 0, 0).tolist() == list(range(1000))
    assert reader.view.series("smp", 0, 0, 0).tolist() == list(range(1000))


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


def test_a_full_queue_blocks_and_nothing_is_lost() -> None:
    writer = FakeWriter()
    size = raw(0).nbytes
    thread, _ = thread_of(writer, commit_interval=0.0, queue_bytes=10 * size)
    writer.gate.clear()
    done = threading.Event()

    def train() -> None:
        for step in range(100):
            thread.put(raw(step))
        done.set()

    training = threading.Thread(target=train)
    training.start()
    assert not done.wait(0.2)
    assert thread._bytes <= 10 * size
    writer.gate.set()
    training.join(PATIENCE)
    thread.close(PATIENCE)
    assert [step for commit in writer.commits for step in commit] == list(range(100))


def test_a_half_full_queue_does_not_wait_for_the_interval() -> None:
    writer = FakeWriter()
    size = raw(0).nbytes
    thread, _ = thread_of(writer, commit_interval=1000, queue_bytes=10 * size)
    for step in range(100):
        thread.put(raw(step))
    until(lambda: writer.records >= 95)
    thread.close(PATIENCE)
    assert writer.records == 100


def test_a_step_larger_than_the_queue_passes() -> None:
    writer = FakeWriter()
    thread, _ = thread_of(writer, queue_bytes=1000)
    for step in range(3):
        thread.put(raw(step, size=10_000))
    thread.close(PATIENCE)
    assert writer.records == 3


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


def test_steps_are_waited_for_once_before_they_are_read() -> None:
    writer = FakeWriter()
    waited: list[int] = []

    def look(steps: list[RawStep]) -> list[StepBatch]:
        assert waited == [step.info.step for step in steps]
        return transform(steps)

    thread, errors = thread_of(writer, transform=look)
    step = raw(0)
    step.wait = lambda: waited.append(0)
    thread.put(step)
    thread.close(PATIENCE)
    assert errors == []
    assert waited == [0]


def test_a_full_disk_is_waited_for_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    writer = FakeWriter()
    writer.failures = iter([TransientStoreError("no space left")] * 2)
    thread, errors = thread_of(writer)
    for step in range(5):
        thread.put(raw(step))
    until(lambda: writer.records >= 1)
    thread.close(PATIENCE)
    assert errors == []
    assert [step for commit in writer.commits for step in commit] == list(range(5))
    assert [record.message for record in caplog.records if "no space left" in record.message] == [
        "comgra: no space left; keeping the data and trying again"
    ]


def test_a_disk_that_stays_full_ends_the_recording_but_not_the_training() -> None:
    writer = FakeWriter()
    writer.failures = iter(lambda: TransientStoreError("no space left"), None)
    thread, errors = thread_of(writer, patience=0.1, queue_bytes=2000)
    for step in range(200):
        thread.put(raw(step))
    until(lambda: bool(errors))
    thread.close(PATIENCE)
    assert [str(error) for error in errors] == ["no space left"]
    assert writer.closed == ["TransientStoreError: no space left"]


def test_a_fatal_error_is_told_once_and_everything_after_it_is_dropped() -> None:
    writer = FakeWriter()
    failure = StoreError("another writer")
    writer.failures = iter([failure])
    thread, errors = thread_of(writer)
    thread.put(raw(0))
    until(lambda: bool(errors))
    for step in range(10_000):  # more than the queue holds: must not block
        thread.put(raw(step, size=1000))
    thread.close(PATIENCE)
    assert errors == [failure]
    assert writer.commits == []


def test_a_fault_in_the_statistics_is_told_too() -> None:
    def broken(_: list[RawStep]) -> list[StepBatch]:
        raise ZeroDivisionError("one step too far")

    writer = FakeWriter()
    thread, errors = thread_of(writer, transform=broken)
    thread.put(raw(0))
    thread.close(PATIENCE)
    assert [str(error) for error in errors] == ["one step too far"]
    assert writer.closed == ["ZeroDivisionError: one step too far"]


def test_a_run_that_cannot_be_created_is_told(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "run", meta_of())
    errors: list[BaseException] = []
    thread = WriterThread(
        lambda: RunWriter.create(tmp_path / "run", meta_of()),
        transform=transform,
        commit_interval=0.0,
        queue_bytes=1000,
        on_error=errors.append,
    )
    for step in range(10):
        thread.put(raw(step))
    thread.close(PATIENCE)
    assert len(errors) == 1
    assert "already holds a run" in str(errors[0])


def test_closing_does_not_wait_for_ever() -> None:
    writer = FakeWriter()
    thread, errors = thread_of(writer)
    writer.gate.clear()
    thread.put(raw(0))
    until(lambda: not thread._queue)
    thread.put(raw(1))
    thread.close(0.05)
    assert "could not be written within 0.05 s" in str(errors[0])
    thread.put(raw(2))
    writer.gate.set()
    thread._thread.join(PATIENCE)
    assert [2] not in writer.commits
    assert len(errors) == 1


def test_closing_twice_is_harmless() -> None:
    writer = FakeWriter()
    thread, errors = thread_of(writer)
    thread.close(PATIENCE)
    thread.close(PATIENCE)
    thread.put(raw(0))
    assert (errors, writer.commits, writer.closed) == ([], [], [None])


def test_a_forked_child_neither_writes_nor_hangs() -> None:
    writer = FakeWriter()
    thread, _ = thread_of(writer, commit_interval=1000)
    thread.put(raw(0))
    until(lambda: writer.records == 1)

    def child() -> None:
        for step in range(1, 100):
            thread.put(raw(step, size=10_000))
        thread.close(PATIENCE)

    with thread._room:  # the child's copy of the lock is held for ever
        assert in_fork(child) == "nothing"
    thread.close(PATIENCE)
    assert writer.commits == [[0]]
    assert os.getpid() == thread._pid


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


def test_a_run_says_what_writing_took_and_how_long_the_training_waited(tmp_path: Path) -> None:
    thread, _ = thread_of(RunWriter.create(tmp_path / "run", meta_of()), queue_bytes=1 << 18)
    thread.put(raw(0, 20_000, slots=[slot_info(0)]))
    for step in range(1, 300):
        thread.put(raw(step, 20_000))
    thread.close(PATIENCE)
    usage = Reader(tmp_path / "run").head["usage"]
    assert usage["cpu"] > 0
    assert usage["share"] == pytest.approx(usage["cpu"] / usage["wall"], rel=0.01)
    assert 0 < usage["waited"] < usage["wall"], "the queue holds two steps"
