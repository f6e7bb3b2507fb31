"""The Explore section: HoloViews figures of runs, tensors and samples, linked by brushing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holoviews as hv
import numpy as np
import pytest

from comgra_decl.query import Run, open_run
from comgra_decl.viewer import linking
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.brushing import NOTHING, Brush
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.sheet import Window
from comgra_decl.viewer.panes.sheet_html import window_html
from comgra_decl.viewer.plotting import plotted
from tests.support.fake_run import FakeRun
from tests.viewer.app.served import turn_to
from tests.viewer.app.test_linking import drag, drag_in

RATES = (1e-3, 1e-2, 1e-1)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three runs that differ in their learning rate."""
    root = tmp_path_factory.mktemp("explore")
    for number, rate in enumerate(RATES):
        fake = FakeRun(
            root / "group" / f"run{number}", nodes=("embed", "head"), layers=1, seed=number,
            config={"optimizer": {"lr": rate}}, start=1e9 + number,
        )  # fmt: skip
        fake.write(8)
        fake.close()
    return root


@pytest.fixture
def board(trials: Path) -> Dashboard:
    """A page that shows the section, after everything has been read."""
    query = "?section=explore&run=group/run0&node=head&step=4&stat=std&colour=forward"
    board = Dashboard(Catalogue(trials), query=query)
    for _ in range(2):  # the list of runs, then their metrics
        board.catalogue.library.wait()
        board.poll()
    return board


@pytest.fixture
def run(trials: Path) -> Run:
    return open_run(trials / "group" / "run0")


def pane_of(board: Dashboard) -> Any:
    return board.screen.sections["explore"].panes[0]


def parts(board: Dashboard, figure: str, kind: type) -> list[Any]:
    """Return the elements of a kind that a figure shows."""
    shown = pane_of(board).figures[figure]._pane.object[()]
    found: list[Any] = shown.traverse(lambda part: part, [kind])
    return found


def test_lines_have_the_numbers_of_each_run(board: Dashboard, trials: Path) -> None:
    curves = {curve["run"][0]: curve for curve in parts(board, "metric", hv.Curve)}
    assert {*curves} == {"group/run0", "group/run1", "group/run2"}
    for name, curve in curves.items():
        table = open_run(trials / name).kpis()
        loss = table[(table["name"] == "loss") & (table["type"] == "train")]
        np.testing.assert_array_equal(curve["step"], loss["step"])
        np.testing.assert_allclose(curve["loss"], loss["value"])
    series = {curve["run"][0]: curve for curve in parts(board, "series", hv.Curve)}
    expected = open_run(trials / "group" / "run2").series("head", "std")
    np.testing.assert_allclose(series["group/run2"]["std"], expected)


def test_settings_show_every_run(board: Dashboard) -> None:
    (points, *_) = parts(board, "settings", hv.Points)
    rates = {run: float(text) for run, text in zip(points["run"], points["lr"], strict=True)}
    assert rates == {f"group/run{number}": rate for number, rate in enumerate(RATES)}


def test_distributions_over_layers_have_the_samples_of_every_tensor(run: Run) -> None:
    overlay = plotted(run).distributions("std", step=4)
    (points,) = overlay.traverse(lambda part: part, [hv.Points])
    table = points.dframe()
    assert [str(dimension) for dimension in points.dimensions()] == [
        "layer", "std", "sample", "tensor",
    ]  # fmt: skip
    for node in ("embed", "head"):
        expected = run[node].row(4)["std"]
        found = table[table["tensor"] == node].sort_values("sample")["std"]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    (boxes,) = overlay.traverse(lambda part: part, [hv.Rectangles])
    low, high = np.quantile(run["head"].row(4)["std"].astype(float), (0.25, 0.75))
    (own,) = boxes.dframe().query("tensor == 'head'").itertuples()
    assert (own.y0, own.y1) == pytest.approx((low, high), rel=1e-6)


def test_a_box_over_the_layers_marks_samples_in_tables_and_graph(
    board: Dashboard, run: Run
) -> None:
    values = run["head"].row(4)["std"].to_numpy(float)
    middle = float(np.median(values))
    layers = parts(board, "layers", hv.Points)[0]
    layer = layers.dframe().query("tensor == 'head'")["layer"].iloc[0]
    linker = pane_of(board)._links._linkers["sample"]
    (of_layers,) = (e for e in linker._selection_expr_streams if "layer" in map(str, e.kdims))
    streams = linker._selection_expr_streams[of_layers]
    box = (layer - 0.4, middle, layer + 0.4, 1e9)
    streams.input_streams[0].input_stream.input_streams[0].event(bounds=box)
    chosen = tuple(np.flatnonzero(values > middle).tolist())
    assert len(chosen) == 2
    assert board.state.brush == Brush(samples=chosen)
    selected = parts(board, "cloud", hv.Points)[1]
    assert {*selected["sample"]} == {*chosen}
    graph: Any = board.screen.graph.view
    assert graph.legend["title"].endswith("mean of 2 selected samples")
    assert float(graph.heat["head"]["text"]) == pytest.approx(values[[*chosen]].mean(), rel=1e-2)
    board.change(section="inspect")
    statistics: Any = board.screen.sections["inspect"].panes[0]
    assert statistics.view.html.count('class="brushed"') == 2


def test_the_graph_shows_a_single_selected_sample(board: Dashboard, run: Run) -> None:
    board.change(brush=Brush.of(samples=[3]))
    graph: Any = board.screen.graph.view
    assert graph.legend["title"].endswith("sample 3")
    values = run["head"].row(4)["std"].to_numpy(float)
    assert float(graph.heat["head"]["text"]) == pytest.approx(values[3], rel=1e-2)


def test_the_graph_shows_the_most_unusual_of_the_selected_samples(
    board: Dashboard, run: Run
) -> None:
    board.change(colour="unusual", brush=Brush.of(samples=[0, 3]))
    graph: Any = board.screen.graph.view
    assert graph.legend["title"].startswith("among 2 selected samples")
    table = run.unusual(4, "std").xs("forward", level="pass")
    worst = table.loc["head"].iloc[0][[0, 3]].abs().idxmax()
    assert graph.heat["head"]["text"].endswith(f"#{worst}")


def test_rows_of_samples_are_marked_among_the_values() -> None:
    window = Window(np.zeros((3, 2)), 4, 0, (9, 2))
    html, _ = window_html(window, ("sample", "feature"), brushed=(0, 5))
    (row,) = re.findall(r'<tr class="brushed"><th scope="row">(\d+)</th>', html)
    assert row == "5"


def test_a_range_of_steps_and_a_box_of_runs_mark_records_and_runs(board: Dashboard) -> None:
    drag(pane_of(board), hv.Curve, bounds=(1.5, -9.0, 4.5, 9.0))
    assert board.state.brush.steps == (2, 3, 4)
    linker = pane_of(board)._links._linkers["run"]
    *_, streams = linker._selection_expr_streams.values()
    (points, *_) = parts(board, "settings", hv.Points)
    place = float(points["setting"][[*points["run"]].index("group/run1")])
    streams.input_streams[0].input_stream.input_streams[0].event(
        bounds=(place - 0.1, -1.0, place + 0.1, 2.0)
    )
    assert board.state.brush == Brush(steps=(2, 3, 4), runs=("group/run1",))
    assert board.state.ticked == ("group/run1",)
    assert {curve["run"][0] for curve in parts(board, "metric", hv.Curve)} == {"group/run1"}
    pane_of(board)._choose({"steps": "clear"})
    assert board.state.brush == Brush(runs=("group/run1",))
    pane_of(board)._choose({"runs": "clear"})
    assert board.state.brush == NOTHING
    assert board.state.ticked == ("group/run1",)


@pytest.mark.slow
def test_many_steps_later_figures_are_still_linked(
    board: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linking, "_WORN", 6)
    board.change(brush=Brush.of(samples=[1, 2]))
    for turn in range(5):
        board.change(step=turn)
        assert {*parts(board, "cloud", hv.Points)[1]["sample"]} == {1, 2}
    registered = len(pane_of(board)._links._linkers["sample"]._selection_expr_streams)
    assert registered <= 6


@pytest.mark.slow
def test_a_page_that_does_not_show_the_section_does_not_load_holoviews(trials: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from comgra_decl.viewer.dashboard import Dashboard\n"
        "from comgra_decl.viewer.model.catalogue import Catalogue\n"
        f"board = Dashboard(Catalogue(Path({str(trials)!r})))\n"
        "board.change(section='runs'); board.change(section='inspect')\n"
        "assert 'holoviews' not in sys.modules\n"
        "board.change(section='explore')\n"
        "assert 'holoviews' in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stderr == "", "and it ends quietly"


@pytest.mark.browser
@pytest.mark.slow
def test_boxes_in_the_figures_mark_the_page(
    trials: Path, serve: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    from playwright.sync_api import expect

    from comgra_decl.viewer.page import create_page

    page = open_page(viewport={"width": 1400, "height": 1600})
    page.goto(serve(lambda: create_page([str(trials)])) + "?section=explore&node=head&step=4")
    page.locator(".metric .bk-Figure").wait_for()
    page.locator(".layers .bk-Figure").wait_for()
    page.wait_for_function("() => Bokeh.documents[0].is_idle")
    drag_in(page, page.locator(".layers .bk-Figure"), of=(0.13, 0.12), to=(0.93, 0.6))
    expect(page.get_by_text("Clear 4 samples")).to_be_visible()
    drag_in(page, page.locator(".metric .bk-Figure"), of=(0.3, 0.4), to=(0.6, 0.7))
    expect(page.locator("svg title").filter(has_text="brushed")).not_to_have_count(0)
    turn_to(page, "inspect")
    expect(page.locator("tr.brushed")).to_have_count(4)


@pytest.mark.slow
@pytest.mark.browser
def test_legends_are_legible_in_the_dark(
    trials: Path, serve: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    from comgra_decl.viewer.page import create_page

    page = open_page(viewport={"width": 1400, "height": 1600}, color_scheme="dark")
    page.goto(serve(lambda: create_page([str(trials)])) + "?section=explore&node=head&step=4")
    label = page.locator(".metric .bk-label").first
    label.wait_for()
    text = page.evaluate("() => getComputedStyle(document.body).color")
    assert label.evaluate("e => getComputedStyle(e).color") == text
