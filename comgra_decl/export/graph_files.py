"""The dependency graph in the formats of graph viewers and libraries."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from comgra_decl.errors import UnknownNameError, needed
from comgra_decl.query import Circuit, EdgeEffects, Run
from comgra_decl.sinks import Graph
from comgra_decl.sinks.graph import Edge, Node, plain

from .content import Content
from .forwarding import graph_in

DOMAIN = "comgra_decl"
"""ONNX domain of the operators, whose names are the classes of modules."""

_DTYPES = {"float32": "FLOAT", "float64": "DOUBLE", "float8_e4m3fn": "FLOAT8E4M3FN"} | {
    name: name.upper()
    for name in "float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64"
    " complex128".split()
}
_COLOURS = {
    "input": "#cfe8cf",
    "parameter": "#e3d5f0",
    "buffer": "#e3d5f0",
    "target": "#cfe8cf",
    "loss": "#f6d0c4",
}
_OTHER = "#dbe6f4"
_NEGATIVE, _POSITIVE = "#2463ad", "#d1561f"

Statistics = Mapping[str, dict[str, float]]
"""The statistics of each node's output at the last step, such as "forward.std", by node."""


def write_onnx(content: Content, to: Path) -> None:
    """Write a model whose operators are the classes of modules, for viewers such as Netron.

    Nodes without sources whose shape is known are inputs of the graph. An edge that closes a cycle
    is left out, because ONNX has no cycles; the node's attribute `cycle_from` names its source.
    """
    onnx = needed("onnx", "onnx")
    helper = onnx.helper
    graph, statistics = _graph(content), _statistics(content.run)
    nodes, closing = graph.ordered()
    sources: dict[str, list[str]] = {node.name: [] for node in nodes}
    for edge in graph.edges:
        sources[edge.sink].append(edge.source)
    consumed = {edge.source for edge in graph.edges if (edge.source, edge.sink) not in closing}
    inputs, outputs, inner, operators = [], [], [], []
    for node in nodes:
        told = _value_info(onnx, node)
        if not sources[node.name] and node.name in consumed and told is not None:
            inputs.append(told)
            continue
        inner += [told] if told is not None and node.name in consumed else []
        outputs += [told] if told is not None and node.name not in consumed else []
        cycle = [each for each in sources[node.name] if (each, node.name) in closing]
        operator = helper.make_node(
            node.label,
            [each for each in sources[node.name] if each not in cycle],
            [node.name],
            name=node.name,
            domain=DOMAIN,
            kind=node.kind,
            **statistics.get(node.name, {}),
            **({"cycle_from": cycle} if cycle else {}),
        )
        operator.attribute.extend(  # a scalar's shape is an empty list, whose type is unknown
            helper.make_attribute(f"parameter.{role}", shape, attr_type=onnx.AttributeProto.INTS)
            for role, shape in node.attributes.items()
        )
        operators.append(operator)
    run = content.run
    built = helper.make_graph(operators, run.name, inputs, outputs, value_info=inner)
    opsets = [helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("", 17)]
    model = helper.make_model(built, opset_imports=opsets, producer_name=DOMAIN, ir_version=10)
    model.doc_string = f"{run.group}/{run.name}: recorded graph, not executable"
    onnx.save(model, str(to))


def _value_info(onnx: Any, node: Node) -> Any:
    """Return the type and shape of a node's tensor; None if they are unknown or not in ONNX."""
    dtype = _DTYPES.get(node.dtype)
    if node.shape is None or dtype is None:
        return None
    return onnx.helper.make_tensor_value_info(
        node.name, getattr(onnx.TensorProto, dtype), list(node.shape)
    )


def write_graphml(content: Content, to: Path) -> None:
    """Write GraphML with networkx."""
    networkx = needed("networkx", "graphml")
    statistics = _statistics(content.run)
    found = networkx.DiGraph()
    graph = _graph(content)
    for node in graph.nodes:
        facts: dict[str, Any] = {"class": node.label, "kind": node.kind, "dtype": node.dtype}
        if node.shape is not None:
            facts["shape"] = _shape(node.shape)
        facts |= {f"parameter.{role}": _shape(shape) for role, shape in node.attributes.items()}
        found.add_node(node.name, **facts, **statistics.get(node.name, {}))
    for edge in graph.edges:
        effect = {} if edge.effect is None else {"effect": edge.effect}
        found.add_edge(edge.source, edge.sink, gradient=edge.gradient, **effect)
    networkx.write_graphml_xml(found, str(to))


def write_json(content: Content, to: Path) -> None:
    """Write node-link JSON, as networkx, D3 and others read it; NaN and infinity are strings."""
    statistics = _statistics(content.run)
    told = plain(_graph(content)) | {"multigraph": False, "run": str(content.run.path)}
    for node in told["nodes"]:
        numbers = statistics.get(node["id"], {})
        node["statistics"] = {
            name: value if math.isfinite(value) else str(value) for name, value in numbers.items()
        }
    to.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_dot(content: Content, to: Path) -> None:
    """Write DOT, the language of Graphviz; edges without a gradient are dashed."""
    graph = _graph(content)
    lines = ["digraph {", '  rankdir=LR; node [shape=box style=filled fontname="sans-serif"];']
    for node in graph.nodes:
        label = "\\n".join(_dot(line) for line in _lines(node))
        colour = _COLOURS.get(node.kind, _OTHER)
        lines.append(f'  "{_dot(node.name)}" [label="{label}" fillcolor="{colour}"];')
    most = max((abs(e.effect) for e in graph.edges if e.effect is not None), default=0.0) or 1.0
    for edge in graph.edges:
        style = _dot_style(edge, most)
        lines.append(f'  "{_dot(edge.source)}" -> "{_dot(edge.sink)}"{style};')
    to.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")


def _dot_style(edge: Edge, most: float) -> str:
    """Return the attributes of an edge; an effect has a width, and a colour for its sign.

    Args:
        edge: the edge.
        most: the largest magnitude of an effect.
    """
    if edge.effect is None:
        return "" if edge.gradient else " [style=dashed]"
    width = 0.5 + 4.5 * abs(edge.effect) / most
    colour = _NEGATIVE if edge.effect < 0 else _POSITIVE
    return f' [label="{edge.effect:.3g}" penwidth={width:.2f} color="{colour}"]'


def write_mermaid(content: Content, to: Path) -> None:
    """Write a Mermaid flowchart; in Markdown (.md), in a block that GitHub and GitLab draw."""
    graph = _graph(content)
    number = {node.name: f"n{i}" for i, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for node in graph.nodes:
        label = "<br/>".join(_mermaid(line) for line in _lines(node))
        lines.append(f'  {number[node.name]}["{label}"]')
        lines.append(f"  style {number[node.name]} fill:{_COLOURS.get(node.kind, _OTHER)}")
    for edge in graph.edges:
        arrow = "-->" if edge.gradient else "-.->"
        arrow += "" if edge.effect is None else f'|"{edge.effect:.3g}"|'
        lines.append(f"  {number[edge.source]} {arrow} {number[edge.sink]}")
    if to.suffix.lower() in (".md", ".markdown"):
        lines = ["```mermaid", *lines, "```"]
    to.write_text("\n".join(lines) + "\n", encoding="utf-8")


WRITERS: Mapping[str, Callable[[Content, Path], None]] = {
    "onnx": write_onnx,
    "graphml": write_graphml,
    "json": write_json,
    "dot": write_dot,
    "mermaid": write_mermaid,
}


def _graph(content: Content) -> Graph:
    if isinstance(content.circuit, Circuit):
        return _graph_of(content.circuit, content.run)
    found = graph_in(content.run)
    if found is None:
        raise UnknownNameError(
            "this run has no graph; record one with `graph: true` and at least one training step. "
            "If it had both, the graph of a step had too many edges, as the program's log says."
        )
    return found if content.circuit is None else _reduced(found, content.circuit)


def _reduced(graph: Graph, effects: EdgeEffects) -> Graph:
    """Return a graph with only the edges that have effects, and the nodes that they join."""
    edges = tuple(
        replace(edge, effect=effects.of([(edge.source, edge.sink)])[0])
        for edge in graph.edges
        if (edge.source, edge.sink) in effects.through
    )
    joined = {name for edge in edges for name in (edge.source, edge.sink)}
    nodes = tuple(node for node in graph.nodes if node.name in joined)
    return Graph(f"{effects.intervention}@{effects.step}", nodes, edges)


def _graph_of(circuit: Circuit, run: Run) -> Graph:
    """Return a circuit as a graph; edges within a module have no effect, and no gradient."""
    slots = run.slots
    classes = dict(zip(slots["node"], slots["module_class"], strict=True))
    nodes = [
        Node(name, classes.get(module) or "", "computed") for name, module in circuit.nodes.items()
    ]
    edges = [Edge(each.source, each.sink, True, each.effect) for each in circuit.links]
    edges += [Edge(*pair, gradient=False) for pair in circuit.parts]
    return Graph(f"{circuit.intervention}@{circuit.step}", tuple(nodes), tuple(edges))


def _statistics(run: Run) -> dict[str, dict[str, float]]:
    """Return the usual statistics of each node's output and its gradient at the last step."""
    if not len(run.steps):
        return {}
    row = run.row(int(run.steps[-1]))
    names = [name for name in ("mean", "std", "abs_max", "l2") if name in row.columns]
    found: dict[str, dict[str, float]] = {}
    keys = [tuple(key) for key in row.index]
    for (node, role, iteration, pass_), numbers in zip(keys, row[names].to_numpy(), strict=True):
        if role == "output" and iteration == 0:
            pairs = zip(names, numbers.tolist(), strict=True)
            told = {f"{pass_}.{name}": float(value) for name, value in pairs}
            found.setdefault(str(node), {}).update(told)
    return found


def _lines(node: Node) -> list[str]:
    """Return the lines of a node's label."""
    shape = [] if node.shape is None else [_shape(node.shape)]
    return [node.name, *([node.label] if node.label not in ("", node.name) else []), *shape]


def _shape(shape: tuple[int, ...]) -> str:
    return "\u00d7".join(map(str, shape)) or "scalar"


def _dot(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def _mermaid(text: str) -> str:
    """Escape what has a meaning in Mermaid or HTML as entities with codes."""
    return "".join(c if c.isalnum() or c in " ._-:()[]\u00d7" else f"#{ord(c)};" for c in text)
