"""The graph shows the time of the profiled steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from comgra_decl.query import open_run
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.palette import colour_at
from tests.record.test_around import traced
from tests.record.test_profile import PROFILE, program
from tests.support.uncompiled import uncompiled as uncompiled  # applies to all tests here

NODES = {"nodes": {"all": {"select": "**", "capture": ["output", "output_grad"]}}, "graph": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("timed")
    traced(root, program, **{**PROFILE, **NODES})
    return root


def test_boxes_show_the_time_of_their_module(folder: Path) -> None:
    dashboard = Dashboard(Catalogue(folder), query="?section=inspect&colour=time")
    view = dashboard.screen.graph.view
    table = open_run(folder).profile().groupby(level="node")["host_ms"].sum()
    assert dashboard.state.colour == "time"
    heat, legend = view.heat or {}, view.legend or {}
    assert {"first", "head"} <= {*heat}
    for node in ("first", "head"):
        assert heat[node]["text"] == f"{number(float(table[node]))} ms"
    assert legend["title"] == "time per step on the host"
    assert legend["high"] == f"{number(float(table['Net']), digits=3)} ms"
    longest = max(("first", "head"), key=lambda node: table[node])
    assert heat[longest]["fill"] == colour_at(float(table[longest] / table["Net"]))


def test_without_a_profile_the_graph_keeps_its_kinds(tmp_path: Path) -> None:
    traced(tmp_path, lambda: program(3), **{**NODES, "schedule": {"first": 3}})
    dashboard = Dashboard(Catalogue(tmp_path), query="?section=inspect&colour=time")
    assert dashboard.state.colour == "kind"
    assert not dashboard.screen.graph.view.heat
