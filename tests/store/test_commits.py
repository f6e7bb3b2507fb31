"""A commit is one version of the database, and belongs to one writer."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from comgra_decl.errors import RunGoneError, StoreError
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.commit import Commit
from comgra_decl.store.database import Database, TransientStoreError, new_context
from tests.store.truth import Truth, meta_of


def generation(run: Path) -> int:
    """Returns the number of the newest version, from the manifest itself."""
    base = ts.KvStore.open({"driver": "file", "path": f"{run}/trace.ocdbt/"}).result()
    manifest: Any = ts.ocdbt.dump(base).result()
    return int(manifest["versions"][-1]["generation_number"])


def folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_every_commit_is_exactly_one_version(tmp_path: Path) -> None:
    run = tmp_path / "run"
    truth = Truth()
    writer = RunWriter.create(run, truth.meta)
    before = generation(run)
    for size, slots in ((1, 3), (127, 3), (300, 3), (2, 80), (1, 80)):
        values = {0: np.ones((2, size)), 1: np.ones((2, 1 << 18))}
        documents = {"report": {"size": size}}
        writer.commit([truth.batch(size, range(slots), values=values, documents=documents)])
        assert generation(run) == before + 1
        before += 1
    writer.close()
    assert generation(run) == before + 1


def test_an_empty_commit_writes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    writer = RunWriter.create(run, meta_of())
    before = generation(run)
    writer.commit([])
    writer.commit([Truth().batch(0, [])])
    assert generation(run) == before


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    batch = truth.batch(1, [0])
    writer.commit([batch])
    truth.keep([batch])
    with pytest.raises(StoreError, match=r"already contains a run.*run\.name"):
        RunWriter.create(tmp_path / "run", meta_of())
    truth.check(Reader(tmp_path / "run").view)


def test_a_second_writer_is_fenced_off(tmp_path: Path) -> None:
    truth = Truth()
    run = tmp_path / "run"
    first = RunWriter.create(run, truth.meta)
    second = RunWriter(first._db, truth.meta)  # as if another program had resumed it
    second._head, second._head_bytes = first._head, first._head_bytes
    batch = truth.batch(1, [0])
    first.commit([batch])
    truth.keep([batch])
    with pytest.raises(StoreError, match="another writer"):
        second.commit([batch])
    truth.check(Reader(run).view)


def test_a_foreign_commit_in_the_middle_of_ones_own_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = Truth()
    run = tmp_path / "run"
    first = RunWriter.create(run, truth.meta)
    second = RunWriter(Database(run, new_context(cache_bytes=0)), truth.meta)
    second._head, second._head_bytes = first._head, first._head_bytes
    batch = truth.batch(1, [0])
    begin = second._begin

    def interrupted() -> Commit:
        commit = begin()
        first.commit([batch])
        return commit

    monkeypatch.setattr(second, "_begin", interrupted)
    with pytest.raises(TransientStoreError, match="ABORTED"):
        second.close()
    monkeypatch.undo()
    with pytest.raises(StoreError, match="another writer"):
        second.close()
    truth.keep([batch])
    truth.check(Reader(run).view)


def test_a_failed_commit_leaves_no_trace_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    truth = Truth()
    writer = RunWriter.create(run, truth.meta)
    finish = writer._finish

    def full(*_: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    for size in (3, 200, 1):  # the first one creates the arrays, the second fills a block
        values = {size % 3: np.full((2, 7), size), 4: np.full((2, size), size)}
        batch = truth.batch(size, range(size % 5 + 1), values=values, kpis=[f"kpi {size}"])
        monkeypatch.setattr(writer, "_finish", full)
        for _ in range(2):
            with pytest.raises(TransientStoreError, match="No space left"):
                writer.commit([batch])
        assert Reader(run).view.n == len(truth.infos)
        monkeypatch.setattr(writer, "_finish", finish)
        writer.commit([batch])
        truth.keep([batch])
        truth.check(Reader(run).view)


def test_a_closed_run_is_finished_and_takes_no_more(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    writer.commit([truth.batch(1, [0])])
    reader = Reader(tmp_path / "run")
    assert reader.state == "live"
    writer.close()
    writer.close()
    assert reader.poll()
    assert reader.state == "finished"
    with pytest.raises(StoreError, match="closed"):
        writer.commit([truth.batch(1, [0])])


def test_a_run_that_gave_up_says_why(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", meta_of())
    writer.close(error="it rained")
    reader = Reader(tmp_path / "run")
    assert reader.state == "stopped"
    assert reader.head["error"] == "it rained"


def test_slot_ids_must_be_dense(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    batch = truth.batch(1, [0, 1, 2])
    del batch.new_slots[1]
    with pytest.raises(AssertionError, match="dense"):
        writer.commit([batch])


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot create the run's folder"):
        RunWriter.create(tmp_path / "file" / "run", meta_of())


@pytest.mark.slow
def test_a_folder_removed_while_it_is_written_is_told(tmp_path: Path) -> None:
    """At any moment: between two commits, within one, within the first."""
    for i in range(40):
        run, truth = tmp_path / f"run{i}", Truth()
        run.mkdir()
        ended = threading.Event()

        def remove(run: Path = run, ended: threading.Event = ended, beats: int = i) -> None:
            for _ in range(beats * 200):  # so that each happens at another moment
                run.exists()
            while not ended.is_set():  # along with what a commit in progress has created
                shutil.rmtree(run, ignore_errors=True)

        thread = threading.Thread(target=remove)
        thread.start()
        try:
            with pytest.raises(StoreError, match="was removed, moved or unmounted"):
                _write_on(run, truth)
        finally:
            ended.set()
            thread.join()


def test_a_folder_removed_while_it_is_created_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mkdir` finds a folder and asks whether it is one; in between, it may be removed."""

    def exists(path: Path, **_: Any) -> None:
        raise FileExistsError(17, "File exists", str(path))

    monkeypatch.setattr(Path, "mkdir", exists)
    with pytest.raises(RunGoneError, match="was removed, moved or unmounted"):
        RunWriter.create(tmp_path / "run", Truth().meta)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot create the run's folder"):
        RunWriter.create(tmp_path / "file", Truth().meta)


def _write_on(run: Path, truth: Truth) -> None:
    writer: RunWriter | None = None
    while True:
        try:
            writer = writer or RunWriter.create(run, truth.meta)
            writer.commit([truth.batch(1, [0])])
        except TransientStoreError:
            continue  # as the writer of a run retries


@pytest.mark.slow
def test_a_run_grows_in_proportion_to_its_records(tmp_path: Path) -> None:
    sizes = []
    meta = meta_of(bins=64, sample_count=8)
    for commits in (130, 260):  # of four records: one block, two blocks
        run = tmp_path / str(commits)
        truth = Truth(meta=meta)
        writer = RunWriter.create(run, truth.meta)
        for _ in range(commits):
            writer.commit([truth.batch(4, range(20))])
        sizes.append(folder_size(run))
    assert sizes[1] < 2.2 * sizes[0]


def test_a_forked_child_cannot_write_and_leaves_the_parents_run_alone(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    batch = truth.batch(1, [0])
    writer.commit([batch])
    truth.keep([batch])
    assert in_fork(lambda: writer.commit([batch])) == "StoreError"
    assert in_fork(writer.close) == "nothing"
    assert in_fork(lambda: Reader(tmp_path / "run")) == "StoreError"
    batch = truth.batch(1, [0])
    writer.commit([batch])
    truth.keep([batch])
    truth.check(Reader(tmp_path / "run").view)


def in_fork(action: Any) -> str:
    """Runs an action in a forked child; returns the name of the error it raised, or "nothing"."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            os.write(sink, b"nothing")
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(sink, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(sink)
    with os.fdopen(source) as stream:
        said = stream.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), "the child was killed by a signal"
    return said
