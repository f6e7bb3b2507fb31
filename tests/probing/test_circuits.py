"""The strongest paths of an intervention are a graph, which other programs read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import comgra_decl as comgra
from comgra_decl.cli.main import app
from comgra_decl.errors import SelectionError, UnknownNameError
from comgra_decl.export import export_run
from comgra_decl.query import Run
from tests.probing.attention import Language
from tests.probing.test_paths import HEADS_TO_READERS, WRITERS, recorded


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.manual_seed(0)
    declared = {
        "layers": {**WRITERS, "sweep": ["node", "into"]},
        "heads": {**HEADS_TO_READERS, "sweep": ["node", "head", "into", "into.position"]},
        "whole": {**WRITERS, "sweep": "node"},
        "plain": {"select": "blocks.*", "do": "zero", "sweep": "node"},
    }
    return recorded(tmp_path_factory.mktemp("runs"), Language(), declared)


@pytest.mark.slow
def test_a_circuit_has_the_strongest_paths_and_counts_the_others(run: Run) -> None:
    means = run.effects("layers", 0)["mean"].droplevel("step")
    strongest = means.abs().nlargest(6)
    circuit = run.circuit("layers", strongest=6)
    assert [(x.source, x.sink) for x in circuit.links] == strongest.index.to_list()
    assert [abs(x.effect) for x in circuit.links] == strongest.to_list()
    assert circuit.links[0].effect == means[circuit.links[0].source, circuit.links[0].sink]
    assert {*circuit.nodes} == {n for pair in strongest.index for n in pair}
    assert all(name == module for name, module in circuit.nodes.items())
    assert circuit.parts == ()  # what a layer reads and writes is one node
    assert circuit.omitted == (means != 0).sum() - 6
    above = run.circuit("layers", 0, above=strongest.iloc[2])
    assert above.links == circuit.links[:2]
    everything = run.circuit("layers")
    assert len(everything.links) == (means != 0).sum()
    assert run.circuit("layers", above=1e9).links == ()


def test_parts_are_places_of_their_own_within_what_they_belong_to(run: Run) -> None:
    circuit = run.circuit("heads", strongest=40)
    sources = {link.source for link in circuit.links}
    sinks = {link.sink for link in circuit.links}
    assert all(re.fullmatch(r"blocks\.[01]\.attn\.out, head [0-3]", name) for name in sources)
    assert all(re.fullmatch(r"(blocks\.[01]\.\w+|head), position [0-5]", name) for name in sinks)
    expected = {
        (sink, source)
        for sink in sinks
        for source in sources
        if sink.partition(", ")[0] == source.partition(".out")[0]
    }
    assert {*circuit.parts} == expected
    assert expected


@pytest.mark.parametrize(("name", "why"), [("whole", "into"), ("plain", "into"), ("leyers", "did")])
def test_what_has_no_paths_has_no_circuit(name: str, why: str, run: Run) -> None:
    with pytest.raises(UnknownNameError, match=why):
        run.circuit(name)


@pytest.mark.filterwarnings("ignore:.*deprecated - use.*:DeprecationWarning")
def test_at_least_one_path_is_asked_for(run: Run) -> None:
    with pytest.raises(SelectionError, match="strongest must be at least 1"):
        run.circuit("layers", strongest=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pydot uses old names of pyparsing
def test_graph_libraries_read_an_exported_circuit(run: Run, tmp_path: Path) -> None:
    pydot = pytest.importorskip("pydot")
    circuit = run.circuit("heads", strongest=12)
    effects = {(link.source, link.sink): link.effect for link in circuit.links}
    graphml = nx.read_graphml(export_run(run, tmp_path / "g.xml", "graphml", circuit=circuit))
    assert nx.get_edge_attributes(graphml, "effect") == effects
    assert {*graphml.edges} == {*effects, *circuit.parts}
    whole = json.loads(export_run(run, tmp_path / "g.json", "json", circuit=circuit).read_text())
    linked = nx.node_link_graph(whole, edges="edges")
    assert nx.get_edge_attributes(linked, "effect") == effects
    (dot,) = pydot.graph_from_dot_file(
        str(export_run(run, tmp_path / "g.dot", "dot", circuit=circuit))
    )
    found = {edge: (edge.get_source(), edge.get_destination()) for edge in dot.get_edges()}
    drawn = {(a.strip('"'), b.strip('"')): edge for edge, (a, b) in found.items()}
    assert {*drawn} == {*effects, *circuit.parts}
    widths = {pair: float(drawn[pair].get("penwidth")) for pair in effects}
    assert max(widths.values()) == 5.0
    assert max(widths, key=widths.__getitem__) == (circuit.links[0].source, circuit.links[0].sink)
    text = export_run(run, tmp_path / "g.mermaid", "mermaid", circuit=circuit).read_text()
    assert text.count("-->") == len(effects)
    assert all(f'|"{effect:.3g}"|' in text for effect in effects.values())
    with pytest.raises(UnknownNameError, match="choose one of graphml, json, dot, mermaid"):
        export_run(run, tmp_path / "g.onnx", "onnx", circuit=circuit)


def test_the_command_line_exports_the_paths_above_a_limit(run: Run, tmp_path: Path) -> None:
    limit = run.circuit("layers").links[4]
    where = ["export", str(run.path), str(tmp_path / "g.json"), "--format", "json"]
    limits = ["--circuit", "layers", "--above", str(abs(limit.effect)), "--strongest", "3"]
    assert CliRunner().invoke(app, [*where, *limits]).exit_code == 0
    found = json.loads((tmp_path / "g.json").read_text())
    assert len(found["edges"]) == 3


def test_a_path_lies_on_all_ways_that_avoid_other_modules(run: Run) -> None:
    effects, graph = run.edge_effects("heads"), nx.DiGraph(run.edges())
    modules = {name for pair in effects.paths for name in pair}
    means = run.effects("heads")["mean"].groupby(level=["node", "into"]).sum()
    for (source, sink), effect in effects.paths.items():
        assert effect == pytest.approx(means[source, sink], rel=1e-6)
        others = {
            name
            for name in graph
            for module in modules
            if within(name, module) and not within(source, module) and not within(sink, module)
        }
        inner = {name for name in graph if within(name, sink)} - {source}
        free = graph.subgraph({*graph} - (others - {source}))
        expected = set()
        for entry in inner & {*free}:  # the way ends where it enters the receiver
            ways = nx.all_simple_edge_paths(
                free.subgraph(({*free} - inner) | {entry}), source, entry
            )
            expected |= {edge for way in ways for edge in way}
        found = {edge for edge, pairs in effects.through.items() if (source, sink) in pairs}
        assert found == expected, (source, sink)
        assert found
    assert effects.unplaced == ()


class SharedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.act = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.c(self.act(self.b(self.act(self.a(x)))))
        return output


def test_paths_through_different_calls_of_a_shared_module_are_not_added(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = SharedActivation(), torch.randn(4, 4)
    spec = {
        "nodes": {"all": {"select": "**"}},
        "probes": {"p": {"batch": {"x": x.tolist()}}},
        "interventions": {
            "paths": {
                "of": "p",
                "select": ["a", "b"],
                "do": "zero",
                "into": ["b", "c"],
                "sweep": ["node", "into"],
                "measure": 1,
            }
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace(spec, root=tmp_path) as session:
        model(x).square().mean().backward()
        optimizer.step()
    found = comgra.open_run(session.path or "").edge_effects("paths")
    first, second = ("a", "b"), ("b", "c")  # a -> c leads through b
    assert found.through == {
        ("a", "act"): (first,),
        ("act", "b"): (first,),
        ("b", "act"): (second,),
        ("act", "c"): (second,),
    }


def within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")


def test_the_recorded_graph_is_reduced_to_edges_with_an_effect(run: Run, tmp_path: Path) -> None:
    table = run.edge_effects("heads").table()
    limit = float(table["effect"].abs().sort_values().iloc[len(table) // 2])
    wanted = table[table["effect"].abs() > limit]
    assert 0 < len(wanted) < len(table)
    target = str(tmp_path / "g.json")
    options = ["--circuit", "heads", "--on-graph", "--above", repr(limit)]
    command = ["export", str(run.path), target, "--format", "json", *options]
    assert CliRunner().invoke(app, command).exit_code == 0
    told = json.loads(Path(target).read_text())
    edges = {(e["source"], e["target"]): e["effect"] for e in told["edges"]}
    assert edges == pytest.approx(wanted["effect"].to_dict())
    assert {n["id"] for n in told["nodes"]} == {name for edge in edges for name in edge}
    effects = run.edge_effects("heads", above=limit)
    graphml = nx.read_graphml(export_run(run, tmp_path / "g.xml", "graphml", circuit=effects))
    assert {*graphml.edges} == {*edges}
    dot = export_run(run, tmp_path / "g.dot", "dot", circuit=effects).read_text()
    assert dot.count(" -> ") == len(edges)
    mermaid = export_run(run, tmp_path / "g.mmd", "mermaid", circuit=effects).read_text()
    assert mermaid.count("-->") + mermaid.count("-.->") == len(edges)
    alone = CliRunner().invoke(app, [*command[:2], str(tmp_path / "h"), "--on-graph"])
    assert alone.exit_code == 2
