"""The graph and a figure show the time of the profiled steps."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from comgra_decl.hooks.scalars import automatic
from comgra_decl.query import open_run
from comgra_decl.records import PROGRAM
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.page import create_page
from comgra_decl.viewer.palette import colour_at
from comgra_decl.viewer.panes.kpis import TIMES
from tests.record.test_around import traced
from tests.record.test_profile import FIRST, LAST, PROFILE, program
from tests.support.uncompiled import uncompiled as uncompiled  # applies to all tests here
from tests.viewer.app.test_hovering import rows

NODES = {"nodes": {"all": {"select": "**", "capture": ["output", "output_grad"]}}, "graph": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("timed")
    traced(root, program, **{**PROFILE, **NODES})
    return root


@pytest.mark.slow
def test_boxes_show_the_time_of_their_module(folder: Path) -> None:
    dashboard = Dashboard(Catalogue(folder), query="?section=inspect&colour=time")
    view = dashboard.screen.graph.view
    table = open_run(folder).profile().groupby(level="node")["host_ms"].sum()
    assert dashboard.state.colour == "time"
    heat, legend = view.heat or {}, view.legend or {}
    assert {"first", "head"} <= {*heat}
    for node in ("first", "head"):
        assert heat[node]["text"] == f"{number(float(table[node]))} ms"
    assert legend["title"] == f"time per step on the host in steps {FIRST} to {LAST}"
    assert legend["high"] == f"{number(float(table['Net']), digits=3)} ms"
    longest = max(("first", "head"), key=lambda node: table[node])
    assert heat[longest]["fill"] == colour_at(float(table[longest] / table["Net"]))


def test_time_outside_the_modules_does_not_set_the_scale(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def mostly_outside() -> None:
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(LAST + 2):
            out = model(torch.randn(4, 2))
            for _ in range(500):
                out = out.sin()
            out.sum().backward()
            optimizer.step()

    run = traced(tmp_path, mostly_outside, **{**PROFILE, **NODES})
    table = run.profile()
    outside = table.loc[(PROGRAM, "backward"), "host_ms"]
    (module,) = {*table.index.get_level_values("node")} - {PROGRAM}
    time = table.loc[module]["host_ms"].sum()
    assert outside > time, "the program should spend its time outside the module"
    dashboard = Dashboard(Catalogue(tmp_path), query="?section=inspect&colour=time")
    legend = dashboard.screen.graph.view.legend or {}
    assert legend["high"] == f"{number(float(time), digits=3)} ms"


def test_without_a_profile_boxes_show_the_forward_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "FIRST_MODULES", 0.0)
    run = traced(tmp_path, lambda: program(12), **{**NODES, "schedule": {"first": 1, "every": 4}})
    times = run.module_times()["forward_ms"]
    dashboard = Dashboard(Catalogue(tmp_path), query="?section=inspect&colour=time")
    heat, legend = (dashboard.screen.graph.view.heat or {}, dashboard.screen.graph.view.legend)
    assert heat["first"]["text"] == f"{number(float(times['first']))} ms"
    assert legend is not None
    assert legend["title"] == "forward time per step on the host, mean of 1 step"


PHASES = ["data", "forward", "backward", "optimizer", "other"]

BARS = """title => {
  const [view] = Bokeh.index.query((each) => each.model.title?.text === title);
  view.el.scrollIntoView({ block: "end" });
  const { x_scale, y_scale } = view.frame;
  const { left, top } = view.el.getBoundingClientRect();
  return view.model.renderers.filter((each) => each.glyph.type === "VBar").map((each) => {
    const [x, bottom, high, phase] = ["x", "bottom", "top", "phase"].map(
      (name) => [...each.data_source.get_column(name)]);
    return x.map((step, i) => ({
      step, bottom: bottom[i], top: high[i], phase: phase[i], colour: each.glyph.fill_color.value,
      at: [left + x_scale.compute(step), top + y_scale.compute((bottom[i] + high[i]) / 2)],
    }));
  }).flat();
}"""
"""Scrolls to the bars and returns their parts: the numbers, and where they are on the page."""


HEIGHTS = """() => [...Bokeh.index.query((view) => view.model.type === "Figure")]
  .map((view) => view.el.getBoundingClientRect().height).filter((height) => height > 0)"""


def expected_phases(folder: Path) -> pd.DataFrame:
    return open_run(folder).profile(by="step")[PHASES]


@pytest.mark.slow
@pytest.mark.browser
def test_each_profiled_step_is_a_bar_of_its_phases(
    folder: Path, serve: Callable[..., str], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page(viewport={"width": 1400, "height": 840})
    page.goto(serve(lambda: create_page([str(folder)])) + "?section=kpis")
    page.get_by_text("optimizer", exact=True).wait_for()
    page.wait_for_function("() => !!(window.Bokeh && Bokeh.documents[0].is_idle)")
    heights = page.evaluate(HEIGHTS)
    assert len(heights) > 3, "the figures need several rows"
    assert max(heights) < 420, "several rows should fit on the screen"
    table, parts = expected_phases(folder), page.evaluate(BARS, TIMES)
    assert [part["phase"] for part in parts[:: len(table)]] == PHASES
    assert len({part["colour"] for part in parts}) == len(PHASES)
    for step in range(FIRST, LAST + 1):
        stacked = [part for part in parts if part["step"] == step]
        assert [part["top"] - part["bottom"] for part in stacked] == pytest.approx(
            [*table.loc[step]]
        )
        assert [part["bottom"] for part in stacked] == pytest.approx(
            [0, *table.loc[step].cumsum()[:-1]]
        )
    largest = max(parts, key=lambda part: part["top"] - part["bottom"])
    page.mouse.move(largest["at"][0] - 2, largest["at"][1])
    page.mouse.move(*largest["at"])
    page.locator(".bk-tooltip-row-value >> visible=true").first.wait_for()
    page.screenshot(path=str(tmp_path / "times.png"))
    step, phase = largest["step"], largest["phase"]
    time = float(table.loc[step, phase])
    assert rows(page) == [
        ("step", str(step)),
        ("phase", phase),
        ("time", f"{number(time)} ms"),
        ("share", f"{time / table.loc[step].sum():.1%}"),
    ]


def test_the_figures_file_contains_every_phase(folder: Path, tmp_path: Path) -> None:
    dashboard = Dashboard(Catalogue(folder), query="?section=kpis")
    (pane,) = dashboard.screen.sections["kpis"].panes
    found = {each.label: each for each in pane.exhibits()}
    heads, *lines = csv.reader(found[TIMES].csv().decode().splitlines())
    table = expected_phases(folder)
    assert heads == ["step", *PHASES]
    assert [[float(cell) for cell in line] for line in lines] == [
        [step, *row] for step, row in zip(table.index, table.to_numpy(), strict=True)
    ]
    traced(tmp_path, lambda: program(3), **{**NODES, "schedule": {"first": 3}})
    plain = Dashboard(Catalogue(tmp_path), query="?section=kpis")
    (pane,) = plain.screen.sections["kpis"].panes
    assert [each.label for each in pane.exhibits()] == ["loss", "lr", "memory/host"]


def test_without_times_the_graph_keeps_its_kinds(tmp_path: Path) -> None:
    traced(tmp_path, lambda: program(3), **{**NODES, "schedule": {"first": 3}})
    dashboard = Dashboard(Catalogue(tmp_path), query="?section=inspect&colour=time")
    assert dashboard.state.colour == "kind"
    assert not dashboard.screen.graph.view.heat
