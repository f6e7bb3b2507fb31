"""Two runs, or two steps of one, compared as numpy compares the same tensors."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.query import part
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.compare import (
    Pair,
    overlay_of,
    ranking_of,
    settings_of,
    started,
    statistics_of,
)
from comgra_decl.viewer.model.comparison_target import ALL_TRAINING, Other, other_of
from comgra_decl.viewer.model.partings import Search
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.series import Curve
from comgra_decl.viewer.model.sheet import slot_of
from comgra_decl.viewer.page import create_page
from comgra_decl.viewer.panes.compare import ComparePane
from comgra_decl.viewer.panes.compare_html import parting_html, ranking_html
from comgra_decl.viewer.url import format_query
from tests.support.fake_run import FakeRun
from tests.viewer.app.conftest import BROKEN_FROM

NODES = ("embed", "head", "cell")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeRun, FakeRun]:
    """Two runs of one model: the second has other numbers, fewer steps, and one node fewer."""
    root = tmp_path_factory.mktemp("pair")
    first = FakeRun(root / "first", nodes=NODES, layers=1)
    second = FakeRun(root / "second", nodes=NODES[:2], layers=1, seed=5, samples=2)
    first.write(8)
    second.write(5)
    first.close()
    second.close()
    return first, second


@pytest.fixture
def catalogue(pair: tuple[FakeRun, FakeRun]) -> Catalogue:
    catalogue = Catalogue(pair[0].path.parent)
    catalogue.refresh()
    return catalogue


def at(view: RunView, **fields: object) -> Selection:
    return resolve(view, Selection(**fields), {})  # type: ignore[arg-type]


def tensor(fake: FakeRun, node: str, step: int, role: str = "output") -> np.ndarray:
    slot = next(s for s in fake.slots if s.key == (node, role, 0, "forward"))
    return fake.tensor(slot, step).astype(np.float64)


def spread(fake: FakeRun, node: str, step: int) -> float:
    values = tensor(fake, node, step)
    return float(values.reshape(len(values), -1).std(1).mean())


def compared(catalogue: Catalogue, **fields: Any) -> tuple[RunView, Other, Selection]:
    view = catalogue.open("first")
    where = at(view, **{"node": "embed", "step": 4, "statistic": "std", **fields})
    return view, other_of(catalogue, view, where, run="second", step=None), where


@given(st.floats(allow_nan=False, width=32), st.floats(allow_nan=False, width=32))
def test_a_relative_difference_is_symmetric_and_bounded(a: float, b: float) -> None:
    one, other = Pair(a, b).relative, Pair(b, a).relative
    if math.isinf(a) or math.isinf(b):
        assert math.isnan(one)
        return
    assert one == -other
    assert abs(one) <= 2
    assert (one == 0) == (a == b)


def test_what_is_compared_with(catalogue: Catalogue) -> None:
    view = catalogue.open("first")
    where = at(view, step=6)
    other = other_of(catalogue, view, where, run="second", step=None)
    assert (other.run, other.step, other.pinned) == ("second", 4, False)  # the nearest one
    assert other_of(catalogue, view, where, run="second", step=1).step == 1
    assert other_of(catalogue, view, where, run="", step=None).step == 0
    own = other_of(catalogue, view, where, run="first", step=3)
    assert (own.run, own.view, own.step) == ("", view, 3)
    assert other_of(catalogue, view, where, run="../../etc", step=None).view is view


def test_statistics_stand_side_by_side(catalogue: Catalogue, pair: tuple[FakeRun, FakeRun]) -> None:
    view, other, where = compared(catalogue)
    rows = dict(statistics_of(view, slot_of(view, where, "forward"), other, where))
    here, there = (spread(fake, "embed", 4) for fake in pair)
    assert rows["std"].here == pytest.approx(here, rel=1e-5)
    assert rows["std"].there == pytest.approx(there, rel=1e-5)
    assert rows["std"].difference == pytest.approx(here - there, rel=1e-3)
    assert rows["std"].ratio == pytest.approx(here / there, rel=1e-5)
    alone = at(view, node="embed", step=4, batch="1")
    rows = dict(statistics_of(view, slot_of(view, alone, "forward"), other, alone))
    for number, fake, sample in ((rows["l2"].here, pair[0], 4), (rows["l2"].there, pair[1], 8)):
        expected = np.linalg.norm(tensor(fake, "embed", 4)[sample])  # of 4, and of 2 samples
        assert number == pytest.approx(expected, rel=1e-5)


def test_the_largest_differences_come_first(
    catalogue: Catalogue, pair: tuple[FakeRun, FakeRun]
) -> None:
    view, other, where = compared(catalogue)
    ranking = ranking_of(view, other, where, "forward")
    sizes = [abs(row.pair.relative) for row in ranking.rows]
    assert sizes == sorted(sizes, reverse=True)
    found = {(row.slot.node, row.slot.role): row.pair for row in ranking.rows}
    for node in ("embed", "head"):
        a, b = (spread(fake, node, 4) for fake in pair)
        expected = 2 * (a - b) / (a + b)
        assert found[node, "output"].relative == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert ranking.only_here == ("cell",)
    assert ranking.only_there == ()


def test_what_is_not_finite_comes_before_all(view: RunView) -> None:
    where = at(view, step=11, statistic="std")
    ranking = ranking_of(view, Other("", view, BROKEN_FROM - 1), where, "forward")
    broken = [row.slot.node for row in ranking.rows if row.broken]
    assert broken == ["blocks.0.mlp.fc2"]
    assert ranking.rows[0].slot.node == "blocks.0.mlp.fc2"


def test_what_one_step_lacks_is_counted_and_not_compared(view: RunView) -> None:
    where = at(view, step=8, statistic="std")
    ranking = ranking_of(view, Other("", view, 2), where, "forward")  # aux begins at step 5
    assert "aux" not in {row.slot.node for row in ranking.rows}
    assert ranking.absent >= 1
    note = ranking_html(ranking, where)[0]
    assert f"{ranking.compared} tensors recorded at both steps." in note
    assert f"{ranking.absent} more" in note
    fewer = ranking_of(view, Other("", view, 2), where, "forward", most=1)
    assert "showing the 1 largest" in ranking_html(fewer, where)[0]


def test_both_series_share_their_axes(catalogue: Catalogue, pair: tuple[FakeRun, FakeRun]) -> None:
    view, other, where = compared(catalogue)
    slot = slot_of(view, where, "forward")
    overlay = overlay_of(view, slot, other, where, relative=False)
    assert overlay.there is not None
    for line, fake, steps in ((overlay.here, pair[0], 8), (overlay.there, pair[1], 5)):
        np.testing.assert_array_equal(line.steps, np.arange(steps))
        expected = [spread(fake, "embed", step) for step in range(steps)]
        np.testing.assert_allclose(line.values, expected, rtol=1e-4)
        assert overlay.bounds[0] < line.values.min()
        assert line.values.max() < overlay.bounds[1]
    relative = overlay_of(view, slot, other, where, relative=True)
    assert relative.there is not None
    np.testing.assert_allclose(
        relative.there.values, overlay.there.values / overlay.there.values[0], rtol=1e-6
    )
    missing = overlay_of(
        view, slot_of(view, at(view, node="cell"), "forward"), other, where, relative=False
    )
    assert missing.there is not None
    assert "second" in missing.there.missing


def test_a_series_that_starts_with_nothing_starts_later() -> None:
    line = started(Curve(steps=np.arange(4), values=np.array([math.nan, 0.0, 4.0, 2.0])))
    np.testing.assert_array_equal(line.values, [math.nan, 0.0, 1.0, 0.5])
    assert started(Curve(steps=np.arange(2), values=np.zeros(2))).missing


def test_settings_that_differ_are_listed(catalogue: Catalogue) -> None:
    view, other, _ = compared(catalogue)
    assert ("spec.samples.count", "4", "2") in settings_of(view, other)
    assert settings_of(view, Other("", view, 0)) == []


@pytest.mark.usefixtures("pair")
def test_the_scale_of_differences_says_what_is_beyond_it(catalogue: Catalogue) -> None:
    def legend(other: str) -> Any:
        query = f"?run=first&section=compare&other={other}&other_step=4&step=4"
        query += "&stat=std&colour=difference"
        graph: Any = Dashboard(catalogue, query=query).screen.graph.view
        return graph.legend

    def read(text: str) -> float:
        return float(text.split("%")[0].replace("\u2212", "-"))

    told = legend("second")
    assert read(told["low"]) == -read(told["high"]) < 0
    graph: Any = Dashboard(
        catalogue, query="?run=first&section=compare&other=second&step=4&stat=std&colour=difference"
    ).screen.graph.view
    largest = max(abs(read(paint["text"])) for paint in graph.heat.values())
    assert told["high"].endswith(" or more") is (largest > read(told["high"]))
    same = legend("first")
    assert (same["low"], same["high"]) == ("0%", "0%")


def test_the_dashboard_compares(catalogue: Catalogue, pair: tuple[FakeRun, FakeRun]) -> None:
    query = "?run=first&section=compare&other=second&step=4&node=embed&stat=std&colour=difference"
    dashboard = Dashboard(catalogue, query=query)
    pane: Any = dashboard.screen.sections["compare"].panes[0]
    assert not pane._problem.visible
    a, b = (spread(fake, "embed", 4) for fake in pair)
    graph: Any = dashboard.screen.graph.view
    percent = float(graph.heat["embed"]["text"].rstrip(" %").replace("\u2212", "-"))
    assert percent == pytest.approx(200 * (a - b) / (a + b), abs=0.01, rel=1e-2)
    assert "cell" not in graph.heat  # the other run has none
    assert graph.legend["title"] == "difference \u00b7 forward \u00b7 std"
    assert pane.choices.check({"other_step": "2"})
    pane._choose({"other_step": "2"})
    assert dashboard.state.other_step == 2
    assert 'data-other="2"' in pane.table.html
    token = next(t for t in pane.nodes.tokens if t.startswith("slot:"))
    pane._select({"send": token})
    slot = dashboard._view.slots[int(token[5:])] if dashboard._view else None
    assert slot is not None
    assert (dashboard.state.node, dashboard.state.role) == (slot.node, slot.role)
    pane._choose({"other": ""})
    assert not dashboard.state.other
    assert format_query(dashboard.state).count("other_step") == 0
    assert "Settings" not in pane.nodes.html
    dashboard.change(section="inspect", colour="kind")
    assert not graph.heat


def test_a_live_run_is_compared_as_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comgra_decl.viewer.model.catalogue._BETWEEN_LOOKS", 0.0)
    done = FakeRun(tmp_path / "done", nodes=["embed"], layers=1)
    done.write(6)
    done.close()
    live = FakeRun(tmp_path / "live", nodes=["embed"], layers=1, seed=2)
    live.write(2)
    dashboard = Dashboard(Catalogue(tmp_path), query="?run=done&section=compare&other=live&step=5")
    pane: Any = dashboard.screen.sections["compare"].panes[0]
    assert 'data-other="1"' in pane.table.html
    live.write(3)
    dashboard.poll()
    assert 'data-other="4"' in pane.table.html
    live.close()


def test_the_first_difference_is_searched_and_shown(catalogue: Catalogue) -> None:
    board = Dashboard(catalogue, query="?run=first&section=compare&other=second&node=embed")
    pane: Any = board.screen.sections["compare"].panes[0]
    assert "Search" in pane.nodes.html
    pane._on_ranking({"send": "search"})
    for thread in threading.enumerate():
        if thread.name == "comgra_decl parting":
            thread.join()
    board.poll()
    view, other = catalogue.open("first"), catalogue.open("second")
    found = part(view.run, other.run)
    assert found.first is not None
    assert "The runs diverge at step 0" in pane.nodes.html
    assert "part:0" in pane.nodes.tokens
    pane._on_ranking({"send": "part:0"})
    assert (board.state.node, board.state.role, board.state.step) == (
        found.first.node, found.first.role, found.first.step,
    )  # fmt: skip


@pytest.mark.browser
@pytest.mark.slow
def test_the_page_leads_to_where_two_runs_part(tmp_path: Path, serve: Any, page: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    nodes = ("embed", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "head")
    for name, broken in (("good", None), ("bad", 3)):
        fake = FakeRun(tmp_path / name, nodes=nodes, layers=1, nonfinite_from=broken)
        fake.write(6)
        fake.close()
    query = "?run=bad&section=compare&other=good&node=embed&step=5"
    page.goto(serve(lambda: create_page([str(tmp_path)])) + query)
    page.get_by_role("button", name="Search").click()
    result = page.get_by_role("status").filter(has_text="The runs diverge at step 3")
    expect(result).to_contain_text("blocks.0.mlp.fc2")
    row = page.locator("table.parting tbody tr").first
    expect(row).to_contain_text("blocks.0.mlp.fc2")
    row.click()
    shown = page.locator('.node-title[data-step="3"]')
    expect(shown).to_contain_text("blocks.0.mlp.fc2")


def test_types_of_one_run_are_compared_at_one_step(root: Path, fake: FakeRun) -> None:
    catalogue = Catalogue(root)
    catalogue.refresh()
    view = catalogue.open("group/small")
    where = at(view, node="embed", step=12, statistic="std")
    evaluated = other_of(catalogue, view, where, run="", step=None, type_="eval")
    assert (evaluated.type, evaluated.is_apart(view, where)) == ("eval", True)
    assert evaluated.step == 10  # the nearest one
    rows = dict(statistics_of(view, slot_of(view, where, "forward"), evaluated, where))
    slot = next(s for s in fake.slots if s.key == ("embed", "output", 0, "forward"))
    values = fake.tensor(slot, 10, "eval").astype(np.float64)
    expected = values.reshape(len(values), -1).std(1).mean()
    assert rows["std"].there == pytest.approx(expected, rel=1e-5)
    assert rows["std"].here == pytest.approx(spread(fake, "embed", where.step or 0), rel=1e-5)
    again = at(view, node="embed", statistic="std", type="eval")
    trained = other_of(catalogue, view, again, run="", step=None, type_=ALL_TRAINING)
    assert (trained.type, trained.step) == ("", again.step)
    overlay = overlay_of(view, slot_of(view, again, "forward"), trained, again, relative=False)
    assert overlay.there is not None
    assert overlay.there.steps.tolist() == view.steps("").tolist()
    unknown = other_of(catalogue, view, where, run="", step=None, type_="evil")
    assert (unknown.type, unknown.step) == (None, 0)
    dashboard = Dashboard(catalogue, query="?section=compare&other_type=eval")
    (pane,) = dashboard.screen.sections["compare"].panes
    assert isinstance(pane, ComparePane)
    assert pane.choices.check({"other_type": ALL_TRAINING})
    assert "other_type=eval" in format_query(dashboard.state)
    pane._choose({"other_type": ALL_TRAINING})
    assert dashboard.state.other_type == ALL_TRAINING
    pane._choose({"other_type": "="})
    assert dashboard.state.other_type == ""


def test_a_setting_that_one_run_lacks_is_a_dash(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, there = (catalogue.open(name) for name in ("first", "second"))
    table = pd.DataFrame({"a": [pd.NA, None], "b": ["x", 3]}, index=["k", "l"], dtype=object)
    monkeypatch.setattr("comgra_decl.viewer.model.compare.differences", lambda _: table)
    found = settings_of(view, Other("second", there, 0))
    assert found == [("k", "\u2013", "x"), ("l", "\u2013", "3")]


def test_a_list_of_differences_says_how_many_it_leaves_out(catalogue: Catalogue) -> None:
    view, there = (catalogue.open(name) for name in ("first", "second"))
    found = part(view.run, there.run)
    one = found.differences[0]
    many = Search(ref(there), replace(found, differences=(one,) * 11))
    assert "and 3 later in execution order" in parting_html(many)
    assert "later in execution order" not in parting_html(
        replace(many, found=replace(found, differences=(one,) * 8))
    )
