"""The edges of the graph show the effects of an intervention's paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.numbers import number
from tests.probing.attention import TOKENS, Language

PATHS = {
    "of": "eyes",
    "select": "blocks.*.attn",
    "do": {"patch": "other"},
    "into": ["blocks.*.attn", "blocks.*.mlp", "head"],
}
SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**"}},
    "schedule": {"first": 100},
    "probes": {"eyes": {"samples": {"count": 4}, "schedule": {"first": 0, "every": 2}}},
    "interventions": {
        "paths": {**PATHS, "sweep": ["node", "into"]},
        "guess": {**PATHS, "sweep": ["node", "into"], "estimate": "gradient"},
        "whole": {**PATHS, "sweep": "node"},
    },
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with comgra.trace(SPEC, root=folder):
        for _ in range(3):
            tokens = torch.randint(TOKENS, (6, 5))
            optimizer.zero_grad()
            logits = model(tokens)
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    return folder


def drawn(root: Path, query: str) -> tuple[Any, dict[tuple[str, str], dict[str, Any]]]:
    dashboard = Dashboard(Catalogue(root), query=f"?section=inspect&{query}")
    view = dashboard.screen.graph.view
    return view, {tuple(paint["edge"]): paint for paint in view.flow}


@pytest.mark.parametrize("name", ["paths", "guess"])  # path patching, and its attribution
def test_edges_have_the_sum_of_the_paths_through_them(root: Path, name: str) -> None:
    names = "&open=".join(("blocks", "blocks.0", "blocks.1"))
    view, flow = drawn(root, f"step=1&colour=effects:{name}&open={names}")
    run = comgra.open_run(root)
    table = run.edge_effects(name, 0).table()  # the nearest record
    other = run.edge_effects("guess" if name == "paths" else "paths", 0).table()
    assert not table["effect"].equals(other["effect"])
    box = {node: each["id"] for each in view.scene["boxes"] for node in each["members"]}
    rows = table["effect"].reset_index().itertuples(index=False)
    between = {(a, b): value for a, b, value in rows if box[a] != box[b]}
    assert len(between) > 5
    largest = max(abs(value) for value in between.values())
    for (source, sink), value in between.items():
        paint = flow[box[source], box[sink]]
        assert f"effect {number(value)} \u00b7 " in paint["text"]
        assert paint["width"] == pytest.approx(1.5 + 7.5 * abs(value) / largest, abs=0.01)
    assert len(flow) == len({(box[a], box[b]) for a, b in between})
    assert view.legend["title"] == f"effects of {name} on loss, step 0"
    assert view.legend["high"] == number(largest, digits=3)
    assert view.heat is None


def test_folded_groups_count_each_path_once(root: Path) -> None:
    _, flow = drawn(root, "step=2&colour=effects:paths&open=blocks")
    paths = comgra.open_run(root).edge_effects("paths", 2).paths
    out = {pair: v for pair, v in paths.items() if pair[0] == "blocks.0.attn"}
    beyond = sum(v for (_, sink), v in out.items() if not sink.startswith("blocks.0"))
    (paint,) = [p for edge, p in flow.items() if edge == ("blocks.0", "blocks.1")]
    assert f"effect {number(beyond)} \u00b7 3 paths" in paint["text"]
    assert "blocks.0.attn \u2192 " in paint["text"]


@pytest.mark.slow
def test_only_interventions_with_paths_are_offered(root: Path) -> None:
    view, flow = drawn(root, "step=2&colour=effects:whole")
    assert (flow, view.legend) == ({}, None)
    dashboard = Dashboard(Catalogue(root), query="?section=inspect&colour=effects:whole")
    assert dashboard.state.colour == "kind"
    dashboard = Dashboard(Catalogue(root), query="?section=inspect&colour=effects:paths")
    assert dashboard.state.colour == "effects:paths"


def test_a_run_without_a_graph_says_so_in_the_legend(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with comgra.trace({**SPEC, "schedule": {"every": 1}, "graph": False}, root=tmp_path):
        for _ in range(2):
            model(torch.randint(TOKENS, (6, 5))).square().mean().backward()
            optimizer.step()
    view, flow = drawn(tmp_path, "step=0&colour=effects:paths")
    assert flow == {}
    assert "the run has no graph; record one with `graph: true`" in view.legend["title"]
