"""Custom views from other libraries, views that follow the page, and brushing."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import holoviews as hv
import numpy as np
import pandas as pd
import pytest

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import open_run
from comgra_decl.viewer.custom import ViewsFile
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.linking import Links
from comgra_decl.viewer.model.brushing import NOTHING, Brush, brushed_marks
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.plotting import shaded
from tests.viewer.app.served import turn_to

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

ROOT = Path(__file__).parents[3]

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
    linkers = pane._links._linkers.values()
    streams = [pair for linker in linkers for pair in linker._selection_expr_streams.items()]
    sequence = next(stream for element, stream in streams if type(element) is kind)
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
    "matplotlib": ("matplotlib", "matplotlib_figure()", "img"),
    "bokeh": ("bokeh", "bokeh_figure()", ".bk-Figure, .bk-Canvas"),
    "hvplot": ("hvplot", "table.hvplot.line()", ".bk-Figure, .bk-Canvas"),
    "plotly": ("plotly", "plotly_figure()", ".js-plotly-plot .main-svg"),
    "altair": ("altair", "altair_chart()", ".vega-embed canvas, .vega-embed svg"),
    "datashader": ("datashader", "many_points()", ".bk-Figure, .bk-Canvas"),
}
"""Package, expression, and where the card shows it."""

LIBRARIES = """
import functools
import holoviews as hv, numpy as np, pandas as pd
from comgra_decl.viewer.custom import View
from comgra_decl.viewer.plotting import shaded

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
def many_points():
    return shaded(hv.Points(np.random.default_rng(0).normal(size=(120_000, 2))))
def build(look, expression):
    table = look.run.series(look.node, "std").to_frame()
    if "hvplot" in expression: import hvplot.pandas
    return eval(expression, globals() | {"table": table})
def views():
    return [View(name, functools.partial(build, expression=text), reads={"node"})
            for name, text in EXPRESSIONS.items()]
"""


def test_elements_are_linked_by_the_column_of_their_own_kind() -> None:
    told: list[Brush] = []
    links = Links(lambda *, brush: told.append(brush))
    table = pd.DataFrame({"step": [0, 5, 9], "loss": [3.0, 2.0, 1.0], "sample": [2, 1, 0]})
    points = hv.Points(table, ["loss", "step"], ["sample"])
    curve = hv.Curve(table, "step", "loss")
    shift = hv.streams.Stream.define("Shift", by=0)()
    moving = hv.DynamicMap(
        lambda by: hv.Points(table.assign(sample=table["sample"] + by), ["loss", "step"], "sample"),
        streams=[shift],
    )
    for element in (points, curve, moving):
        hv.render(links.link(element))
    hv.render(links.link(points, by="step"))
    assert links._linkers.keys() == {"sample", "step"}
    shift.event(by=10)
    links._linkers["sample"].selection_expr = hv.dim("sample").isin([0, 11])
    assert told[-1] == Brush(samples=(0, 11))
    links._linkers["step"].selection_expr = hv.dim("step") > 4
    assert told[-1] == Brush(samples=(0, 11), steps=(5, 9))


def test_an_element_without_such_a_column_cannot_be_linked() -> None:
    links = Links(lambda **_: None)
    with pytest.raises(UnknownNameError, match=r"without a dimension sample, run or step.* x, y"):
        links.link(hv.Curve([1, 2]))
    with pytest.raises(UnknownNameError, match="without a dimension 'place'"):
        links.link(hv.Curve(([1, 2], [3, 4]), "step", "loss"), by="place")


@pytest.mark.slow
def test_a_box_in_an_image_of_many_points_selects_them() -> None:
    pytest.importorskip("datashader")
    told: list[Brush] = []
    links = Links(lambda *, brush: told.append(brush))
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.uniform(size=(100_001, 2)), columns=["mean", "std"])
    table["sample"] = np.arange(len(table)) % 400
    linked = links.link(shaded(hv.Points(table, ["mean", "std"], ["sample"])))
    few = hv.Points(pd.DataFrame({"x": range(400), "y": 0, "sample": range(400)}), ["x", "y"])
    beside = links.link(few.clone(vdims=["sample"]))
    hv.render(linked)
    hv.render(beside)
    (box,) = (
        stream
        for streams in hv.streams.Stream.registry.values()
        for stream in streams
        if type(stream) is hv.streams.BoundsXY
    )
    box.event(bounds=(0.1, 0.2, 0.12, 0.22))
    inside = table["mean"].between(0.1, 0.12) & table["std"].between(0.2, 0.22)
    expected = (*sorted({*table["sample"][inside]}),)
    assert 10 < len(expected) < 200
    assert told == [Brush(samples=expected)]
    assert {*beside[()].Points.II["sample"]} == {*expected}
    marked = linked[()].traverse(lambda part: part, [hv.Points])[-1]
    assert 2_000 < len(marked) <= 5_000, "marks some of the points of these samples"
    assert {*marked["sample"]} <= {*expected}


@pytest.mark.browser
@pytest.mark.slow
def test_views_may_return_figures_of_many_libraries(
    root: Path, tmp_path: Path, serve: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    from comgra_decl.viewer.page import create_page

    here = {name: each for name, each in RETURNS.items() if find_spec(each[0]) is not None}
    expressions = {name: expression for name, (_, expression, _) in here.items()}
    (tmp_path / "views.py").write_text(f"EXPRESSIONS = {expressions!r}\n{LIBRARIES}")
    url = serve(lambda: create_page([str(root), "--views", str(tmp_path / "views.py")]))
    page = open_page(viewport={"width": 1400, "height": 2000})
    page.goto(url + "?section=views&run=group/small&node=head")
    for name, (_, _, place) in here.items():
        card_of(page, name).locator(place).last.wait_for()
    assert page.locator(".notice.bad").count() == 0
    if "datashader" in here:
        kinds = "() => [...Bokeh.documents[0]._all_models.values()].map((model) => model.type)"
        assert "ImageRGBA" in page.evaluate(kinds)
    if missing := RETURNS.keys() - here.keys():
        pytest.skip(f"not installed, therefore not tried: {', '.join(sorted(missing))}")


RUNS = """
import pandas as pd

documented = views

def trials(look):
    table = pd.DataFrame({"lr": [1.0, 2.0, 3.0], "loss": [3.0, 1.0, 2.0]})
    return look.link(hv.Points(table.assign(run=["a", "small", "c"]), ["lr", "loss"], ["run"]))

def views():
    return [*documented()[1:], View("Trials", trials, reads={"run"})]
"""


@pytest.fixture
def linked(root: Path, tmp_path: Path, serve: Callable[..., str], page: Any) -> Any:
    """A page with the linked views of the documentation, and one of runs."""
    from comgra_decl.viewer.page import create_page

    text = (ROOT / "docs" / "viewer.md").read_text(encoding="utf-8")
    (example,) = (part for part in text.split("```") if '"""my_linked_views.py"""' in part)
    file = tmp_path / "linked.py"
    file.write_text(example.removeprefix("python\n") + RUNS)
    url = serve(lambda: create_page([str(root), "--views", str(file)]))
    page.goto(url + "?section=views&run=group/small&node=head&step=4")
    page.locator(".custom-view .bk-Figure").nth(2).wait_for()
    page.wait_for_function("() => Bokeh.documents[0].is_idle")
    return page


def card_of(page: Any, title: str) -> Any:
    """Return the card of a custom view."""
    return page.locator(".custom-view", has=page.get_by_role("heading", name=title, exact=True))


def figure_of(page: Any, title: str) -> Any:
    """Return the figure of a custom view."""
    return card_of(page, title).locator(".bk-Figure").first


def drag_in(page: Any, figure: Any, *, of: tuple[float, float], to: tuple[float, float]) -> None:
    """Drag a box in a figure, between shares of its width and height."""
    figure.scroll_into_view_if_needed()
    box = figure.bounding_box()
    (x0, y0), (x1, y1) = (
        (box["x"] + box["width"] * x, box["y"] + box["height"] * y) for x, y in (of, to)
    )
    page.mouse.move(x0, y0)
    page.mouse.down()
    page.mouse.move(x1, y1, steps=4)
    page.mouse.up()


@pytest.mark.browser
@pytest.mark.slow
def test_boxes_in_unlike_views_mark_samples_steps_and_runs(linked: Any) -> None:
    page = linked
    flags = page.locator("svg title").filter(has_text="brushed")
    expect(flags).to_have_count(0)
    drag_in(page, figure_of(page, "Cloud"), of=(0.14, 0.13), to=(0.92, 0.83))
    drag_in(page, figure_of(page, "Loss"), of=(0.3, 0.2), to=(0.6, 0.7))
    expect(flags).not_to_have_count(0)
    some = flags.count()
    assert 2 <= some <= 6, "the range contains a third of the twelve steps"
    drag_in(page, figure_of(page, "Trials"), of=(0.3, 0.1), to=(0.7, 0.9))
    expect(page).to_have_url(re.compile("tick=group%2Fsmall"), timeout=30_000)
    turn_to(page, "inspect")
    expect(page.locator("tr.brushed")).to_have_count(4)
    expect(flags).to_have_count(some)
    turn_to(page, "runs")
    expect(page.get_by_label("Tick group/small")).to_be_checked()
    turn_to(page, "views")
    figure_of(page, "Cloud").locator(".bk-tool-icon-reset").first.click()
    expect(flags).to_have_count(some)
    turn_to(page, "inspect")
    expect(page.locator("tr.brushed")).to_have_count(0)
