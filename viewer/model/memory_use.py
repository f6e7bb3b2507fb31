"""What holds the memory: the paint of each node, and the parts of the measured steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from comgra_decl.errors import UnknownNameError
from comgra_decl.records import OTHER
from comgra_decl.viewer.model.numbers import in_bytes, span
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.time_use import size_of_box
from comgra_decl.viewer.palette import BLUE, GREY, LINES, ORANGE, SCALE, colour_at

MEMORY = "memory"
"""Value of `colour` that paints the graph with memory."""

LASTING = ("parameters", "optimizer", "gradients")
"""Parts that do not belong to a module's calls, from the bottom of a stack."""

ACTIVATIONS = "activations"

OF = "activations of "
"""Beginning of the name of a part that belongs to a node."""

_MOST_NODES = 5
_REST = "other activations"

_COLOURS = {
    **dict.fromkeys(("parameters", "forward"), BLUE),
    **dict.fromkeys(("gradients", "backward"), ORANGE),
    **dict.fromkeys((ACTIVATIONS, "data"), LINES[3]),
    "optimizer": LINES[2],
    "other": GREY,
    _REST: "#cdd2db",  # light, because one of the nodes may be grey
}
"""Colours of the parts of the memory and of the phases of a step."""

_MB = 1e6


def has_memory(view: RunView) -> bool:
    """Return whether memory was measured."""
    return view.now("has memory", lambda: _held(view) is not None)


def memory_steps(view: RunView) -> pd.DataFrame | None:
    """Return the parts of each measured step in MB, one row per step; None if not measured.

    The columns are the parts that take up anything, from the bottom of the stack.
    """

    def read() -> pd.DataFrame | None:
        try:
            table = view.run.memory(by="step") / _MB
        except UnknownNameError:
            return None
        return table.loc[:, (table > 0).any()]

    return view.now("memory steps", read)


def memory_moments(view: RunView) -> tuple[int, pd.DataFrame] | None:
    """Return the fullest measured step and its parts in MB at each moment; None if not measured.

    The columns are parameters, optimizer states, gradients, and the activations of the five nodes
    that hold the most, in the order of execution, and of all others. Gradients were measured before
    the first call and at the end of the step. In between, they are as far as the activations have
    been released.
    """
    return view.now("memory moments", lambda: _moments(view))


def part_colours(parts: Iterable[str]) -> dict[str, str]:
    """Return a colour for each part of the memory or phase of a step; nodes have their own."""
    further = itertools.cycle(LINES[3:])
    return {part: _COLOURS.get(part) or next(further) for part in parts}


def _moments(view: RunView) -> tuple[int, pd.DataFrame] | None:
    try:
        table = view.run.memory(by="moment")
    except UnknownNameError:
        return None
    if table.empty:
        return None
    totals = table.attrs["totals"]
    largest = table.max().nlargest(_MOST_NODES).index
    kept = [node for node in table.columns if node in largest]
    parts = pd.DataFrame({name: float(totals[name]) for name in LASTING}, table.index)
    parts["gradients"] = _gradients(table.sum(axis=1), totals)
    named = table[kept].rename(columns={name: f"{OF}{name}" for name in kept})
    parts = pd.concat([parts, named], axis=1)
    if len(kept) < table.shape[1]:
        parts[_REST] = table.drop(columns=kept).sum(axis=1)
    return int(totals["step"]), parts.loc[:, (parts > 0).any()] / _MB


def _gradients(held: pd.Series[int], totals: dict[str, int]) -> pd.Series[float]:
    """Return the gradients at each moment: they grow while the activations shrink."""
    before, after = totals["gradients_before"], totals["gradients"]
    peak = int(held.to_numpy().argmax())
    most, least = held.iloc[peak], held.iloc[peak:].min()
    released = (most - held) / (most - least) if most > least else held * 0.0
    released.iloc[: peak + 1] = 0.0
    return before + (after - before) * released.cummax()


def paint_of(
    view: RunView, boxes: Iterable[tuple[str, tuple[str, ...]]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the paint of each box and the legend.

    Shows what a module holds: saved activations, parameters, gradients and optimizer states,
    including those of modules within it. A folded group shows its own module or, if it has none,
    the sum over its nodes.

    Args:
        view: The run, whose memory was measured.
        boxes: Id of each box, and the nodes in it, its own module first.
    """
    sizes = view.now("held memory", lambda: _held(view)) or {}
    largest = max(sizes.values(), default=0.0) or 1.0
    paint: dict[str, dict[str, Any]] = {}
    for box, members in boxes:
        size = size_of_box(members, sizes)
        if size is not None:
            fill = colour_at(min(size / largest, 1.0))
            paint[box] = {"fill": fill, "text": in_bytes(size), "hatched": False}
    return paint, _legend(largest, [int(step) for step in view.run.memory(by="step").index])


def _held(view: RunView) -> dict[str, float] | None:
    try:
        table = view.run.memory().drop(OTHER, errors="ignore")
    except UnknownNameError:
        return None
    sums = table[[ACTIVATIONS, *LASTING]].sum(axis=1)
    return {str(node): float(size) for node, size in sums.items()}


def _legend(largest: float, steps: list[int]) -> dict[str, Any]:
    return {
        "title": f"memory held in {span(steps)}",
        "low": "0 B",
        "high": in_bytes(largest),
        "colors": [colour_at(float(place)) for place in np.linspace(0, 1, len(SCALE))],
        "help": "Saved activations, parameters, gradients and optimizer states of each module, "
        "including modules within it. The same for all steps: the largest sizes in those in which "
        "memory was measured.",
    }
