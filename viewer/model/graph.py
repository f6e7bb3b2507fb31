"""The dependency graph of a run at a step: nodes, edges, and their colours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.records import EARLIER_STEP, SlotKey
from comgra_decl.viewer.graph.layout import GraphNode, Scene, box_of
from comgra_decl.viewer.model.labels import order_of_operations, pass_label
from comgra_decl.viewer.model.numbers import number, shape
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.palette import GREY, SCALE, colour_at, signed_colour

_ENOUGH = 50_000  # values for the quantiles; sorting all of them takes longer than painting
_DEPTH = 1e-8  # lower end of a logarithmic scale, relative to its upper end

Edges = tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes and edges between nodes (source, sink, whether the edge carries a gradient).

    Parameters, buffers that take part in the computation, and tensors from an earlier step get
    separate nodes ("encoder.weight", "cell (earlier step)"), although elsewhere they are roles of a
    module's node. `parameters` maps these separate nodes to (node, role). `roles` maps each edge to
    the two roles that it connects: the source's and the sink's.
    """

    nodes: tuple[GraphNode, ...]
    edges: Edges
    parameters: dict[str, tuple[str, str]]
    roles: dict[tuple[str, str], set[tuple[str, str]]]

    def name_of(self, at: Selection) -> str:
        """Return the drawn node that contains the selected tensor."""
        parameter = f"{at.node}.{at.role}"
        return parameter if parameter in self.parameters else at.node


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps numbers to colours: linear or logarithmic between `low` and `high`.

    `diverging` scales are symmetric about 0.
    """

    low: float
    high: float
    logarithmic: bool = False
    diverging: bool = False

    def colour(self, value: float) -> str:
        """Return the colour of a finite value; clamps values outside the range."""
        if self.diverging:
            return signed_colour(value / self.high if self.high else 0.0)
        if self.logarithmic:
            if value <= 0:
                return colour_at(0.0)
            place = math.log(value / self.low) / (math.log(self.high / self.low) or 1.0)
        else:
            place = (value - self.low) / ((self.high - self.low) or 1.0)
        return colour_at(place)


def graph_of(view: RunView, at: Selection) -> Graph:
    """Return the graph valid at the selected step, with all nodes of the run."""
    structure = None if at.step is None else view.structure(at.step, at.type)
    keys = [] if structure is None else structure.keys
    parameters = {
        f"{slot.node}.{slot.role}": (slot.node, slot.role)
        for slot in view.slots.values()
        # those of checkpoints are stored whole, and shown with their own modules
        if slot.kind == "parameter" and slot.role in view.roles(slot.node)
    }
    kinds = dict.fromkeys(parameters, "parameter")
    if structure is not None:
        for key, kind in zip(keys, structure.kinds, strict=True):
            beside = _drawn_beside(key, kind)
            role = key.role.removesuffix(EARLIER_STEP)
            if beside and role in view.roles(key.node):
                parameters[beside] = key.node, role
                kinds[beside] = kind
    names = [_drawn_name(key, kinds) for key in keys]
    computing = [node for node in view.nodes if view.kind(node) != "parameter"]
    # Graphs list nodes in execution order, whereas parameters are the first slots.
    order = dict.fromkeys([*names, *computing, *parameters])
    nodes = tuple(
        _owned(view, name, i, kinds[name], parameters[name])
        if name in parameters
        else _node(view, name, i, at)
        for i, name in enumerate(order)
    )
    links: dict[tuple[str, str], bool] = {}
    roles: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for source, sink, gradient in structure.edges if structure is not None else ():
        pair = names[source], names[sink]
        if pair[0] != pair[1]:
            links[pair] = links.get(pair, False) or gradient
            joined = keys[source].role, keys[sink].role
            roles.setdefault(pair, set()).add(joined)
    edges = tuple((a, b, grad) for (a, b), grad in links.items())
    return Graph(nodes, edges, parameters, roles)


def _drawn_beside(key: SlotKey, kind: str) -> str:
    """Return the name of a node drawn apart from its module, or ""."""
    if key.role.endswith(EARLIER_STEP):
        return f"{key.node}{key.role.removeprefix('output')}"
    return f"{key.node}.{key.role}" if kind == "buffer" else ""


def _drawn_name(key: SlotKey, apart: Mapping[str, str]) -> str:
    names = (f"{key.node}.{key.role}", f"{key.node}{key.role.removeprefix('output')}")
    earlier = key.role.endswith(EARLIER_STEP)
    return next((name for name in names[earlier : 1 + earlier] if name in apart), key.node)


def _owned(view: RunView, name: str, order: int, kind: str, owner: tuple[str, str]) -> GraphNode:
    slot = view.first_slot(*owner)
    return GraphNode(name, kind, order, f"{shape(slot.shape)} \u00b7 {slot.dtype}")


def _node(view: RunView, name: str, order: int, at: Selection) -> GraphNode:
    kind = view.kind(name) if name in view.nodes else "computed"
    if name not in view.nodes:
        return GraphNode(name, kind, order)
    return GraphNode(name, kind, order, _title(view, name, at), view.lead(name).module_class)


def loose_of(at: Selection, graph: Graph, scene: Scene) -> dict[str, Any]:
    """Return the boxes connected only to other roles of the selected node.

    Returns `{"of": box id of the selected node, "boxes": box ids}` for the browser.
    """
    name = graph.name_of(at)
    joined: dict[str, bool] = {}
    for (source, sink), roles in graph.roles.items():
        if name in (source, sink):
            end, there = (0, sink) if source == name else (1, source)
            by_this = any(pair[end].removesuffix(EARLIER_STEP) == at.role for pair in roles)
            joined[there] = joined.get(there, False) or by_this
    loose: list[str] = []
    for box in () if all(joined.values()) else scene.boxes:
        found = [joined[member] for member in box.members if member in joined]
        if found and not any(found):
            loose.append(box.id)
    return {"of": box_of(scene, name) or "", "boxes": loose}


def info_of(view: RunView, at: Selection, graph: Graph) -> str:
    """Return one line of text about the selected tensor."""
    if not at.node:
        return ""
    name = graph.name_of(at)
    inside = {node.name for node in graph.nodes if node.kind in ("parameter", "buffer")}
    into = sum(sink == name and source not in inside for source, sink, _ in graph.edges)
    out = sum(source == name for source, _, _ in graph.edges)
    shown = next((node for node in graph.nodes if node.name == name), None)
    title = _title(view, name, at) if name in view.nodes else shown.title if shown else ""
    parts = [name, shown.kind, title] if shown is not None else [name]
    return " \u00b7 ".join(part for part in [*parts, f"{into} in, {out} out"] if part)


def heat_of(
    view: RunView,
    at: Selection,
    graph: Graph,
    *,
    scene: Scene,
    pass_: str,
    samples: tuple[int, ...] = (),
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the paint of each box and the legend, for the selected statistic of one pass.

    A folded group shows the value of its own module or, if that is missing, the largest magnitude
    inside the group. It is hatched if any value inside is NaN or infinite. If `samples` are given,
    nodes show the mean over these recorded samples, on the same scale.
    """
    whole = scale(view, at, pass_)
    values = node_values(view, at, graph, pass_)
    if samples and at.step is not None:
        values |= _values_of_samples(view, at, graph, pass_=pass_, samples=samples)
    paint = {box.id: _paint(box.members, values, whole) for box in scene.boxes}
    legend = _legend(at, pass_, whole)
    if samples:
        several = f"mean of {len(samples)} selected samples"
        legend["title"] += f" \u00b7 {several if len(samples) > 1 else f'sample {samples[0]}'}"
    return {box: p for box, p in paint.items() if p is not None}, legend


def _title(view: RunView, name: str, at: Selection) -> str:
    slot = view.lead(name)
    when = f" at step {at.step}" if view.run.reshaped and slot.kind != "parameter" else ""
    parts = [slot.module_class, shape(view.shape(slot, at)) + when, slot.dtype]
    return " \u00b7 ".join(part for part in parts if part)


def node_values(
    view: RunView, at: Selection, graph: Graph, pass_: str
) -> dict[str, tuple[float, bool]]:
    """Return the value of each recorded node and whether it contains NaN or infinity."""
    if at.step is None:
        return {}
    wide = at.wide
    row = view.row(at.step, at.type, wide.over)
    counts, numbers = row.column("nonfinite"), row.column(wide.statistic)
    values: dict[str, tuple[float, bool]] = {}
    for node, slot in painted_slots(view, at, graph, pass_).items():
        count = counts.get(slot, math.nan)
        if not math.isnan(count):
            value = float(numbers[slot])
            values[node] = value, count > 0 or not math.isfinite(value)
    return values


def _values_of_samples(
    view: RunView, at: Selection, graph: Graph, *, pass_: str, samples: tuple[int, ...]
) -> dict[str, tuple[float, bool]]:
    """Return the mean over some samples for each node of which all of them were recorded."""
    wide = at.wide
    assert at.step is not None
    step, type_ = at.step, at.type or None

    def read() -> NDArray[np.float64]:
        try:
            return view.run.arrays.samples(step, wide.statistic, type=type_)
        except ComgraError:  # a derived statistic has no samples
            return np.full((0, 0), np.nan)

    table = view.ever(("samples", step, at.type, wide.statistic), read)
    known = [sample for sample in samples if sample < table.shape[1]]
    means = table[:, known].mean(axis=1) if known else np.full(len(table), np.nan)
    slots = painted_slots(view, at, graph, pass_)
    there = {node: slot for node, slot in slots.items() if slot < len(means)}
    return {
        node: (float(means[slot]), not math.isfinite(means[slot]))
        for node, slot in there.items()
        if not np.isnan(means[slot])
    }


def painted_slots(view: RunView, at: Selection, graph: Graph, pass_: str) -> dict[str, int]:
    """Return the slot that colours each node.

    The result is cached because, except for the selected node, it depends only on the pass and the
    iteration. If the step or the statistic changes, the slot stays the same and only its value
    differs.
    """
    key = ("painted", id(graph), pass_, at.iteration)
    elsewhere = replace(at, node="", role="")
    _, slots = view.now(key, lambda: (graph, _slots_of_all(view, elsewhere, graph, pass_)))
    name = graph.name_of(at)
    selected = _painted_slot(view, at, graph, node=name, pass_=pass_)
    others = {node: slot for node, slot in slots.items() if node != name}
    return others if selected is None else {**others, name: selected}


def _slots_of_all(view: RunView, at: Selection, graph: Graph, pass_: str) -> dict[str, int]:
    found = (
        (node.name, _painted_slot(view, at, graph, node=node.name, pass_=pass_))
        for node in graph.nodes
    )
    return {node: slot for node, slot in found if slot is not None}


def _painted_slot(
    view: RunView, at: Selection, graph: Graph, *, node: str, pass_: str
) -> int | None:
    """Return the slot that colours a node: the selected tensor, or else the node's first role."""
    owner, role = graph.parameters.get(node, (node, ""))
    selected = [at.role] if node == graph.name_of(at) else view.roles(node)
    for candidate in [role] if role else selected:
        iterations = view.iterations(owner, candidate)
        if not iterations:
            continue
        wanted = at.iteration if at.iteration in iterations else iterations[-1]
        slot = view.passes(owner, candidate, wanted).get(pass_)
        if slot is not None:
            return slot.id
    return None


def _paint(
    members: tuple[str, ...], values: dict[str, tuple[float, bool]], scale: Scale
) -> dict[str, Any] | None:
    known = [values[name] for name in members if name in values]
    if not known:
        return None
    value = value_of(members, values)
    assert value is not None  # something is known
    hatched = any(broken for _, broken in known)
    fill = scale.colour(value) if math.isfinite(value) else GREY
    return {"fill": fill, "text": number(value), "hatched": hatched}


def value_of(members: tuple[str, ...], values: dict[str, tuple[float, bool]]) -> float | None:
    """Return the value of a box: that of its first member, or else the largest magnitude."""
    own = values.get(members[0])
    known = (values[name][0] for name in members if name in values)
    return own[0] if own else max(known, key=_magnitude, default=None)


def _magnitude(value: float) -> float:
    return math.inf if math.isnan(value) else abs(value)


def scale(view: RunView, at: Selection, pass_: str) -> Scale:
    """Return the scale of the selected statistic of one pass, shared by all nodes and steps."""
    at = at.wide
    key = ("scale", at.statistic, pass_, at.over, at.type)
    return view.now(key, lambda: scale_of(_known(view, at, pass_)))


def _known(view: RunView, at: Selection, pass_: str) -> NDArray[np.float64]:
    if view.long:
        found = view.extremes(at.statistic, view.in_pass(pass_), at.over, at.type)
        values = np.stack([found.low, found.high], axis=-1).astype(float)
    else:
        values = view.heat(at.statistic, pass_, at.over, at.type).to_numpy(float)
    known: NDArray[np.float64] = values[np.isfinite(values)]
    return known


def scale_of(values: NDArray[np.float64]) -> Scale:
    """Return one scale for all values of a run, so that colours are comparable across steps.

    At each end of the scale, one percent of the values is clipped. Signed values get a diverging
    scale. Positive values that span more than two orders of magnitude get a logarithmic scale. If
    there are many values, the quantiles are computed from an evenly spaced subset.
    """
    if not len(values):
        return Scale(0.0, 1.0)
    values = values[:: -(-len(values) // _ENOUGH)]
    low, high = (float(q) for q in np.quantile(values, [0.01, 0.99]))
    if low < 0:
        limit = max(-low, high)
        return Scale(-limit, limit, diverging=True)
    positive = values[values > 0]
    if len(positive) and high > 0:
        floor = max(float(np.quantile(positive, 0.05)), high * _DEPTH)
        if high / floor > 100:
            return Scale(floor, high, logarithmic=True)
    return Scale(low, high)


def _legend(at: Selection, pass_: str, scale: Scale) -> dict[str, Any]:
    at = at.wide
    places = np.linspace(-1, 1, len(SCALE)) if scale.diverging else np.linspace(0, 1, len(SCALE))
    paint = signed_colour if scale.diverging else colour_at
    return {
        "title": f"{pass_label(pass_)} \u00b7 {at.statistic}",
        "low": number(scale.low, digits=3),
        "high": number(scale.high, digits=3),
        "colors": [paint(float(place)) for place in places],
        "log": scale.logarithmic,
        "help": order_of_operations(at.statistic, at.over) + ". One scale for all steps.",
    }
