"""Quiet nodes: parameters and small modules that are drawn as part of their neighbour's box.

Parameters and buffers belong to the module that reads them. Modules that compute nothing of their
own (identity, dropout) or only apply a function to each value (activations) belong to the module
whose output they receive. Half of the modules in a typical network are of this kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from comgra_decl.viewer.graph.model import GraphNode

_SILENT = r"Identity|\w*Drop(out|Path|Connect|Block)\w*|StochasticDepth"
_ACTIVATION = (
    r"\w*Activation|(Leaky|P|R)?ReLU6?|[CS]?ELU|GELU\w*|SiLU|Swish|Mish|Sigmoid|LogSigmoid"
    r"|Hard([sS]hrink|[sS]igmoid|[sS]wish|[tT]anh|Mish)|Soft(plus|shrink|sign)|Tanh(shrink)?"
    r"|Threshold"
)
"""Classes in torch, torchvision, timm and transformers that apply a function to each value."""

Edges = Iterable[tuple[str, str, bool]]


def is_quiet(module: str) -> bool:
    """Return whether a module of this class is drawn as part of its neighbour."""
    return re.fullmatch(f"{_SILENT}|{_ACTIVATION}", module) is not None


def is_activation(module: str) -> bool:
    """Return whether a module of this class applies a function to each value."""
    return re.fullmatch(_ACTIVATION, module) is not None


def hosts(nodes: Sequence[GraphNode], edges: Edges) -> dict[str, str]:
    """Return the node that each quiet module joins.

    This is the only node that it reads, if that is in the same scope, and otherwise its only
    reader. A module stays alone if it reads several nodes (a residual branch and its shortcut), has
    no such neighbour, or has its own parameters or parts.
    """
    kinds = {node.name: node.kind for node in nodes}
    before, after = _neighbours(kinds, edges)
    parents = {node.name.rpartition(".")[0] for node in nodes}
    found: dict[str, str] = {}
    for node in sorted(nodes, key=lambda node: node.order):
        name = node.name
        if node.kind != "computed" or name in parents or not is_quiet(node.module):
            continue
        if len(before.get(name, [])) > 1:
            continue
        for near in (before.get(name, []), after.get(name, [])):
            if len(near) == 1 and _are_siblings(name, near[0]) and kinds[near[0]] == "computed":
                host = found.get(near[0], near[0])
                if host != name:
                    found[name] = host
                    break
    return _resolved(found)


def owned(nodes: Sequence[GraphNode], edges: Edges) -> set[str]:
    """Return the parameters and buffers that only their own module reads."""
    kinds = {node.name: node.kind for node in nodes}
    after: dict[str, set[str]] = {}
    for source, sink, _ in edges:
        if kinds.get(source) in ("parameter", "buffer") and sink in kinds:
            after.setdefault(source, set()).add(sink)
    return {
        name
        for name, kind in kinds.items()
        if kind in ("parameter", "buffer")
        and kinds.get(name.rpartition(".")[0]) == "computed"
        and after.get(name, set()) <= {name.rpartition(".")[0]}
    }


def _neighbours(
    kinds: Mapping[str, str], edges: Edges
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return what each node reads, apart from parameters, and which nodes read it."""
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}
    for source, sink, _ in edges:
        known = source in kinds and sink in kinds and source != sink
        if known and kinds[source] not in ("parameter", "buffer"):
            before.setdefault(sink, []).append(source)
            after.setdefault(source, []).append(sink)
    return before, after


def _are_siblings(one: str, other: str) -> bool:
    return one.rpartition(".")[0] == other.rpartition(".")[0]


def _resolved(found: dict[str, str]) -> dict[str, str]:
    """Follow hosts that themselves joined another node; hosts that form a cycle stay apart."""
    ends: dict[str, str] = {}
    for name in found:
        seen, host = {name}, found[name]
        while host in found and host not in seen:
            seen.add(host)
            host = found[host]
        if host not in seen:
            ends[name] = host
    return ends
