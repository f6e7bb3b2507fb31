"""The writer thread: keeps the order, has bounded memory, and never blocks training."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.errors import StoreError
from comgra_decl.records import RawStep, ScalarBatch, StepBatch
from comgra_decl.store import Reader, RunWriter, WriterThread
from comgra_decl.store.commit import Commit
from comgra_decl.store.database import TransientStoreError
from tests.store.test_commits import in_fork
from tests.store.threads import PATIENCE, FakeWriter, raw, thread_of, transform, until
from tests.store.truth import meta_of, slot_info


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


def test_a_step_larger_than_the_queue_passes() -> None:
    writer = FakeWriter()
    thread, _ = thread_of(writer, queue_bytes=1000)
    for step in range(3):
        thread.put(raw(step, size=10_000))
    thread.close(PATIENCE)
    assert writer.records == 3


@given(st.lists(st.sampled_from(["metric", 10, 40, 60, 300]), min_size=1, max_size=12))
def test_nobody_waits_for_space_while_the_writer_waits_for_its_interval(
    puts: list[str | int],
) -> None:
    """A record may take most of the queue, all of it or more; metrics may be in its way."""
    writer = FakeWriter()
    limit = (
        100 * 800 + 3000
    )  # 100 rows of the raw sums that `raw` creates, and what comes with them
    thread, errors = thread_of(writer, commit_interval=1000, queue_bytes=limit)

    def train() -> None:
        for step, what in enumerate(puts):
            if isinstance(what, int):
                thread.put(raw(step, size=100 * what))
            else:
                one = np.full(1, step, np.int64)
                thread.put_scalars(ScalarBatch(one, one.astype(np.float64), ["loss"], ["train"]))

    training = threading.Thread(target=train, daemon=True)
    training.start()
    training.join(PATIENCE)
    waits = training.is_alive()
    thread.close(PATIENCE)
    assert not waits
    assert errors == []
    steps = [step for commit in writer.commits for step in commit]
    assert steps == [step for step, what in enumerate(puts) if what != "metric"]
    assert sum(len(part.names) for part in writer.scalars) == puts.count("metric")
    assert thread._bytes == 0


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


def test_a_store_out_of_reach_is_tried_again_however_long_the_first_attempt_took() -> None:
    writer = FakeWriter()
    writer.failures = iter([TransientStoreError("timed out")])
    thread, errors = thread_of(writer, patience=0)
    thread.put(raw(0))
    thread.close(PATIENCE)
    assert errors == []
    assert writer.commits == [[0]]


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


def full(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """Fails the first commits to any database, like a full disk; returns what failed."""
    finish = Commit.finish
    refused: list[str] = []

    def refuse(commit: Commit) -> None:
        if len(refused) < times:
            refused.append("commit")
            raise ValueError("RESOURCE_EXHAUSTED: no space left")
        finish(commit)

    monkeypatch.setattr(Commit, "finish", refuse)
    return refused


@pytest.mark.parametrize(("times", "patience"), [(2, PATIENCE), (10**9, 0.1)])
def test_a_disk_that_is_full_when_a_run_is_created_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, patience: float
) -> None:
    refused = full(monkeypatch, times)
    errors: list[BaseException] = []
    thread = WriterThread(
        lambda: RunWriter.create(tmp_path / "run", meta_of()),
        transform=transform,
        commit_interval=0.0,
        queue_bytes=1000,
        on_error=errors.append,
        patience=patience,
    )
    for step in range(5):
        thread.put(raw(step, slots=[slot_info(0)] if step == 0 else None))
    thread.close(PATIENCE)
    if times == 2:
        assert (errors, len(refused)) == ([], 2)
        assert Reader(tmp_path / "run").view.n == 5
    else:
        assert "no space left" in str(errors[0])
        assert not (tmp_path / "run").exists(), "an empty run stays"


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
    assert "already contains a run" in str(errors[0])


def test_a_thread_that_dies_without_a_word_holds_up_nobody_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dies = threading.Event()
    monkeypatch.setattr(WriterThread, "_run", lambda _: dies.wait(PATIENCE))
    thread, errors = thread_of(FakeWriter(), queue_bytes=raw(0).nbytes)
    thread.put(raw(0))
    training = threading.Thread(target=thread.put, args=[raw(1)])
    training.start()  # waits for space
    dies.set()
    training.join(PATIENCE)
    assert not training.is_alive()
    thread.put(raw(2))
    thread.put(raw(3))
    thread.close(PATIENCE)
    assert [str(error) for error in errors] == ["the writer thread has died"]


def test_a_thread_that_died_after_the_last_step_is_told_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WriterThread, "_run", lambda _: None)
    thread, errors = thread_of(FakeWriter())
    thread.close(PATIENCE)
    assert [str(error) for error in errors] == ["the writer thread has died"]


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

    with thread._room:  # the child's copy of the lock is held forever
        assert in_fork(child) == "nothing"
    thread.close(PATIENCE)
    assert writer.commits == [[0]]
    assert os.getpid() == thread._pid


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
