"""Custom views from other libraries, views that follow the page, and brushing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import holoviews as hv
import numpy as np
import pytest

from comgra_decl.query import open_run
from comgra_decl.viewer.custom import ViewsFile
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.brushing import NOTHING, Brush, brushed_marks
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.runview import RunView
from tests.support.shortened import shortened

FOLLOWING = """
import holoviews as hv
from comgra_decl.viewer.custom import View

drawn = []

def follow(look):
    def draw(node, step, sample, run, **others):
        drawn.append((node, step, sample))
        table = run.slot(node).samples("mean")
        return hv.Curve((table.index, table[sample or 0])).opts(title=f"{node} at {step}, {sample}")
    return hv.DynamicMap(draw, streams=[look.stream])

def cloud(look):
    return look.link(look.run.plot.cloud(look.node, step=look.step))

def curve(look):
    return look.link(look.run.plot.series(look.node, "std"))

def views():
    return [View("Follow", follow, reads=()), View("Cloud", cloud, reads={"node", "step"}),
            View("Curve", curve, reads={"node"})]
"""


@pytest.fixture
def opened(root: Path, tmp_path: Path) -> tuple[Dashboard, Any]:
    (tmp_path / "views.py").write_text(FOLLOWING)
    file = ViewsFile(tmp_path / "views.py")
    query = "?section=views&run=group/small&node=head&step=4"
    board = Dashboard(Catalogue(root), query=query, views=file)
    return board, board.screen.sections["views"].panes[0]


def test_a_dynamic_map_follows_the_page_without_a_new_view(opened: tuple[Dashboard, Any]) -> None:
    board, pane = opened
    (follow, *_) = pane._cards
    map_ = follow._content
    assert isinstance(map_, hv.DynamicMap)
    drawn = pane._file.views[0].build.__globals__["drawn"]
    hv.render(map_)
    board.change(node="embed", step=6)
    assert follow._content is map_
    assert drawn[-1] == ("embed", 6, None)
    board.change(batch="2")
    assert drawn[-1] == ("embed", 6, 2)
    known = len(drawn)
    board.change(scale="log")
    assert len(drawn) == known


def drag(pane: Any, kind: type, **region: Any) -> None:
    """Selects a region of a linked element, as HoloViews does after a drag in the browser."""
    streams = pane._links._linker._selection_expr_streams
    sequence = next(stream for element, stream in streams.items() if type(element) is kind)
    sequence.input_streams[0].input_stream.input_streams[0].event(**region)


def test_a_selection_brushes_samples(opened: tuple[Dashboard, Any]) -> None:
    board, pane = opened
    points = open_run(board.catalogue.path("group/small") or "")["head"].row(4)
    middle = float(np.sort(points["mean"])[1:3].mean())
    drag(pane, hv.Points, bounds=(middle, -100.0, 100.0, 100.0))
    chosen = tuple(np.flatnonzero(points["mean"] > middle).tolist())
    assert len(chosen) == 2
    assert board.state.brush == Brush(samples=chosen)
    board.change(section="inspect")
    statistics: Any = board.screen.sections["inspect"].panes[0]
    assert statistics.view.html.count('class="brushed"') == 2
    drag(pane, hv.Points, bounds=(-200.0, -200.0, -199.0, -199.0))
    assert board.state.brush == NOTHING


def test_a_selection_brushes_steps(opened: tuple[Dashboard, Any]) -> None:
    board, pane = opened
    drag(pane, hv.Curve, bounds=(2.5, -100.0, 5.5, 100.0))
    assert board.state.brush == Brush(steps=(3, 4, 5))
    marks = [m for m in board.screen.steps.view.marks if m["title"].startswith("brushed")]
    assert [m["title"] for m in marks] == [f"brushed: step {step}" for step in (3, 4, 5)]


def test_brushed_runs_are_ticked(root: Path) -> None:
    board = Dashboard(Catalogue(root), query="?run=group/small")
    board.change(brush=Brush.of(runs=["small", "gone"]))
    assert board.state.ticked == ("group/small",)
    assert board.state.brush.runs == ("gone", "small")


def test_one_brushed_sample_is_selected(opened: tuple[Dashboard, Any]) -> None:
    board, _ = opened
    board.change(brush=Brush.of(samples=[1]))
    assert board.state.batch == "1"


def test_brushed_steps_that_were_not_recorded_have_no_flag(root: Path) -> None:
    view = RunView(open_run(root / "group" / "small"))
    brush = Brush.of(steps=[3.0, 5, 99, 4.5, "x"])
    assert brush.steps == (3, 5, 99)
    steps = view.steps("")
    assert [steps[mark.index] for mark in brushed_marks(view, "", brush)] == [3, 5]


RETURNS = {
    "holoviews": ("holoviews", "hv.Curve([1, 3, 2])", ".bk-Figure, .bk-Canvas"),
    "matplotlib": ("matplotlib", "matplotlib_figure()", ".custom-view img"),
    "bokeh": ("bokeh", "bokeh_figure()", ".bk-Figure, .bk-Canvas"),
    "hvplot": ("hvplot", "table.hvplot.line()", ".bk-Figure, .bk-Canvas"),
    "plotly": ("plotly", "plotly_figure()", ".js-plotly-plot .main-svg"),
    "altair": ("altair", "altair_chart()", ".vega-embed canvas, .vega-embed svg"),
}
"""Package, expression, and where the page shows it."""

LIBRARIES = """
import holoviews as hv, pandas as pd
from comgra_decl.viewer.custom import View

def bokeh_figure():
    from bokeh.plotting import figure
    made = figure(height=200); made.line([0, 1], [1, 2]); return made
def matplotlib_figure():
    from matplotlib.figure import Figure
    made = Figure((4, 2)); made.subplots().plot([1, 3, 2]); return made
def plotly_figure():
    import plotly.graph_objects as go
    return go.Figure(go.Scatter(y=[1, 3, 2]))
def altair_chart():
    import altair
    table = pd.DataFrame({"x": [0, 1], "y": [1, 2]})
    return altair.Chart(table).mark_line().encode(x="x:Q", y="y:Q")
def build(look):
    table = look.run.series(look.node, "std").to_frame()
    if "hvplot" in EXPRESSION: import hvplot.pandas
    return eval(EXPRESSION, globals() | {"table": table})
def views():
    return [View("It", build, reads={"node"})]
"""


@pytest.mark.browser
@pytest.mark.parametrize("library", shortened(RETURNS, tried=1))
def test_a_view_may_return_a_figure_of(
    library: str, root: Path, tmp_path: Path, serve: Callable[..., str], page: Any
) -> None:
    package, expression, place = RETURNS[library]
    pytest.importorskip(package)
    from comgra_decl.viewer.page import create_page

    file = tmp_path / f"{library}.py"
    file.write_text(f"EXPRESSION = {expression!r}\n{LIBRARIES}")
    url = serve(lambda: create_page([str(root), "--views", str(file)]))
    page.goto(url + "?section=views&run=group/small&node=head")
    page.locator(".custom-view").first.wait_for()
    page.locator(place).last.wait_for()
    assert page.locator(".notice.bad").count() == 0
