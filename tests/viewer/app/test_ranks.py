"""A run of several processes: all together, one at a time, or one compared with another."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comgra_decl.query import open_run
from comgra_decl.query.ranks import heartbeats
from comgra_decl.store.last_seen import remove_last_seen, write_last_seen
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.ranks import rank_in, spoken, with_rank, without_rank
from comgra_decl.viewer.panes.compare import ComparePane
from tests.support.fake_run import FakeRun


class Rank(FakeRun):
    """The database of one of two ranks."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        super().__init__(path, nodes=["embed", "head"], layers=1, seed=rank)

    def _documents(self) -> dict[str, Any]:
        facts = {"rank": self.rank, "world_size": 2, "recorded": [0, 1]}
        return {**super()._documents(), "ranks": facts}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    for rank, path in enumerate((root / "g" / "run", root / "g" / "run" / "ranks" / "1")):
        fake = Rank(path, rank)
        fake.write(4)
        fake.close()
    return root


@pytest.fixture
def dashboard(folder: Path) -> Dashboard:
    return Dashboard(Catalogue(folder), query="?node=embed&stat=std")


def test_a_rank_that_no_longer_responds_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "SILENT", -1.0)
    run = tmp_path / "g" / "run"
    ranks = [Rank(path, rank) for rank, path in enumerate((run, run / "ranks" / "1"))]
    for rank in ranks:
        rank.write(4)
        write_last_seen(rank.path, {"time": time.time() + 1000, "step": 7})
    dashboard = Dashboard(Catalogue(tmp_path), query="?node=embed")
    assert "responds" not in dashboard.screen.head.html
    remove_last_seen(ranks[1].path)  # its last sign of life is its last record
    dashboard.poll()
    assert "rank 1 of 2 no longer responds, at or after step 3" in dashboard.screen.head.html
    for rank in ranks:
        rank.close()


def field(dashboard: Dashboard, name: str) -> dict[str, Any]:
    (found,) = (
        field
        for group in dashboard.screen.selectors.view.groups
        for field in group["fields"]
        if field["name"] == name
    )
    return dict(found)


def test_a_name_tells_the_rank_and_nonsense_none() -> None:
    assert with_rank("a/b", 3) == with_rank("a/b//rank-1", 3) == "a/b//rank-3"
    assert with_rank("a/b//rank-3", None) == without_rank("a/b//rank-3") == "a/b"
    assert (rank_in("a/b//rank-12"), rank_in("a/b"), rank_in("a//rank-x")) == (12, None, None)
    assert spoken("a/b//rank-3") == "a/b \u00b7 rank 3"


def test_ranks_are_offered_and_shown_alone(dashboard: Dashboard, folder: Path) -> None:
    whole = open_run(folder / "g" / "run")
    offered = field(dashboard, "rank")
    assert [option["value"] for option in offered["options"]] == ["", "0", "1"]
    shown = dashboard._view
    assert shown is not None
    np.testing.assert_array_equal(shown.run.series("embed", "std"), whole.series("embed", "std"))
    dashboard.screen.selectors._choose({"rank": "1"})
    assert dashboard.state.run == "g/run//rank-1"
    assert (field(dashboard, "rank")["value"], field(dashboard, "run")["value"]) == ("1", "g/run")
    assert "rank 1" in dashboard.screen.head.html
    assert dashboard._view is not None
    alone = dashboard._view.run.series("embed", "std")
    np.testing.assert_array_equal(alone, whole.rank(1).series("embed", "std"))
    assert not np.array_equal(alone, whole.series("embed", "std"))
    dashboard.poll()
    assert dashboard.state.run == "g/run//rank-1"
    dashboard.screen.selectors._choose({"rank": ""})
    assert dashboard.state.run == "g/run"


def test_a_link_to_a_rank_that_is_not_there_says_which_are(folder: Path) -> None:
    dashboard = Dashboard(Catalogue(folder), query="?run=g/run//rank-7")
    assert "this run has 0, 1" in dashboard.screen.notice.html


def test_a_rank_is_compared_with_another(dashboard: Dashboard, folder: Path) -> None:
    dashboard.change(run="g/run//rank-0", section="compare", other="g/run//rank-1", step=2)
    (pane,) = dashboard.screen.sections["compare"].panes
    assert isinstance(pane, ComparePane)
    other = dashboard._other
    assert other is not None
    assert other.view is not None
    there = open_run(folder / "g" / "run").rank(1)
    np.testing.assert_array_equal(
        other.view.run.series("embed", "std"), there.series("embed", "std")
    )
    offered = [o["value"] for o in pane.choices.groups[0]["fields"][0]["options"]]
    assert offered[:3] == ["", "g/run", "g/run//rank-1"]


def test_a_run_of_one_process_offers_no_ranks(root: Path) -> None:
    dashboard = Dashboard(Catalogue(root))
    names = [f["name"] for g in dashboard.screen.selectors.view.groups for f in g["fields"]]
    assert "rank" not in names
