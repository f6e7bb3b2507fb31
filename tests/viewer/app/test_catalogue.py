from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from comgra_decl.errors import ComgraError, RunNotFoundError
from comgra_decl.viewer.model.catalogue import OPEN_RUNS, Catalogue
from comgra_decl.viewer.model.choices import run_choice
from tests.support.fake_run import FakeRun
from tests.viewer.app.conftest import NODES


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    """A separate root with one good run and one damaged run."""
    shutil.copytree(root, tmp_path / "runs")
    damaged = tmp_path / "runs" / "group" / "torn"
    shutil.copytree(root / "group" / "small", damaged)
    for file in (damaged / "trace.ocdbt").rglob("*"):
        if file.is_file():
            os.truncate(file, 3)
    return tmp_path / "runs"


def test_a_root_that_does_not_exist_yet_has_no_runs(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "later")
    catalogue.refresh()
    assert catalogue.entries == ()
    assert catalogue.default() == ""


def test_runs_are_named_by_their_path_below_the_root(copied: Path) -> None:
    catalogue = Catalogue(copied)
    catalogue.refresh()
    assert {entry.name: entry.readable for entry in catalogue.entries} == {
        "group/small": True,
        "group/torn": False,
    }
    assert catalogue.default() == "group/small"
    assert catalogue.open("group/small").steps("")[-1] == 11


@pytest.mark.parametrize("below", ["group", "group/small"])
def test_a_group_or_a_run_is_a_root_too(copied: Path, below: str) -> None:
    catalogue = Catalogue(copied / below)
    catalogue.refresh()
    assert catalogue.default() == "small"
    assert len(catalogue.open("small").nodes) == len(NODES) + 2


def test_a_damaged_run_says_so_and_leaves_the_others_alone(copied: Path) -> None:
    catalogue = Catalogue(copied)
    catalogue.refresh()
    with pytest.raises(ComgraError):
        catalogue.open("group/torn")
    options = {o.value: o.label for o in run_choice(catalogue.entries, "group/small").options}
    assert options == {"group/small": "small", "group/torn": "torn · unreadable"}


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", ".", "group"])
def test_only_listed_names_are_opened(copied: Path, name: str) -> None:
    catalogue = Catalogue(copied)
    catalogue.refresh()
    with pytest.raises(RunNotFoundError):
        catalogue.open(name)


def test_a_run_deleted_meanwhile_is_told(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comgra_decl.viewer.model.catalogue._BETWEEN_LOOKS", 0.0)
    catalogue = Catalogue(copied)
    catalogue.refresh()
    catalogue.look("group/small")
    shutil.rmtree(copied / "group" / "small")
    with pytest.raises(RunNotFoundError, match="no longer exists"):
        catalogue.look("group/small")


def test_the_list_keeps_still_while_nothing_changes(copied: Path) -> None:
    catalogue = Catalogue(copied)
    catalogue.refresh()
    before = catalogue.entries
    catalogue.refresh()
    assert catalogue.entries is before


def test_new_records_raise_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comgra_decl.viewer.model.catalogue._BETWEEN_LOOKS", 0.0)
    fake = FakeRun(tmp_path / "runs" / "live", nodes=["embed"], layers=1)
    fake.write(2)
    catalogue = Catalogue(tmp_path / "runs")
    catalogue.refresh()
    view = catalogue.look("live")
    revision, steps = view.revision, len(view.steps(""))
    fake.write(3)
    assert catalogue.look("live") is view
    assert view.revision > revision
    assert (steps, len(view.steps(""))) == (2, 5)
    fake.close()


def test_few_runs_are_kept_open(root: Path, tmp_path: Path) -> None:
    for i in range(OPEN_RUNS + 3):
        shutil.copytree(root / "group" / "small", tmp_path / "runs" / f"run{i}")
    catalogue = Catalogue(tmp_path / "runs")
    catalogue.refresh()
    for entry in catalogue.entries:
        catalogue.open(entry.name)
    assert len(catalogue._views) == OPEN_RUNS
