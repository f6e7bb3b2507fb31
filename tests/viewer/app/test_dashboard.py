"""The dashboard of one session, without a browser."""

from __future__ import annotations

import html
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.panes.graph import best_match
from comgra_decl.viewer.panes.series import SeriesPane
from comgra_decl.viewer.panes.values import ValuesPane
from tests.support.fake_run import FakeRun


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comgra_decl.viewer.model.catalogue._BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr("comgra_decl.viewer.model.catalogue._BETWEEN_LISTS", 0.0)
    monkeypatch.setattr("comgra_decl.viewer.model.catalogue._SHARE", 0)


@pytest.fixture
def runs(root: Path, tmp_path: Path) -> Path:
    shutil.copytree(root, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def dashboard(runs: Path) -> Dashboard:
    return Dashboard(Catalogue(runs), query="?section=inspect")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[FakeRun]:
    fake = FakeRun(tmp_path / "live" / "run", nodes=["embed", "head"], layers=1)
    yield fake
    fake.close()


def inspect(dashboard: Dashboard) -> list[Any]:
    return dashboard.screen.sections["inspect"].panes


def polled(dashboard: Dashboard) -> None:
    """Polls until a listing begun earlier has been applied as well."""
    for _ in range(2):
        dashboard.catalogue.refresh()
        dashboard.poll()


def test_it_opens_the_newest_run_at_its_last_step(dashboard: Dashboard) -> None:
    state = dashboard.state
    assert (state.run, state.step, state.follow) == ("group/small", 11, False)
    assert dashboard.screen.workspace.visible
    assert 'data-step="11"' in inspect(dashboard)[0].view.html


def test_a_step_moves_marks_and_changes_tables_in_place(dashboard: Dashboard) -> None:
    figures = [pane.frame.figure for pane in inspect(dashboard) if isinstance(pane, SeriesPane)]
    sources = [pane._line.data for pane in inspect(dashboard) if isinstance(pane, SeriesPane)]
    dashboard.change(step=4)
    after = [pane for pane in inspect(dashboard) if isinstance(pane, SeriesPane)]
    assert [pane.frame.figure for pane in after] == figures
    assert all(pane._line.data is data for pane, data in zip(after, sources, strict=True))
    spans: list[Any] = [pane.frame._span for pane in after]
    assert [span.location for span in spans] == [4, 4]
    assert 'data-step="4"' in inspect(dashboard)[0].view.html
    assert dashboard.screen.steps.view.index == 4


def test_what_can_be_kept_is_kept(dashboard: Dashboard) -> None:
    dashboard.change(node="cell", iteration=2, batch="1", statistic="l2", step=7)
    dashboard.change(type="eval")
    assert dashboard.state.step == 10
    dashboard.change(node="head")
    state = dashboard.state
    assert (state.iteration, state.batch, state.statistic, state.step) == (0, "1", "l2", 10)
    dashboard.change(node="cell")
    assert state.iteration == 2


def test_a_click_in_the_graph_selects(dashboard: Dashboard) -> None:
    dashboard.screen.graph.view._handle_msg({"select": "head"})
    assert dashboard.state.node == "head"
    assert dashboard.screen.graph.view.selected == "head"
    assert dashboard.screen.graph.view.info.startswith("head")
    dashboard.screen.graph.view._handle_msg({"search": "fc1"})
    assert dashboard.state.node == "blocks.0.mlp.fc1"
    dashboard.screen.graph.view._handle_msg({"select": "no such node"})
    assert dashboard.state.node == "blocks.0.mlp.fc1"


def test_groups_open_and_close(dashboard: Dashboard) -> None:
    def boxes() -> set[str]:
        return {box["id"] for box in dashboard.screen.graph.view.scene["boxes"]}

    before = boxes()
    assert "blocks.0.mlp.fc1" in before
    for band in dashboard.screen.graph.view.scene["bands"]:
        dashboard.screen.graph.view._handle_msg({"collapse": band["id"]})
    closed = boxes()
    assert "blocks.0.mlp.fc1" not in closed
    folded = [box["id"] for box in dashboard.screen.graph.view.scene["boxes"] if box["folded"]]
    dashboard.screen.graph.view._handle_msg({"expand": folded[0]})
    assert len(boxes()) > len(closed)


def test_the_graph_is_painted_with_the_statistic(dashboard: Any) -> None:
    view: Any = dashboard.screen.graph.view
    assert not view.heat
    dashboard.change(colour="forward", statistic="mean", step=9)
    heat = view.heat
    assert heat["blocks.0.mlp.fc2"]["hatched"]
    assert not heat["head"]["hatched"]
    assert view.legend["title"] == "forward · mean"
    first = heat["embed"]
    dashboard.change(step=2)
    assert view.heat["embed"] != first
    assert "aux" not in view.heat  # not recorded at this step: drawn as missing


def test_rows_of_the_tables_choose(dashboard: Dashboard) -> None:
    dashboard.change(node="embed")
    table = inspect(dashboard)[0].view
    table._handle_msg({"send": "statistic:l2"})
    assert dashboard.state.statistic == "l2"
    table._handle_msg({"send": "batch:2"})
    assert dashboard.state.batch == "2"
    table._handle_msg({"send": "run:../../etc"})
    assert dashboard.state.run == "group/small"


def test_parameters_are_tensors_like_others(dashboard: Dashboard) -> None:
    dashboard.change(node="head", role="weight")
    assert dashboard.state.role == "weight"
    assert "parameter" in inspect(dashboard)[0].view.html


def test_a_failing_pane_says_so_and_leaves_the_others_alone(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("<b>no & no</b>")

    monkeypatch.setattr("comgra_decl.viewer.panes.values.values_picture", fail)
    dashboard.change(step=3)
    broken = [pane for pane in inspect(dashboard) if isinstance(pane, ValuesPane)]
    assert all("&lt;b&gt;no &amp; no&lt;/b&gt;" in pane._problem.object for pane in broken)
    assert all(pane._problem.visible and not pane._body.visible for pane in broken)
    assert 'data-step="3"' in inspect(dashboard)[0].view.html
    monkeypatch.undo()
    dashboard.change(step=4)
    assert not any(pane._problem.visible for pane in broken)


def test_an_error_on_the_way_is_shown_above_the_page(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("torn")

    monkeypatch.setattr("comgra_decl.viewer.dashboard.resolve", fail)
    dashboard.change(step=3)
    assert dashboard.screen.banner.visible
    assert "torn" in dashboard.screen.banner.html
    monkeypatch.undo()
    dashboard.change(step=3)
    assert not dashboard.screen.banner.visible


def test_the_overview_comes_first_and_a_node_chosen_in_the_graph_is_looked_at(runs: Path) -> None:
    dashboard = Dashboard(Catalogue(runs))
    assert dashboard.state.section == "overview"
    graph = dashboard.screen.graph.view
    graph._handle_msg({"expand": "blocks"})
    assert dashboard.state.section == "overview"
    graph._handle_msg({"select": "head"})
    assert (dashboard.state.section, dashboard.state.node) == ("inspect", "head")
    dashboard.change(section="modules")
    graph._handle_msg({"select": "embed"})
    assert (dashboard.state.section, dashboard.state.node) == ("modules", "embed")


def test_hidden_sections_wait_until_they_are_shown(dashboard: Any) -> None:
    assert dashboard.screen.sections["run"].panes == []
    dashboard.change(section="run")
    assert "matched" in dashboard.screen.sections["run"].panes[0].view.html
    dashboard.change(node="head", step=3)
    assert 'data-node="head"' not in inspect(dashboard)[0].view.html
    dashboard.change(section="inspect")
    assert 'data-node="head" data-step="3"' in inspect(dashboard)[0].view.html


def test_the_address_restores_the_view(runs: Path, dashboard: Dashboard) -> None:
    dashboard.screen.start()
    dashboard.screen.url._handle_msg({"query": ""})
    dashboard.change(
        node="cell", iteration=1, step=5, batch="3", statistic="l2", colour="grad", scale="log"
    )
    query = dashboard.screen.url.query
    other = Dashboard(Catalogue(runs), query=query)
    other.screen.start()
    other.screen.url._handle_msg({"query": query})
    assert other.screen.url.query == query
    assert other.state.selection == dashboard.state.selection
    assert (other.state.colour, other.state.scale) == ("grad", "log")


@pytest.mark.parametrize(
    "query",
    ["?node=../x", "?node=<script>alert(1)</script>", "?step=" + "9" * 99,
     "?batch=99&stat=eval()&colour=evil&type=none&open=<b>", "?iteration=999999"],
)  # fmt: skip
def test_a_hostile_address_is_harmless(runs: Path, query: str) -> None:
    dashboard = Dashboard(Catalogue(runs), query=f"{query}&section=inspect")
    assert dashboard.screen.workspace.visible
    assert not dashboard.screen.banner.visible
    assert dashboard.state.run == "group/small"
    assert "<script>" not in inspect(dashboard)[0].view.html


@pytest.mark.parametrize("name", ["../../etc/passwd", "<script>alert(1)</script>", "group/smal"])
def test_a_link_to_a_run_that_is_not_here_shows_no_other(runs: Path, name: str) -> None:
    dashboard = Dashboard(Catalogue(runs), query=f"?run={name}&node=head")
    polled(dashboard)
    said = dashboard.screen.notice.html
    assert "Run not found" in said
    assert html.escape(f"no run {name!r}") in said
    assert ("did you mean" in said) == (name == "group/smal")
    assert "<script>" not in said
    assert dashboard.screen.blank
    dashboard.change(run="group/small")
    assert dashboard.screen.workspace.visible
    assert dashboard.state.node == "head"  # as the link says


def test_back_goes_back(dashboard: Any) -> None:
    dashboard.screen.start()
    dashboard.screen.url._handle_msg({"query": ""})  # sent once when the page is ready
    before = dashboard.screen.url.query
    dashboard.change(node="head")
    assert dashboard.screen.url.push
    dashboard.change(step=3)
    assert not dashboard.screen.url.push
    dashboard.screen.url._handle_msg({"query": before})
    assert dashboard.state.node != "head"
    assert dashboard.state.step == 11
    assert not dashboard.screen.url.push  # or there would be nothing to go forward to


def test_no_run_says_what_to_do_and_fills_by_itself(tmp_path: Path) -> None:
    dashboard = Dashboard(Catalogue(tmp_path / "live"))
    assert "No runs yet" in dashboard.screen.notice.html
    assert "+comgra=debug" in dashboard.screen.notice.html
    fake = FakeRun(tmp_path / "live" / "run", nodes=["embed"], layers=1)
    polled(dashboard)
    assert "run has started" in dashboard.screen.notice.html
    fake.write(2)
    polled(dashboard)
    assert dashboard.screen.workspace.visible
    assert not dashboard.screen.notice.visible
    assert (dashboard.state.step, dashboard.state.follow) == (1, True)
    fake.close()


def test_a_finished_run_without_records_says_so(tmp_path: Path) -> None:
    FakeRun(tmp_path / "live" / "run", nodes=["embed"], layers=1).close()
    dashboard = Dashboard(Catalogue(tmp_path / "live"))
    assert "This run has no records" in dashboard.screen.notice.html
    assert "schedule:" in dashboard.screen.notice.html


def test_a_damaged_run_says_why_and_others_stay_usable(runs: Path) -> None:
    shutil.copytree(runs / "group" / "small", runs / "group" / "torn")
    for file in (runs / "group" / "torn").rglob("*"):
        if file.is_file():
            os.truncate(file, 3)
    dashboard = Dashboard(Catalogue(runs), query="?run=group/torn")
    assert "damaged" in dashboard.screen.notice.html
    assert f"comgra-decl verify {runs / 'group' / 'torn'}" in dashboard.screen.notice.html
    assert "group/torn" in dashboard.screen.notice.html
    polled(dashboard)
    assert dashboard.screen.notice.visible
    options = dashboard.screen.selectors.view.groups[0]["fields"][0]["options"]
    assert {option["value"] for option in options} == {"group/small", "group/torn"}
    dashboard.screen.selectors.view._handle_msg({"run": "group/small"})
    assert dashboard.screen.workspace.visible
    assert not dashboard.screen.notice.visible


def test_a_run_deleted_while_open_says_so(runs: Path, dashboard: Dashboard) -> None:
    shutil.copytree(runs / "group" / "small", runs / "group" / "other")
    polled(dashboard)
    shutil.rmtree(runs / "group" / "small")
    for _ in range(3):  # nor does the other one ever replace it
        polled(dashboard)
        assert "Run not found" in dashboard.screen.notice.html
        assert not dashboard.screen.workspace.visible
    shutil.copytree(runs / "group" / "other", runs / "group" / "small")
    polled(dashboard)
    assert (dashboard.screen.workspace.visible, dashboard.state.run) == (True, "group/small")


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("not a run")
    dashboard = Dashboard(Catalogue(tmp_path / "log.txt"))
    assert "log.txt is a file" in dashboard.screen.notice.html


def test_following_shows_the_newest_step(live: FakeRun) -> None:
    live.write(2)
    dashboard = Dashboard(Catalogue(live.path.parent))
    assert dashboard.state.follow
    live.write(3)
    dashboard.poll()
    assert dashboard.state.step == 4
    assert dashboard.screen.steps.view.steps == [0, 1, 2, 3, 4]


def test_nothing_moves_while_one_looks(live: FakeRun) -> None:
    live.write(3)
    dashboard = Dashboard(Catalogue(live.path.parent), query="?section=inspect")
    dashboard.screen.steps.view._handle_msg({"index": 1})
    assert not dashboard.state.follow
    before = dashboard.state.selection
    live.write(3)
    dashboard.poll()
    assert dashboard.state.selection == before
    assert dashboard.screen.steps.view.index == 1
    assert dashboard.screen.steps.view.steps == list(range(6))
    series = next(pane for pane in inspect(dashboard) if isinstance(pane, SeriesPane))
    np.testing.assert_array_equal(series._line.data["x"], np.arange(6))
    dashboard.screen.steps.view._handle_msg({"follow": True})
    assert dashboard.state.step == 5


def test_nothing_is_sent_while_nothing_is_new(dashboard: Dashboard) -> None:
    polled(dashboard)
    changes: list[Any] = []
    frame = [
        dashboard.screen.graph.view,
        dashboard.screen.steps.view,
        dashboard.screen.selectors.view,
    ]
    components = [*frame, dashboard.screen.head, dashboard.screen.tabs, dashboard.screen.url]
    components.append(inspect(dashboard)[0].view)
    for component in components:
        component.param.watch(changes.append, list(component.param), onlychanged=False)
    for _ in range(5):
        polled(dashboard)
    assert changes == []


def test_two_sessions_are_independent(runs: Path) -> None:
    catalogue = Catalogue(runs)
    one, other = Dashboard(catalogue), Dashboard(catalogue)
    one.change(node="head", step=2)
    assert other.state.node != "head"
    assert other.state.step == 11


@pytest.mark.parametrize(
    ("text", "found"),
    [("fc1", "blocks.0.mlp.fc1"), ("BLOCKS.0.attn", "blocks.0.attn"), ("mlp", "blocks.0.mlp"),
     ("zzz", None), ("", None)],
)  # fmt: skip
def test_search_finds_the_shortest_match(text: str, found: str | None) -> None:
    names = ["embed", "blocks.0.attn", "blocks.0.mlp.fc1", "blocks.0.mlp", "blocks.1.mlp.fc1"]
    assert best_match(names, text) == found


def test_what_leads_to_a_node_opens_the_groups_around_it(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "deep", layers=12)
    fake.write(2)
    fake.close()
    dashboard = Dashboard(Catalogue(tmp_path))
    drawn = {box["id"] for box in dashboard.screen.graph.view.scene["boxes"]}
    hidden = "blocks.7.mlp.fc2"
    assert hidden not in drawn
    dashboard.change(node=hidden, section="findings")
    assert dashboard.screen.graph.view.selected == hidden
    assert {"blocks", "blocks.7", "blocks.7.mlp"} <= (dashboard.state.expanded or set())
    dashboard.screen.graph._on_message({"collapse": "blocks.7"})
    folded = dashboard.screen.graph.view.selected
    assert folded != hidden
    dashboard.change(step=0)  # only another node opens anything
    assert dashboard.screen.graph.view.selected == folded
    fold = next(b for b in dashboard.screen.graph.view.scene["boxes"] if b["folded"])
    dashboard.screen.graph._on_message(
        {"select": fold["id"]}
    )  # a click on a fold is meant for the fold
    assert dashboard.screen.graph.view.selected == fold["id"]
