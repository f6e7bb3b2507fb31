"""The graph and two figures show what holds the memory."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.query import open_run
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.memory_use import memory_moments
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.page import create_page
from comgra_decl.viewer.palette import colour_at
from comgra_decl.viewer.panes.kpis import MOMENTS, STEPS
from tests.record.test_around import traced
from tests.record.test_profile import program
from tests.support.uncompiled import uncompiled as uncompiled  # applies to all tests here
from tests.viewer.app.test_time_use import BARS, NODES

SPEC = {**NODES, "memory": {"steps": [4, 6]}, "schedule": {"first": 100}}
HELD = ["activations", "parameters", "gradients", "optimizer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("measured")
    traced(root, program, **SPEC)
    return root


@pytest.mark.slow
def test_boxes_show_what_their_module_holds(folder: Path) -> None:
    dashboard = Dashboard(Catalogue(folder), query="?section=inspect&colour=memory")
    view, held = dashboard.screen.graph.view, open_run(folder).memory()[HELD].sum(axis=1)
    assert dashboard.state.colour == "memory"
    heat, legend = view.heat or {}, view.legend or {}
    for node in ("first", "head"):
        assert heat[node]["text"] == f"{held[node] / 1000:.3g} kB"
        assert heat[node]["fill"] == colour_at(held[node] / held["Net"])
    assert legend["high"] == f"{held['Net'] / 1000:.3g} kB"
    assert legend["title"] == "memory held in steps 4 to 6"


def test_gradients_grow_while_activations_are_released(folder: Path) -> None:
    run = open_run(folder)
    found = memory_moments(RunView(run))
    assert found is not None
    step, parts = found
    totals = run.memory(by="step").loc[step] / 1e6
    moments = run.memory(by="moment")
    before = moments.attrs["totals"]["gradients_before"] / 1e6
    peak = int(moments.sum(axis=1).to_numpy().argmax())
    assert parts["gradients"].iloc[peak] == before
    assert parts["gradients"].iloc[-1] == pytest.approx(totals["gradients"])
    assert parts["gradients"].is_monotonic_increasing
    saved = parts[[name for name in map(str, parts) if name.startswith("activations")]].sum(axis=1)
    assert saved.max() == pytest.approx(totals["activations"])


def test_files_of_the_figures_contain_every_part(folder: Path) -> None:
    dashboard = Dashboard(Catalogue(folder), query="?section=kpis")
    (pane,) = dashboard.screen.sections["kpis"].panes
    found = {each.label: each for each in pane.exhibits()}
    heads, *lines = csv.reader(found[STEPS].csv().decode().splitlines())
    table = open_run(folder).memory(by="step")[heads[1:]] / 1e6
    assert heads == ["step", "parameters", "optimizer", "gradients", "activations"]
    assert [[float(cell) for cell in line] for line in lines] == [
        [step, *row] for step, row in zip(table.index, table.to_numpy(), strict=True)
    ]
    assert MOMENTS.format(6) in found


@pytest.mark.browser
def test_each_moment_is_a_bar_of_its_parts(
    folder: Path, serve: Callable[..., str], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page(viewport={"width": 1280, "height": 800})
    page.goto(serve(lambda: create_page([str(folder)])) + "?section=kpis&colour=memory")
    page.get_by_text("parameters", exact=True).first.wait_for()
    page.wait_for_function("() => !!(window.Bokeh && Bokeh.documents[0].is_idle)")
    found = memory_moments(RunView(open_run(folder)))
    assert found is not None
    step, table = found
    code = BARS.replace('"phase"', '"part"')
    parts = page.evaluate(code, MOMENTS.format(step))
    page.screenshot(path=str(tmp_path / "memory.png"))
    for moment in table.index:
        stacked = [part for part in parts if part["step"] == moment]
        assert [part["top"] - part["bottom"] for part in stacked] == pytest.approx(
            [*table.loc[moment]], abs=1e-12
        )
    assert len({part["colour"] for part in parts}) == table.shape[1]


def test_without_a_measurement_the_graph_keeps_its_kinds(tmp_path: Path) -> None:
    traced(tmp_path, lambda: program(3), **{**NODES, "schedule": {"first": 3}})
    dashboard = Dashboard(Catalogue(tmp_path), query="?section=inspect&colour=memory")
    assert dashboard.state.colour == "kind"
