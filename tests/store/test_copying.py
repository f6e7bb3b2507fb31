"""A copy is the whole run at one moment, or nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from comgra_decl.errors import DamagedRunError, RunNotFoundError, StoreError
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.copying import copy_run
from comgra_decl.store.verify import verify
from tests.store.test_verify import contents, files_of
from tests.store.truth import Truth


@pytest.fixture
def truth() -> Truth:
    return Truth()


@pytest.fixture
def run(tmp_path: Path, truth: Truth) -> Path:
    path = tmp_path / "runs" / "an älterer run"
    writer = RunWriter.create(path, truth.meta)
    for _ in range(4):
        batch = truth.batch(5, range(3), values={0: np.ones((2, 4))})
        writer.commit([batch])
        truth.keep([batch])
    writer.close()
    (path / "spec.yaml").write_text("nodes: {}\n")
    (path / ".hydra").mkdir()
    (path / ".hydra" / "config.yaml").write_text("lr: 1\n")
    (path / "away").symlink_to("/etc")
    return path


def test_a_copy_is_the_run(run: Path, tmp_path: Path, truth: Truth) -> None:
    copy = copy_run(run, tmp_path / "deep" / "down" / "copy")
    assert copy == tmp_path / "deep" / "down" / "copy"
    truth.check(Reader(copy).view)
    heads = [{**Reader(path).head, "generation": 0} for path in (copy, run)]
    assert heads[0] == heads[1]
    assert Reader(copy).meta == Reader(run).meta
    assert (copy / "spec.yaml").read_text() == "nodes: {}\n"
    assert (copy / ".hydra" / "config.yaml").read_text() == "lr: 1\n"
    assert not (copy / "away").exists(), "a link could lead anywhere"


def test_into_a_folder_it_keeps_its_name(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert copy_run(run, tmp_path / "other") == tmp_path / "other" / run.name


def test_nothing_is_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    copy_run(run, tmp_path / "copy")
    for target in (tmp_path / "file", tmp_path / "copy", run, run.parent):
        with pytest.raises(StoreError, match="already exists; choose another"):
            copy_run(run, target)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_live_run_is_copied_as_of_now(tmp_path: Path, truth: Truth) -> None:
    """While commits continue, the copy is one of the states that existed."""
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            batch = truth.batch(3, range(3))
            truth.keep([batch])
            writer.commit([batch])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(4):
            copy = copy_run(tmp_path / "run", tmp_path / f"copy {number}")
            reader = Reader(copy)
            truth.check(reader.view, upto=reader.view.n)
            assert verify(copy).whole
            assert reader.state == "stopped"
            assert reader.head["error"] == "a copy, made while the run was being recorded"
    finally:
        ended.set()
        thread.join()
    writer.close()


def test_of_a_damaged_run_nothing_is_left_behind(run: Path, tmp_path: Path) -> None:
    path = files_of(run)[1]
    path.write_bytes(path.read_bytes()[:20])
    (tmp_path / "other").mkdir()
    with pytest.raises(DamagedRunError):
        copy_run(run, tmp_path / "other")
    assert contents(tmp_path / "other") == {}
    assert list((tmp_path / "other").iterdir()) == []


def test_no_run_and_no_room(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError):
        copy_run(tmp_path / "nothing", tmp_path / "copy")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write to"):
        copy_run(run, tmp_path / "file" / "below")
