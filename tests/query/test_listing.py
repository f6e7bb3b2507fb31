"""Runs are found, listed and opened, whatever is next to them."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.errors import AccessError, DamagedRunError, RunNotFoundError, UnknownNameError
from comgra_decl.query import list_runs, open_group, open_run
from comgra_decl.store import RunWriter
from tests.store.test_damage import age, change_json
from tests.store.truth import Truth, meta_of


def write(path: Path, *, started: float, records: int = 2, close: bool = True) -> Path:
    truth = Truth(meta=meta_of(started=started))
    writer = RunWriter.create(path, truth.meta)
    if records:
        writer.commit([truth.batch(records, [0])])
    if close:
        writer.close()
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two groups, a run without a group, and folders that are not runs."""
    root = tmp_path / "runs"
    write(root / "a" / "second", started=200.0)
    write(root / "a" / "first", started=100.0)
    write(root / "b" / "sweep" / "job 0", started=300.0, close=False)
    write(root / "alone", started=50.0, records=0, close=False)
    (root / "notes").mkdir()
    (root / "notes" / "text.txt").write_text("no run")
    (root / "file").write_text("no run either")
    (root / "circle").symlink_to(root)
    return root


def test_runs_are_listed_oldest_first(root: Path) -> None:
    found = [(str(run.path).removeprefix(f"{root}/"), run.state) for run in list_runs(root)]
    assert found == [
        ("alone", "waiting"),
        ("a/first", "finished"),
        ("a/second", "finished"),
        ("b/sweep/job 0", "live"),
    ]
    second = list_runs(root)[2]
    assert (second.group, second.name) == ("a", "second")
    assert (second.records, second.last_step, second.started) == (2, 3, 200.0)
    assert second.error is None


def test_a_relative_root_gives_relative_paths(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    assert {str(run.path).split("/")[0] for run in list_runs("runs")} == {"runs"}
    assert open_run("runs/a").name == "second"


def test_damaged_and_newer_runs_are_listed_with_their_reason(root: Path) -> None:
    (root / "a" / "first" / "trace.ocdbt" / "manifest.ocdbt").write_bytes(b"garbage")
    change_json(root / "a" / "second", "meta/run.json", min_reader=7)
    change_json(root / "b" / "sweep" / "job 0", "head", n="many")
    (root / "empty" / "trace.ocdbt").mkdir(parents=True)
    age(root / "empty")
    runs = {run.name: run for run in list_runs(root)}
    assert runs["first"].state == "damaged"
    assert "manifest.ocdbt" in (runs["first"].error or "")
    assert runs["second"].state == "unreadable"
    assert "Upgrade" in (runs["second"].error or "")
    assert runs["job 0"].state == "damaged"
    assert runs["empty"].state == "damaged"
    assert runs["alone"].error is None


def test_a_run_that_gave_up_is_listed_with_its_reason(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "run", meta_of()).close(error="disk full")
    (run,) = list_runs(tmp_path)
    assert (run.state, run.error) == ("stopped", "disk full")
    assert open_run(run.path).error == "disk full"


def test_a_run_being_created_is_not_listed_yet(tmp_path: Path) -> None:
    (tmp_path / "run" / "trace.ocdbt").mkdir(parents=True)
    assert list_runs(tmp_path) == []


def test_nothing_to_list(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "nowhere") == []
    assert list_runs(tmp_path) == []


def test_a_run_lists_itself(root: Path) -> None:
    assert [run.path for run in list_runs(root / "alone")] == [root / "alone"]


def test_a_folder_of_runs_opens_its_newest(root: Path) -> None:
    assert open_run(root).name == "job 0"
    assert open_run(root / "a").name == "second"
    assert open_run(str(root / "a" / "first")).name == "first"
    assert open_run(root / "a" / "first" / "trace.ocdbt").name == "first"


def test_the_newest_readable_run_is_opened(root: Path) -> None:
    (root / "a" / "second" / "trace.ocdbt" / "manifest.ocdbt").write_bytes(b"garbage")
    assert open_run(root / "a").name == "first"
    with pytest.raises(DamagedRunError, match="second"):
        open_run(root / "a" / "second")
    (root / "a" / "first" / "trace.ocdbt" / "manifest.ocdbt").write_bytes(b"garbage")
    with pytest.raises(DamagedRunError):
        open_run(root / "a")


def test_a_group_is_its_readable_runs(root: Path) -> None:
    group = open_group(root / "a")
    assert (len(group), group.name, group.names) == (2, "a", ["first", "second"])
    assert [run.name for run in group] == ["first", "second"]
    assert group[-1].name == group["second"].name == "second"
    with pytest.raises(UnknownNameError, match=r"'secund'; did you mean 'second'"):
        group["secund"]
    (root / "a" / "first" / "trace.ocdbt" / "manifest.ocdbt").write_bytes(b"")
    write(root / "a" / "third", started=400.0)
    assert group.refresh()
    assert group.names == ["second", "third"]
    assert "manifest.ocdbt" in group._repr_html_()
    assert repr(group).endswith(": 2 runs>")


def test_listing_many_runs_is_one_pass(tmp_path: Path) -> None:
    for number in range(30):
        write(tmp_path / f"{number:02}", started=time.time() + number)
    assert [run.name for run in list_runs(tmp_path)] == [f"{number:02}" for number in range(30)]


def test_runs_are_found_as_deep_as_they_lie(tmp_path: Path) -> None:
    deep = tmp_path / "exp" / "2026" / "11" / "lr" / "seed 1" / "run"
    write(deep, started=100.0)
    write(tmp_path / "exp" / "first", started=50.0)
    (deep.parent / "back").symlink_to(tmp_path)
    assert [run.path for run in list_runs(tmp_path)] == [tmp_path / "exp" / "first", deep]
    assert open_run(tmp_path).path == deep
    assert open_group(tmp_path).names == ["first", "run"]


def test_what_lies_in_the_folder_of_a_run_is_no_other_run(tmp_path: Path) -> None:
    outer = write(tmp_path / "outer", started=100.0)
    write(outer / "copies" / "inner", started=200.0)
    assert [run.path for run in list_runs(tmp_path)] == [outer]
    assert open_run(tmp_path).path == outer


def test_a_huge_tree_is_not_looked_through_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("comgra_decl.query.listing._MOST", 20)
    for i in range(5):
        (tmp_path / "data" / str(i) / "a" / "b" / "c").mkdir(parents=True)
    write(tmp_path / "data" / "0" / "a" / "b" / "c" / "run", started=1.0)
    with pytest.raises(RunNotFoundError, match=r"stopped 4 levels below it, .*\. Pass a folder"):
        open_run(tmp_path)
    assert list_runs(tmp_path) == []
    assert caplog.text.count("there may be more runs in") == 1, "the viewer looks every second"
    write(tmp_path / "data" / "0" / "run", started=1.0)
    assert open_run(tmp_path).name == "run", "what lies near is found, however much there is"
    assert open_run(tmp_path / "data" / "0" / "a").name == "run"


def test_a_run_that_may_not_be_read_is_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "g" / "mine", started=1.0)
    theirs = write(tmp_path / "g" / "theirs", started=2.0)
    (tmp_path / "private").mkdir()
    closed = (str(theirs), str(tmp_path / "private"))
    is_dir, scandir = Path.is_dir, os.scandir

    def guarded_is_dir(self: Path) -> bool:
        if str(self).startswith(f"{theirs}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return is_dir(self)

    def guarded_scandir(path: Any) -> Any:
        if str(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(Path, "is_dir", guarded_is_dir)
    monkeypatch.setattr(os, "scandir", guarded_scandir)
    listed = {run.name: run for run in list_runs(tmp_path)}
    assert {name: run.state for name, run in listed.items()} == {
        "mine": "finished",
        "theirs": "unreadable",
    }
    assert "permission denied" in (listed["theirs"].error or "")
    with pytest.raises(AccessError, match=r"chmod -R go\+rX"):
        open_run(theirs)
    assert open_run(tmp_path).name == "mine"
