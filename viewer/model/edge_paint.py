"""The effects of an intervention's paths, painted on the edges of the graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from comgra_decl.errors import ComgraError
from comgra_decl.query import EdgeEffects
from comgra_decl.records import INTERVENTION_PREFIX
from comgra_decl.spec.interventions import INTO, NODE
from comgra_decl.viewer.graph.layout import Scene
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, nearest
from comgra_decl.viewer.palette import SCALE, signed_colour

EFFECTS = "effects:"
"""Prefix of the value of `colour` that paints edges; the name of the intervention follows."""

_THIN, _THICK = 1.5, 9.0
_FAINTEST = 0.3  # how far the colour of the weakest effect is from grey


def painted_interventions(view: RunView) -> list[str]:
    """Return the interventions whose effects the edges can show."""
    return view.now("painted interventions", lambda: _painted_interventions(view))


def _painted_interventions(view: RunView) -> list[str]:
    try:
        declared = view.spec.interventions
    except ComgraError:
        return []
    return [
        name
        for name in view.run.interventions
        if name in declared
        and declared[name].into is not None
        and {NODE, INTO} <= {*declared[name].sweep}
    ]


def paint_of(
    view: RunView, at: Selection, scene: Scene, name: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the paint of edges, and the legend, for `GraphView.flow` and `GraphView.legend`.

    Args:
        view: the run.
        at: the selected step; the record of the intervention nearest to it is painted.
        scene: the boxes.
        name: one of `painted_interventions`.
    """
    steps = view.steps(INTERVENTION_PREFIX + name)
    step = None if at.step is None else nearest(steps, at.step)
    try:
        effects = view.now(("edge effects", name, step), lambda: view.run.edge_effects(name, step))
    except ComgraError as error:
        why = str(error)
        return [], {"title": f"no effects of {name}: {why}", "low": "", "high": "", "help": why}
    box = {member: each.id for each in scene.boxes for member in each.members}
    together: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for edge in effects.through:
        ends = box.get(edge[0], ""), box.get(edge[1], "")
        if ends[0] != ends[1] and all(ends):
            together.setdefault(ends, []).append(edge)
    found = [(ends, *effects.of(edges)) for ends, edges in together.items()]
    most = max((abs(value) for _, value, _ in found), default=0.0)
    flow = [
        {
            "edge": [*ends],
            "width": round(_THIN + (_THICK - _THIN) * abs(value) / (most or 1.0), 2),
            "color": _colour(value / (most or 1.0)),
            "text": _text(ends, value, pairs, effects),
        }
        for ends, value, pairs in sorted(found, key=lambda each: abs(each[1]))
    ]
    title = f"effects of {name} on {effects.measure}, step {effects.step}"
    return flow, _legend(title, most, _help(effects))


def _colour(place: float) -> str:
    sign = -1.0 if place < 0 else 1.0
    return signed_colour(sign * (_FAINTEST + (1 - _FAINTEST) * abs(place)))


def _text(
    ends: tuple[str, str], value: float, pairs: list[tuple[str, str]], effects: EdgeEffects
) -> str:
    paths = f"{len(pairs)} path{'s' if len(pairs) != 1 else ''}"
    edge, strongest = " \u2192 ".join(ends), " \u2192 ".join(pairs[0])
    own = number(effects.paths[pairs[0]])
    more = f"the strongest {strongest}: {own}" if len(pairs) > 1 else strongest
    return f"{edge} \u00b7 effect {number(value)} \u00b7 {paths}, {more}"


def _help(effects: EdgeEffects) -> str:
    missing = len(effects.unplaced)
    text = (
        "Width and colour: the sum of the mean effects of all paths through an edge. A path leads "
        "from the changed module to its receiver, past all other modules of the intervention"
    )
    return text if not missing else f"{text}. {missing} paths have no way in the recorded graph"


def _legend(title: str, most: float, help_: str) -> dict[str, Any]:
    return {
        "title": title,
        "low": number(-most, digits=3),
        "high": number(most, digits=3),
        "colors": [_colour(float(place)) for place in np.linspace(-1, 1, len(SCALE))],
        "help": help_,
    }
