"""Tooltips name the tensor and format numbers as the page does; heat maps have a clear legend."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import panel as pn
import pytest
from bokeh.models import NoOverlap
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.query import Run, open_run
from comgra_decl.records import SlotInfo
from comgra_decl.viewer.model.colour_bar import bar_ticks, tick_text
from comgra_decl.viewer.model.graph import Scale
from comgra_decl.viewer.model.numbers import count, number
from comgra_decl.viewer.model.overview import overview
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.series import Curve, band
from comgra_decl.viewer.page import create_page
from comgra_decl.viewer.panes.figures import Frame
from comgra_decl.viewer.panes.hovering import NUMBER, marked
from tests.support.fake_run import FakeRun
from tests.support.shortened import shortened
from tests.viewer.app.served import turn_to

WRITTEN = re.compile(r"\u2212?\d(\.\d+)?\d*(e\u2212?\d+)?|\u2212?\d+(\.\d+)?|NaN")
SECTIONS = {
    "overview": {"tensor", "step", "value", "type"},
    "inspect": {"tensor", "step", "value", "place", "median", "lowest", "highest"}
    | {"lower quartile", "upper quartile"},
    "values": {"tensor", "row", "column", "value"},
    "compare": {"tensor", "side", "step", "value"},
    "kpis": {"tensor", "type", "step", "value"},
}


SELECTORS = {
    "values": "order",
    "compare": "other",
    "runs": "smoothing",
    "overview": "statistic",
    "explore": "against",
}
"""One of the selectors of each section that has some."""


def rows(page: Any) -> list[tuple[str, str]]:
    """Returns the label and text of each row in the visible tooltips."""
    labels, texts = (
        page.locator(f".bk-tooltip-row-{part} >> visible=true").all_inner_texts()
        for part in ("label", "value")
    )
    return [(a.strip(": "), b.strip()) for a, b in zip(labels, texts, strict=True)]


def hovered(page: Any, figure: Any, x: float, y: float) -> list[tuple[str, str]]:
    """Moves the pointer into a figure, to fractions of its width and height."""
    box = figure.bounding_box()
    page.mouse.move(box["x"] + box["width"] * x - 2, box["y"] + box["height"] * y)
    page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y)
    page.evaluate(FRAME)
    return rows(page)


@pytest.mark.browser
@pytest.mark.parametrize(
    "sections",
    shortened([["overview", "inspect"], ["values", "compare", "kpis"]], tried=1),
    ids=" ".join,
)
@pytest.mark.slow
def test_every_figure_says_what_is_under_the_pointer(
    viewer: Callable[..., Any], sections: list[str]
) -> None:
    page = viewer(
        "?run=group/small&section=overview&node=embed&step=4", ".bk-Figure >> visible=true",
        viewport={"width": 1600, "height": 1000},
    )  # fmt: skip
    for section in sections:
        turn_to(page, section)
        says_what_is_under_the_pointer(page, SECTIONS[section])


@pytest.mark.browser
@pytest.mark.slow
def test_quartiles_and_tails_under_the_pointer_are_those_of_the_values(
    viewer: Callable[..., Any], fake: FakeRun
) -> None:
    page = viewer("?run=group/small&section=inspect&node=embed&step=4")
    figure = page.locator(".bk-Figure >> visible=true").nth(1)  # distribution of the forward pass
    told = dict(hovered(page, figure, 0.5, 0.5))
    (slot,) = [s for s in fake.slots if s.key == ("embed", "output", 0, "forward")]
    values = fake.tensor(slot, int(told["step"])).astype(np.float64)
    width = np.ptp(values) / (fake.meta.bins or 1)  # of a bin
    wanted = dict(zip(QUANTILES, np.quantile(values, [0, 0.25, 0.5, 0.75, 1]), strict=True))
    for label, value in wanted.items():
        assert float(told[label].replace("\u2212", "-")) == pytest.approx(value, abs=width), label


QUANTILES = ("lowest", "lower quartile", "median", "upper quartile", "highest")


SMALL = 4.1e-06, 4.3e-06
WRITTEN_SMALL = re.compile(r"\d(\.\d+)?e[\u2212-]0?[56]")
FIGURES = {
    "overview": 3, "inspect": 6, "values": 1, "compare": 1, "runs": 3, "explore": 5, "kpis": 2,
}  # fmt: skip
"""Sections, and the number of their figures, for the run `small`."""

PLOTS: dict[str, Callable[[Run], Any]] = {
    "series": lambda run: run.plot.series("head", "mean"),
    "heat": lambda run: run.plot.heat("mean"),
    "kpis": lambda run: run.plot.kpis("loss"),
    "samples": lambda run: run.slot("head").plot.samples("mean"),
    "cloud": lambda run: run.plot.cloud("head", step=2, x="mean", y="max"),
    "preview": lambda run: run.slot("head").plot.preview(2),
    "graph": lambda run: run.plot.graph(statistic="mean"),
}


class Small(FakeRun):
    """A run in which every value is about 4.2e-06."""

    def tensor(self, slot: SlotInfo, step: int, kind: str = "train") -> Any:
        values = np.linspace(*SMALL, math.prod(slot.shape))
        return values.reshape(slot.shape).astype(np.float32)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two such runs, which differ in a setting; the folder of the first one."""
    folder = tmp_path_factory.mktemp("small") / "group"
    for name, rate in (("one", 0.1), ("two", 0.2)):
        fake = Small(
            folder / name, nodes=("embed", "head"), layers=1, config={"optimizer": {"lr": rate}}
        )
        fake.write(4)
        fake.close()
    return folder / "one"


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("section", FIGURES)
def test_small_numbers_are_told_in_every_figure_of_the_viewer(
    small: Path, serve: Callable[..., str], open_page: Callable[..., Any], section: str
) -> None:
    page = open_page(viewport={"width": 1600, "height": 1000})
    query = f"?section={section}&run=group/one&node=head&step=2&stat=mean"
    page.goto(serve(lambda: create_page([str(small.parents[1])])) + query)
    page.locator(".bk-Figure >> visible=true").nth(FIGURES[section] - 1).wait_for()
    page.wait_for_function("() => Bokeh.documents[0].is_idle")
    for _ in range(TRIES):  # the numbers of runs are read in the background
        told = told_by_each(page)
        missing = {title for title, texts in told.items() if not any(map(small_number, texts))}
        missing -= {"5 gradient \u00b7 values"}  # which the run does not have
        if not missing:
            break
    assert not missing, told
    assert len(told) == FIGURES[section]


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("plot", PLOTS)
def test_small_numbers_are_told_in_plots(
    small: Path, serve: Callable[..., str], page: Any, plot: str
) -> None:
    run = open_run(small)
    page.goto(serve(lambda: pn.panel(PLOTS[plot](run))))
    page.locator(".bk-Figure").first.wait_for()
    page.wait_for_function("() => Bokeh.documents[0].is_idle")
    (texts,) = told_by_each(page).values()
    assert any(map(small_number, texts)), texts


TRIES = 4


def small_number(text: str) -> bool:
    """Returns whether a text has one of the numbers in `Small`, and not `0.000`."""
    return WRITTEN_SMALL.search(text) is not None


def told_by_each(page: Any) -> dict[str, list[str]]:
    """Returns what tooltips of each figure say, by title, until one has a small number."""
    told = {}
    for place in range(page.evaluate(f"() => ({VISIBLE}).length")):
        title, places = page.evaluate(PLACES, place)
        texts: list[str] = []
        for x, y in places:
            page.mouse.move(x - 2, y)
            page.mouse.move(x, y)
            page.evaluate(FRAME)
            texts += [text for _, text in rows(page)]
            if any(map(small_number, texts)):
                break
        told[f"{place} {title}"] = texts
        page.mouse.move(0, 0)
    return told


FRAME = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))"
VISIBLE = """[...Bokeh.index.query((view) => view.model.type === "Figure")]
  .filter((view) => view.el.checkVisibility())"""
PLACES = f"""(number) => {{
  const view = ({VISIBLE})[number];
  view.el.scrollIntoView({{ block: "center" }});
  const {{ left, top }} = view.el.getBoundingClientRect();
  const {{ x_scale, y_scale, bbox }} = view.frame;
  const places = [0.52, 0.7, 0.3, 0.15].map(
    (share) => [bbox.left + bbox.width * 0.51, bbox.top + bbox.height * share]);
  for (const {{ glyph, data_source }} of view.model.renderers) {{
    const [xs, ys] = [["x", "xs", "left"], ["y", "ys", "top"]].map((names) => (
      names.map((name) => data_source?.data[glyph?.[name]?.field]).find((column) => column)));
    const many = glyph?.xs !== undefined;
    const [x, y] = [xs ?? [], ys ?? []].map((column) => [...((many ? column[0] : column) ?? [])]);
    places.push(...x.slice(0, 6).map((each, i) => [x_scale.compute(each), y_scale.compute(y[i])]));
  }}
  return [String(view.model.title?.text ?? ""), places.map(([x, y]) => [left + x, top + y])];
}}"""
"""Scrolls to a figure; returns its title, and places on the page where it has data."""


@pytest.mark.browser
@pytest.mark.parametrize("section", shortened(SELECTORS, tried=1))
def test_every_selector_is_explained_under_the_pointer(
    viewer: Callable[..., Any], section: str
) -> None:
    page = viewer(f"?run=group/small&section={section}&node=embed&step=4", "[data-field]")
    page.locator(f'[data-field="{SELECTORS[section]}"]').first.wait_for()
    helps = dict(page.locator("[data-field]").evaluate_all(HELPS))
    assert [name for name, text in helps.items() if len(text.split()) < 3] == []


HELPS = "(fields) => fields.map((field) => [field.dataset.field, field.title])"


def says_what_is_under_the_pointer(page: Any, labels: set[str]) -> None:
    page.locator(".bk-Figure >> visible=true").first.wait_for()
    figures = page.locator(".bk-Figure >> visible=true").all()
    told = [
        next((f for x in (0.5, 0.62, 0.4, 0.7) for y in (0.5, 0.35, 0.65)
              if (f := hovered(page, figure, x, y))), [])
        for figure in figures
    ]  # fmt: skip
    assert any(told)
    for found in filter(None, told):
        assert {label for label, _ in found} <= labels
        assert all(text for _, text in found), found
        assert dict(found)["tensor"]
        for label, text in found:
            if label == "value":
                assert WRITTEN.fullmatch(text) or text in ("not recorded", "NaN or infinite"), text
    texts = [text for found in told for label, text in found if label == "value"]
    assert not any(re.fullmatch(r"0\.0+", text) for text in texts)


@pytest.mark.slow
@pytest.mark.browser
def test_the_overview_tells_gaps_from_what_is_not_finite(viewer: Callable[..., Any]) -> None:
    page = viewer("?section=overview&node=embed&step=4", ".bk-Figure >> visible=true")
    figure = page.locator(".bk-Figure >> visible=true").first
    wanted = {"not recorded", "NaN or infinite"}
    for x, y in product((0.82, 0.35, 0.5), np.linspace(0.12, 0.85, 24)):
        wanted.discard(dict(hovered(page, figure, x, float(y))).get("value", ""))
        if not wanted:
            break
    assert not wanted


@pytest.mark.browser
def test_a_browser_writes_numbers_as_python_does(page: Any) -> None:
    rng = np.random.default_rng(3)
    values = (rng.normal(size=400) * 10.0 ** rng.integers(-12, 12, 400)).tolist()
    values += [0.0, 1.0, -0.25, 0.001, 9999.4, 4.2e-06, 1e4]
    page.goto("about:blank")
    written = page.evaluate(
        f"(values) => {{ {NUMBER}; return values.map((v) => number(v)) }}", values
    )
    exact = [a == b for a, b in zip(written, map(number, values), strict=True)]
    assert sum(exact) >= len(values) - 1  # halves may be rounded either way
    steps = [0, 7, 1000, 1234567]
    counted = page.evaluate(f"(values) => {{ {NUMBER}; return values.map(counted) }}", steps)
    assert counted == [count(step) for step in steps]


def test_marks_of_a_heat_map_are_not_nan() -> None:
    values = np.array([[1.0, math.nan, math.nan, 2.0]])
    broken = np.array([[math.nan, math.nan, 1.0, 1.0]])
    assert marked(values, broken).tolist() == [[1.0, -math.inf, math.inf, math.inf]]


@pytest.mark.parametrize(
    ("scale", "texts"),
    [
        (Scale(0.0, 1.0), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Scale(-2.0, 2.0, diverging=True), ["\u22122", "\u22121", "0", "1", "2"]),
        (Scale(1e-6, 1.0, logarithmic=True), ["1e\u22126", "1e\u22124", "0.01", "1"]),
        (Scale(3.0, 3.0), ["3"]),
    ],
)
def test_a_colour_bar_has_round_ticks(scale: Scale, texts: list[str]) -> None:
    assert list(bar_ticks(scale).values()) == texts


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_ticks_of_a_colour_bar_are_few_and_on_it(low: float, span: float) -> None:
    ticks = bar_ticks(Scale(low, low + span))
    assert len(ticks) <= 7
    assert all(0.0 <= place <= 1.0 for place in ticks)


def test_ticks_have_no_trailing_zeros() -> None:
    assert [tick_text(v) for v in (0.5, 4.2e-06, 100.0, 0.0)] == ["0.5", "4.2e\u22126", "100", "0"]


def test_both_passes_have_the_same_lines_in_the_overview(view: RunView) -> None:
    at = resolve(view, Selection(statistic="std"), {})
    forward, gradient = (overview(view, at, pass_) for pass_ in ("forward", "grad"))
    assert forward is not None
    assert gradient is not None
    assert forward.labels == gradient.labels
    for shown, pass_ in ((forward, "forward"), (gradient, "grad")):
        for line, slot in enumerate(shown.recorded):
            assert slot is not None or np.isnan(shown.values[line]).all()
            assert slot is None or slot.pass_ == pass_
    assert any(slot is None for slot in gradient.recorded)  # an input has no gradient


def test_labels_of_steps_never_overlap() -> None:
    axis: Any = Frame().figure.xaxis[0]
    assert isinstance(axis.major_label_policy, NoOverlap)


def test_line_and_band_have_the_same_gaps() -> None:
    values = np.array([1.0, 2.0, np.nan, 3.0, np.nan, 5.0, 6.0])
    line = Curve(np.arange(7) * 10, values, low=values - 0.5, high=values + 0.5)
    x, low, high = band(line)
    assert np.isfinite(np.concatenate([x, low, high])).all()
    filled = [
        (x[i], x[i + 1])
        for i in range(len(x) - 1)
        if x[i + 1] > x[i] and (high[i] > low[i] or high[i + 1] > low[i + 1])
    ]
    assert [(round(a), round(b)) for a, b in filled] == [(0, 10), (30, 30), (50, 60)]
    assert band(Curve(np.arange(2), np.ones(2)))[0].size == 0
