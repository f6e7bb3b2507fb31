"""What colours a graph: a statistic, findings, time, memory, samples, another run, or effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from comgra_decl.viewer.graph.layout import Scene
from comgra_decl.viewer.model import compare, edge_paint, findings, memory_use, time_use, unusual
from comgra_decl.viewer.model.comparison_target import Other
from comgra_decl.viewer.model.graph import Graph, heat_of
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection


@dataclass(frozen=True, slots=True)
class Paint:
    """The colours of a graph.

    Attributes:
        boxes: fill and text of each box by its id; None for the colours of the kinds.
        legend: title, ends and colours of the scale; None for none.
        edges: the ends, width, colour and text of each edge that is emphasised.
    """

    boxes: dict[str, dict[str, Any]] | None = None
    legend: dict[str, Any] | None = None
    edges: Sequence[dict[str, Any]] = ()


def colours(view: RunView, chosen: str = "") -> list[str]:
    """Return what can colour the graph of a run besides kinds and passes; see `painted`.

    A rule is among them if it has findings, or if it is `chosen`.
    """
    found = [compare.DIFFERENCE, "findings", unusual.UNUSUAL]
    found += [time_use.TIME] if time_use.has_times(view) else []
    found += [memory_use.MEMORY] if memory_use.has_memory(view) else []
    rules = [*findings.rules_of(view), findings.painted_rule(view, chosen)]
    found += [f"{findings.RULE}{rule}" for rule in dict.fromkeys(rules) if rule]
    return found + [
        f"{edge_paint.EFFECTS}{name}" for name in edge_paint.painted_interventions(view)
    ]


def painted(
    view: RunView,
    at: Selection,
    graph: Graph,
    *,
    scene: Scene,
    colour: str,
    pass_: str = "forward",
    other: Other | None = None,
    samples: tuple[int, ...] = (),
) -> Paint:
    """Return the colours of a graph at a step.

    Args:
        view: the run.
        at: the selected step, statistic and sample.
        graph: the graph.
        scene: its drawing.
        colour: "kind", a pass (for the statistic), "findings", "rule:NAME", "difference",
            "unusual", "time", "memory", or "effects:INTERVENTION".
        pass_: the pass that is compared.
        other: the run or step to compare with.
        samples: recorded samples to consider; all if empty.
    """

    def boxes() -> Iterator[tuple[str, tuple[str, ...]]]:
        return ((box.id, box.members) for box in scene.boxes)

    rule = findings.painted_rule(view, colour)
    if colour.startswith(edge_paint.EFFECTS):
        name = colour.removeprefix(edge_paint.EFFECTS)
        edges, legend = edge_paint.paint_of(view, at, scene, name)
        return Paint(None, legend, edges)
    if rule is not None:
        return Paint(*findings.paint_of(view, at, graph, boxes=boxes(), rule=rule))
    if colour == compare.DIFFERENCE:
        return Paint(*compare.paint_of(view, other, at, graph, boxes=boxes(), pass_=pass_))
    if colour == unusual.UNUSUAL:
        return Paint(*unusual.paint_of(view, at, graph, boxes(), samples=samples))
    if colour == time_use.TIME:
        return Paint(*time_use.paint_of(view, boxes()))
    if colour == memory_use.MEMORY:
        return Paint(*memory_use.paint_of(view, boxes()))
    if colour == "kind":
        return Paint()
    return Paint(*heat_of(view, at, graph, scene=scene, pass_=colour, samples=samples))
