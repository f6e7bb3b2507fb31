"""Graphs for the tests: random ones for properties, and one that resembles a transformer."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from comgra_decl.viewer.graph.layout import GraphNode
from comgra_decl.viewer.graph.model import KINDS

EdgeList = list[tuple[str, str, bool]]


@dataclass(frozen=True)
class Network:
    """Nodes, edges, and some of the nodes' scopes."""

    nodes: list[GraphNode]
    edges: EdgeList
    expanded: frozenset[str]

    @property
    def every_scope(self) -> frozenset[str]:
        """All scopes that exist."""
        return scopes_of(self.nodes)


def scopes_of(nodes: list[GraphNode]) -> frozenset[str]:
    """Returns all proper prefixes of the nodes' names."""
    parts = [node.name.split(".") for node in nodes]
    return frozenset(".".join(p[:depth]) for p in parts for depth in range(1, len(p)))


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Any graph: cycles, twins, wrappers, unknown kinds of order, loose ends."""
    part = st.sampled_from(["a", "b", "0", "1", "2", "3"])
    names = draw(
        st.lists(
            st.lists(part, min_size=1, max_size=4).map(".".join),
            min_size=1,
            max_size=25,
            unique=True,
        )
    )
    orders = draw(st.permutations(range(len(names))))
    titles = st.sampled_from(["", "8", "8x8"])
    nodes = [
        GraphNode(name, draw(st.sampled_from(KINDS)), order, draw(titles))
        for name, order in zip(names, orders, strict=True)
    ]
    end = st.sampled_from(names)
    edges = draw(st.lists(st.tuples(end, end, st.booleans()), max_size=60))
    if draw(st.booleans()):  # as a net without recurrence is recorded: forward, into computed nodes
        known = {node.name: node for node in nodes}
        edges = [
            (u, v, gradient) if known[u].order < known[v].order else (v, u, gradient)
            for u, v, gradient in edges
        ]
        edges = [edge for edge in edges if known[edge[1]].kind in ("computed", "loss")]
    scopes = sorted(scopes_of(nodes))
    expanded = draw(st.sets(st.sampled_from(scopes))) if scopes else set()
    return Network(nodes, edges, frozenset(expanded))


def transformer(blocks: int) -> Network:
    """Returns `input -> embed -> blocks.0 .. -> head -> loss` as hooks would record it.

    Each block has a norm, an attention layer and an MLP, a residual edge around both, and ends in
    its own node; parameters are nodes below their module.
    """
    nodes: list[GraphNode] = []
    edges: EdgeList = []

    def node(name: str, kind: str, *sources: str) -> str:
        edges.extend((source, name, True) for source in sources)
        nodes.append(GraphNode(name, kind, len(nodes), f"{name}: 4x8"))
        return name

    def linear(name: str, *sources: str) -> str:
        own = [node(f"{name}.{p}", "parameter") for p in ("weight", "bias")]
        return node(name, "computed", *sources, *own)

    x = linear("embed", node("input", "input"))
    for block in (f"blocks.{i}" for i in range(blocks)):
        norm = linear(f"{block}.norm", x)
        heads = [linear(f"{block}.attn.{name}", norm) for name in "qkv"]
        mixed = node(f"{block}.attn", "computed", *heads)
        x = node(block, "computed", x, linear(f"{block}.mlp", mixed))
    node("loss", "loss", linear("head", x), node("target", "target"))
    return Network(nodes, edges, frozenset())
