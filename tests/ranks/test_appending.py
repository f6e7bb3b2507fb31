"""A run written by several programs one after another reads as if one had written it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comgra_decl.errors import StoreError
from comgra_decl.records import RESUMED, Note, ScalarBatch
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.appending import append_to, discard_unused, last_step
from comgra_decl.store.sessions import superseded
from tests.store.truth import Truth, meta_of


def said(steps: list[int], *, resumed: int | None = None) -> ScalarBatch:
    notes = [] if resumed is None else [Note(resumed, RESUMED, 1.0, "goes on")]
    values = np.arange(len(steps), dtype=np.float64)
    names, types = ["loss"] * len(steps), ["train"] * len(steps)
    return ScalarBatch(np.array(steps, np.int64), values, names, types, notes)


sizes = st.lists(st.integers(1, 300), min_size=0, max_size=2)  # a block has 256 records


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(sizes, min_size=2, max_size=4), st.integers(1, 40))
def test_whatever_was_committed_before_is_bit_for_bit_there(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[list[int]], slots: int
) -> None:
    """Across blocks of records and scalars, new slots, new names and kept values."""
    run, truth = tmp_path_factory.mktemp("append") / "run", Truth()
    numbers = 0
    for number, commits in enumerate(sessions):
        if number == 0:
            writer = RunWriter.create(run, truth.meta)
        else:
            writer, past = append_to(run, meta_of())
            assert [slot.id for slot in past.slots] == sorted(truth.announced)
        for size in commits:
            values: dict[int, Any] = {0: np.ones((2, 1 + number), np.float32), 1: np.ones(2)}
            batch = truth.batch(size, range(slots + number), values=values, kpis=(f"k{number}",))
            writer.commit([batch], [said(list(range(size)))])
            truth.keep([batch])
            numbers += size
        writer.close()
        reader = Reader(run)
        truth.check(reader.view)
        assert len(reader.view.scalars) == numbers
        assert len(reader.head.get("sessions", [])) == number


def test_a_run_without_records_can_be_gone_on_with(tmp_path: Path) -> None:
    truth = Truth()
    RunWriter.create(tmp_path / "run", truth.meta).close()
    writer, past = append_to(tmp_path / "run", meta_of())
    assert (past.slots, past.step) == ([], None)
    batch = truth.batch(3, range(2))
    writer.commit([batch])
    truth.keep([batch])
    truth.check(Reader(tmp_path / "run").view)


def test_a_run_that_is_being_written_is_refused(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", meta_of())
    with pytest.raises(StoreError, match=f"still being written, by process {os.getpid()} on"):
        append_to(tmp_path / "run", meta_of())
    writer.close()
    append_to(tmp_path / "run", meta_of())
    with pytest.raises(StoreError, match="a run can have only one writer"):
        append_to(tmp_path / "run", meta_of())


WRITER = """
import sys, time
from comgra_decl.store import RunWriter
from comgra_decl.store.appending import append_to
from tests.store.truth import Truth, meta_of

truth = Truth()
if sys.argv[2] == "create":
    writer = RunWriter.create(sys.argv[1], truth.meta)
else:
    writer, past = append_to(sys.argv[1], truth.meta)
    truth.announced = {slot.id for slot in past.slots}
writer.commit([truth.batch(5, range(3))])
print("written", flush=True)
time.sleep(60)
"""


def another_process(run: Path, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run), how], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_the_writer_that_counts_is_the_newest_not_the_one_that_began(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = another_process(run, "create")
    with pytest.raises(StoreError, match=f"by process {first.pid} on"):
        append_to(run, meta_of())
    kill(first)
    assert Reader(run).state == "stopped"
    second = another_process(run, "append")
    assert Reader(run).state == "live"
    with pytest.raises(StoreError, match=f"by process {second.pid} on"):
        append_to(run, meta_of())
    kill(second)
    assert Reader(run).state == "stopped"
    writer, past = append_to(run, meta_of())
    assert writer.records == 10
    assert len(past.slots) == 3


def test_a_silent_writer_elsewhere_is_given_time(tmp_path: Path) -> None:
    """Only another machine's last commit is known; if its writer lives, its next commit fails."""
    writer = RunWriter.create(tmp_path / "run", meta_of())
    writer._head["writer"] = {"pid": 1, "machine": "elsewhere", "host": "far"}
    truth = Truth()
    writer.commit([truth.batch(1, [0])])
    with pytest.raises(StoreError, match="by process 1 on 'far'"):
        append_to(tmp_path / "run", meta_of())
    real = time.time
    time.time = lambda: real() + 301
    try:
        append_to(tmp_path / "run", meta_of())
    finally:
        time.time = real
    with pytest.raises(StoreError, match="another writer has changed this run"):
        writer.commit([truth.batch(1, [0])])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"statistics": ("mean", "nonfinite")}, "stats was"),
        ({"sample_count": 5}, "samples.count was 2 and is now 5"),
        ({"bins": None}, "histogram.bins was 4 and is now None"),
        ({"spec": {"histogram": {"elements": 1 << 20}}}, "histogram.elements was 'uint16'"),
    ],
)
def test_another_form_of_what_is_stored_is_refused(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    RunWriter.create(tmp_path / "run", meta_of()).close()
    with pytest.raises(StoreError, match=told):
        append_to(tmp_path / "run", meta_of(**change))
    assert Reader(tmp_path / "run").head["closed"]


def test_the_last_step_is_that_of_records_and_numbers(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    assert last_step(Reader(tmp_path / "run")) is None
    writer.commit([truth.batch(3, [0])])
    recorded = last_step(Reader(tmp_path / "run"))
    assert recorded == Reader(tmp_path / "run").head["step"]
    writer.commit([], [said([1000, 1001])])
    assert last_step(Reader(tmp_path / "run")) == 1001


def test_only_an_unused_run_of_ours_is_taken_away(tmp_path: Path) -> None:
    meta, truth = meta_of(), Truth()
    writer = RunWriter.create(tmp_path / "run", meta)
    discard_unused(tmp_path / "run", "another")
    assert Reader(tmp_path / "run").head["n"] == 0
    writer.commit([truth.batch(1, [0])])
    writer.close()
    discard_unused(tmp_path / "run", meta.uuid)
    assert Reader(tmp_path / "run").head["n"] == 1
    empty = meta_of()
    RunWriter.create(tmp_path / "other", empty).close()
    discard_unused(tmp_path / "other", empty.uuid)
    assert not (tmp_path / "other").exists()


def _brute(
    steps: list[int], trained: list[bool], begins: list[tuple[int, int | None]]
) -> list[bool]:
    """The rule, line by line."""
    gone = []
    for line, (step, train) in enumerate(zip(steps, trained, strict=True)):
        lost = False
        for first, began in begins:
            if began is None or line >= first:
                continue
            again = any(
                steps[later] == began and not trained[later] for later in range(first, len(steps))
            )
            lost = lost or step > began or (step == began and (train or again))
        gone.append(lost)
    return gone


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=15),
    st.lists(st.tuples(st.integers(0, 15), st.one_of(st.none(), st.integers(0, 6))), max_size=3),
)
def test_the_newest_session_wins(
    lines: list[tuple[int, bool]], begins: list[tuple[int, int | None]]
) -> None:
    steps, trained = [line[0] for line in lines], [line[1] for line in lines]
    found = superseded(np.array(steps, np.float64), np.array(trained, bool), begins)
    assert found.tolist() == _brute(steps, trained, begins)
