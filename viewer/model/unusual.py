"""Colours the graph by how unusual a sample is at each node, compared with its batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from comgra_decl.errors import ComgraError
from comgra_decl.query.unusual import Floats
from comgra_decl.viewer.model.graph import Graph, Scale, node_values, painted_slots
from comgra_decl.viewer.model.numbers import MISSING, signed
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, slots_of
from comgra_decl.viewer.palette import SCALE, signed_colour

UNUSUAL = "unusual"
"""Value of `colour` that paints the graph with the distances of a sample."""

_SCALE = Scale(-8.0, 8.0, diverging=True)
"""The same for all tensors and steps; in standard deviations."""

OUTLIER, ENOUGH = 4.0, 8
"""Distance beyond which a sample is an outlier, and the smallest batch for which this applies."""


def paint_of(
    view: RunView,
    at: Selection,
    graph: Graph,
    boxes: Iterable[tuple[str, tuple[str, ...]]],
    *,
    samples: tuple[int, ...] = (),
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the paint of each box and the legend.

    Shows the selected sample. If an aggregate is selected, shows each tensor's most unusual sample
    with its number; only those in `samples`, if any are given. A folded group shows the largest
    distance inside it.

    Args:
        view: The run.
        at: The selection; its statistic is compared.
        graph: The graph.
        boxes: Id of each box, and the nodes in it.
        samples: Numbers of the samples to consider; all if empty.
    """
    found = distances(view, at, graph, samples=samples)
    recorded = node_values(view, at, graph, "forward")
    paint: dict[str, dict[str, Any]] = {}
    for box, members in boxes:
        known = [found[name] for name in members if name in found]
        if known:
            sample, away = max(known, key=lambda one: abs(one[1]))
            number = "" if at.sample is not None else f" #{sample}"
            fill = _SCALE.colour(min(max(away, -8.0), 8.0))
            text = f"{signed(away, digits=3)}{number}" if math.isfinite(away) else f"apart{number}"
            paint[box] = {"fill": fill, "text": text, "hatched": False}
        elif any(name in recorded for name in members):
            paint[box] = {"fill": _SCALE.colour(0.0), "text": MISSING, "hatched": False}
    few = _batch_size(view, at) < ENOUGH
    legend = _legend(at, "" if few else beginning(graph, found), few)
    if samples and at.sample is None:
        legend["title"] = f"among {len(samples)} selected samples: {legend['title']}"
    return paint, legend


def _batch_size(view: RunView, at: Selection) -> int:
    """Return the number of samples in the batch of the selected tensor; 0 without a batch dim."""
    slot = next((slot for slot in slots_of(view, at) if slot is not None), None)
    if slot is None or slot.batch_dim is None:
        return 0
    return view.shape(slot, at)[slot.batch_dim]


def distances(
    view: RunView, at: Selection, graph: Graph, *, samples: tuple[int, ...] = ()
) -> dict[str, tuple[int, float]]:
    """Return the number and the distance of the shown sample at each node."""
    shown = samples if at.sample is None else (at.sample,)
    wide = at.wide
    if at.step is None:
        return {}
    step, type_ = at.step, at.type or None

    def read() -> Floats:
        try:
            return view.run.arrays.unusual(step, wide.statistic, type=type_)
        except ComgraError:  # a derived statistic has no samples
            return np.full((0, 0), np.nan)

    table = view.ever(("unusual", step, at.type, wide.statistic), read)
    found: dict[str, tuple[int, float]] = {}
    for node, slot in painted_slots(view, at, graph, "forward").items():
        row = table[slot] if slot < len(table) else table[:0].ravel()
        if shown:
            row = np.where(np.isin(np.arange(len(row)), shown), row, np.nan)
        if not np.isnan(row).all():
            sample = int(np.nanargmax(np.abs(row)))
            found[node] = sample, float(row[sample])
    return found


def beginning(graph: Graph, found: dict[str, tuple[int, float]]) -> str:
    """Return the first node, in execution order, at which the sample is an outlier, or ""."""
    first = sorted(graph.nodes, key=lambda node: node.order)
    return next((n.name for n in first if abs(found.get(n.name, (0, 0.0))[1]) >= OUTLIER), "")


def _legend(at: Selection, begins: str, few: bool) -> dict[str, Any]:
    who = "most unusual sample" if at.sample is None else f"sample {at.sample}"
    where = f"outlier from {begins} on" if begins else f"nowhere beyond {OUTLIER:g}"
    where = "batch too small to identify outliers" if few else where
    return {
        "title": f"{who} \u00b7 {at.wide.statistic} \u00b7 {where}",
        "low": "\u22128",
        "high": "8",
        "colors": [signed_colour(float(place)) for place in np.linspace(-1, 1, len(SCALE))],
        "help": "Distance from the mean of the other samples in the batch, in standard deviations "
        "of those samples. Choose a sample under Batch. \u2013: nothing to compare, because "
        "there is one value for the batch, or all other samples have the same value.",
    }
