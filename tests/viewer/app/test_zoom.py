"""Zooming into long runs: what was thinned out for the whole is shown in the part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.events import DoubleTap, RangesUpdate

from comgra_decl.query import open_run
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.series import POINTS
from comgra_decl.viewer.panes.distribution import DistributionPane
from comgra_decl.viewer.panes.overview import OverviewPane
from comgra_decl.viewer.panes.series import SeriesPane
from tests.support.fake_run import FakeRun
from tests.viewer.app.served import Server

LENGTH = POINTS + 300
BAD = 451
"""A step at which no column in a picture of the whole begins or ends."""


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with more steps than a figure has pixels."""
    path = tmp_path_factory.mktemp("long") / "runs" / "long"
    fake = FakeRun(path, nodes=["embed"], layers=1, samples=1, bins=8, values=False)
    fake.write(LENGTH, commit=100, evals=False)
    fake.close()
    return path


def zoom(pane: Any, start: float, end: float) -> None:
    """Does what a browser does when a user drags along the x axis."""
    figure = pane.frame.figure
    figure.x_range.update(start=start, end=end)
    low, high = figure.y_range.start, figure.y_range.end
    figure._trigger_event(RangesUpdate(figure, x0=start, x1=end, y0=low, y1=high))


def panes(path: Path, section: str, kind: type) -> list[Any]:
    dashboard = Dashboard(Catalogue(path.parent), query=f"?section={section}&node=embed&step=5")
    return [pane for pane in dashboard.screen.sections[section].panes if isinstance(pane, kind)]


@pytest.mark.slow
def test_a_zoomed_series_shows_every_record(long: Path) -> None:
    recorded = open_run(long).series("embed", "std")
    pane, _ = panes(long, "inspect", SeriesPane)
    assert len(pane._line.data["x"]) < LENGTH
    zoom(pane, 200, 400)
    steps, values = (np.asarray(pane._line.data[name]) for name in ("x", "y"))
    inside = (steps >= 200) & (steps <= 400)
    assert steps[inside].tolist() == list(range(200, 401))
    np.testing.assert_allclose(values[inside], recorded.loc[200:400], rtol=1e-6)
    assert (steps[0], steps[-1]) == (0, LENGTH - 1)


def test_a_zoomed_distribution_spends_its_columns_on_the_window(long: Path) -> None:
    pane, _ = panes(long, "inspect", DistributionPane)
    whole = pane._image.data
    zoom(pane, 200.5, 300.5)
    zoomed = pane._image.data
    assert (zoomed["x"], zoomed["dw"]) == ([200.5], [100.0])
    assert (zoomed["y"], zoomed["dh"]) == (whole["y"], whole["dh"])
    assert np.shape(zoomed["image"][0]) == np.shape(whole["image"][0])


def test_a_double_click_in_one_figure_shows_all_of_all(long: Path) -> None:
    first, second = panes(long, "inspect", DistributionPane)
    before = [pane._image.data["dw"] for pane in (first, second)]
    for pane in (first, second):  # a browser notifies all figures that share this axis
        zoom(pane, 200, 300)
    assert first._image.data["dw"] == [100.0]
    first.frame.figure._trigger_event(DoubleTap(first.frame.figure, x=1, y=1))
    assert [pane._image.data["dw"] for pane in (first, second)] == before


def test_one_bad_step_of_many_is_seen_in_the_overview(
    long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heat = RunView.heat

    def damaged(self: RunView, statistic: str, *args: str) -> Any:
        table = heat(self, statistic, *args).copy()
        table.loc[:, BAD] = 3 if statistic == "nonfinite" else 1e9
        return table

    monkeypatch.setattr(RunView, "heat", damaged)
    pane = panes(long, "overview", OverviewPane)[0]
    assert np.isfinite(pane._broken.data["image"][0]).any(axis=0).sum() == 1
    assert np.isposinf(pane._image.data["value"][0]).any(axis=0).sum() == 1  # "NaN or infinite"
    zoom(pane, BAD - 10, BAD + 10)
    columns = np.flatnonzero(np.isfinite(pane._broken.data["image"][0]).any(axis=0))
    edges = np.linspace(BAD - 10, BAD + 10, pane._broken.data["image"][0].shape[1] + 1)
    assert edges[columns[0]] <= BAD < edges[columns[-1] + 1]
    assert len(columns) == 18  # of 360, for one of 20 steps


@pytest.mark.browser
def test_a_drag_along_a_figure_shows_more_of_it(long: Path, open_page: Callable[..., Any]) -> None:
    server = Server(long.parent)
    try:
        page = open_page()
        page.goto(f"{server.url}?section=inspect&node=embed&step=5")
        page.locator("article[data-step]").wait_for()
        page.wait_for_function("() => !!(window.Bokeh && Bokeh.documents[0].is_idle)")
        box = page.locator(".bk-Figure").first.bounding_box()
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(*middle)
        page.mouse.down()
        page.mouse.move(middle[0] + 60, middle[1], steps=5)
        page.mouse.up()
        page.wait_for_function(_ALL_IN_VIEW)
    finally:
        server.stop()


_ALL_IN_VIEW = """() => {
  const shown = [...Bokeh.index.query((view) => view.model.type === "Figure")];
  const series = shown.filter(({ model }) => /\u00b7 std/.test(model.title.text));
  return series.length === 2 && series.every(({ model }) => {
    const { start, end } = model.x_range;
    const inside = (x) => x >= start && x <= end;
    const lines = model.renderers.map(({ data_source }) => [...(data_source.data.x ?? [])]);
    const most = Math.max(...lines.map((line) => line.filter(inside).length));
    return end - start < 400 && most === Math.floor(end) - Math.ceil(start) + 1;
  });
}"""
