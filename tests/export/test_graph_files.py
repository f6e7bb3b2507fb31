"""Libraries for graphs read the recorded graph back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

from comgra_decl.errors import UnknownNameError
from comgra_decl.export import export_run
from comgra_decl.query import Run, open_run
from comgra_decl.records import SlotInfo, SlotKey, Structure
from comgra_decl.sinks import graph_of
from comgra_decl.store import RunWriter
from tests.store.truth import Truth
from tests.support.fake_run import FakeRun

pydots_own = pytest.mark.filterwarnings("ignore:.*deprecated - use.*:DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    fake = FakeRun(tmp_path_factory.mktemp("graph") / "run", layers=1)
    fake.write(8)
    fake.close()
    return open_run(fake.path)


def statistics(run: Run, node: str) -> dict[str, float]:
    series = run.series(node, "std")
    return {"forward.std": float(series.iloc[-1])}


def shapes(run: Run) -> dict[str, tuple[int, ...]]:
    outputs = run.slots.query("role == 'output' and `pass` == 'forward'")
    return dict(zip(outputs["node"], outputs["shape"], strict=True))


def classes(run: Run) -> dict[str, str]:
    return {n: c for n, c in zip(run.slots["node"], run.slots["module_class"], strict=True) if c}


def test_onnx_accepts_the_graph_with_classes_shapes_and_statistics(
    run: Run, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    path = export_run(run, tmp_path / "graph.onnx", "onnx")
    onnx.checker.check_model(str(path))
    graph = onnx.load(str(path)).graph
    edges = {(source, node.name) for node in graph.node for source in node.input}
    assert edges == set(run.edges())
    assert {n.name: n.op_type for n in graph.node}.items() >= {
        name: kind for name, kind in classes(run).items() if name in {n.name for n in graph.node}
    }.items()
    told = {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    known = shapes(run)
    assert len(told.keys() & known.keys()) > 10
    assert all(told[name] == known[name] for name in told.keys() & known.keys())
    (head,) = [node for node in graph.node if node.name == "head"]
    found = {a.name: onnx.helper.get_attribute_value(a) for a in head.attribute}
    expected = statistics(run, "head")
    assert np.float32(found["forward.std"]) == np.float32(expected["forward.std"])
    parameters = run.slots.query("node == 'head' and kind == 'parameter' and `pass` == 'forward'")
    for role, shape in zip(parameters["role"], parameters["shape"], strict=True):
        assert tuple(found[f"parameter.{role}"]) == shape


@pytest.mark.parametrize("format_", ["graphml", "json"])
def test_networkx_reads_the_graph(run: Run, tmp_path: Path, format_: str) -> None:
    path = export_run(run, tmp_path / "graph", format_)
    found: Any
    if format_ == "graphml":
        found = nx.read_graphml(path)
        told = found.nodes["head"]
    else:
        found = nx.node_link_graph(json.loads(path.read_text()), edges="edges")
        told = found.nodes["head"]["statistics"]
    assert set(found.edges) == set(run.edges())
    assert {n: found.nodes[n]["class"] for n in classes(run) if n in found} == {
        n: c for n, c in classes(run).items() if n in found
    }
    assert told["forward.std"] == statistics(run, "head")["forward.std"]
    structure = run.structure()
    assert structure is not None
    carrying = {
        (structure.keys[a].node, structure.keys[b].node) for a, b, grad in structure.edges if grad
    }
    assert {(a, b) for a, b, data in found.edges(data=True) if data["gradient"]} == {
        pair for pair in carrying if pair[0] != pair[1]
    }


@pydots_own
def test_pydot_reads_the_graph(run: Run, tmp_path: Path) -> None:
    pydot = pytest.importorskip("pydot")
    (found,) = pydot.graph_from_dot_data(export_run(run, tmp_path / "g", "dot").read_text())
    edges = {(e.get_source().strip('"'), e.get_destination().strip('"')) for e in found.get_edges()}
    assert edges == set(run.edges())


def test_a_mermaid_flowchart_has_every_edge(run: Run, tmp_path: Path) -> None:
    text = export_run(run, tmp_path / "g", "mermaid").read_text()
    assert text.startswith("flowchart LR\n")
    names = {
        n: label.split("<br/>")[0] for n, label in re.findall(r'^  (n\d+)\["(.*)"\]$', text, re.M)
    }
    edges = {
        (names[a], names[b]) for a, b in re.findall(r"^  (n\d+) (?:-->|-\.->) (n\d+)$", text, re.M)
    }
    assert edges == set(run.edges())


def test_in_markdown_a_flowchart_is_a_fenced_block(run: Run, tmp_path: Path) -> None:
    bare = export_run(run, tmp_path / "g.mmd", "mermaid").read_text()
    assert bare.startswith("flowchart LR\n")
    assert export_run(run, tmp_path / "g.md", "mermaid").read_text() == f"```mermaid\n{bare}```\n"


HOSTILE = ['a"]; b["', "x -->|y| z", "<b>&amp;</b>", "back\\slash", "größe\n2", "end"]


@pydots_own
def test_names_cannot_break_out_of_their_quotes(tmp_path: Path) -> None:
    pydot = pytest.importorskip("pydot")

    slots = [
        SlotInfo(i, SlotKey(name, "output", 0, "forward"), "computed", "float32", (2,), 0, "Linear")
        for i, name in enumerate(HOSTILE)
    ]
    edges = [(i, i + 1, True) for i in range(len(slots) - 1)]
    run = stored(tmp_path / "run", slots, edges)
    assert len(run.edges()) == len(edges)
    (found,) = pydot.graph_from_dot_data(export_run(run, tmp_path / "dot", "dot").read_text())
    assert len(found.get_edges()) == len(edges)
    assert len(found.get_nodes()) == len(slots) + 1  # and the defaults of all nodes
    mermaid = export_run(run, tmp_path / "mermaid", "mermaid").read_text().splitlines()
    assert len(mermaid) == 1 + 2 * len(slots) + len(edges)
    assert all(line.count('"') in (0, 2) for line in mermaid)
    assert set(nx.read_graphml(export_run(run, tmp_path / "g", "graphml")).edges) == {*run.edges()}


def stored(path: Path, slots: list[SlotInfo], edges: list[tuple[int, int, bool]]) -> Run:
    """Return a run of one record with this graph."""
    truth = Truth()
    batch = truth.batch(1, range(len(slots)))
    batch.new_slots = slots
    kinds = [slot.kind for slot in slots]
    batch.new_structures = [Structure("aaaa", [slot.key for slot in slots], kinds, edges)]
    batch.steps[0].structure = "aaaa"
    writer = RunWriter.create(path, truth.meta)
    writer.commit([batch])
    writer.close()
    return open_run(path)


@pytest.mark.parametrize("format_", ["onnx", "graphml", "json", "dot", "mermaid"])
def test_a_scalar_parameter_has_an_empty_shape(tmp_path: Path, format_: str) -> None:
    facts: list[tuple[str, str, str, tuple[int, ...]]] = [
        ("x", "output", "input", (4, 3)),
        ("scale", "output", "computed", (4, 3)),
        ("scale", "factor", "parameter", ()),
    ]
    slots = [
        SlotInfo(i, SlotKey(node, role, 0, "forward"), kind, "float32", shape, None, "Scale")
        for i, (node, role, kind, shape) in enumerate(facts)
    ]
    run = stored(tmp_path / "run", slots, [(0, 1, True), (2, 1, True)])
    path = export_run(run, tmp_path / "graph", format_)
    if format_ == "onnx":
        onnx = pytest.importorskip("onnx")
        onnx.checker.check_model(str(path))
        (node,) = onnx.load(str(path)).graph.node
        found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert list(found["parameter.factor"]) == []
    elif format_ == "json":
        told = {node["id"]: node for node in json.loads(path.read_text())["nodes"]}
        assert told["scale"]["parameters"] == {"factor": []}
    elif format_ == "graphml":
        assert nx.read_graphml(path).nodes["scale"]["parameter.factor"] == "scalar"
    else:
        assert "scale" in path.read_text()


def test_a_cycle_is_opened_where_it_closes() -> None:
    keys = [SlotKey(name, "output", 0, "forward") for name in ("in", "cell", "gate", "out")]
    edges = [(0, 1, True), (1, 2, True), (2, 1, True), (2, 3, True)]
    graph = graph_of(Structure("h", keys, ["computed"] * 4, edges), [])
    order, closing = graph.ordered()
    assert [node.name for node in order] == ["in", "cell", "gate", "out"]
    assert closing == {("gate", "cell")}


def test_a_run_without_a_graph_says_what_to_record(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run")
    with pytest.raises(UnknownNameError, match="graph: true"):
        export_run(open_run(fake.path), tmp_path / "g", "dot")
    fake.close()
