"""The time of each node, and of each phase in the profiled steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from comgra_decl.errors import UnknownNameError
from comgra_decl.records import PROGRAM
from comgra_decl.viewer.model.numbers import many, number, span
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.palette import SCALE, colour_at

TIME = "time"
"""Value of `colour` that paints the graph with times."""

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""The phases of a step, in the order in which they begin."""


def has_times(view: RunView) -> bool:
    """Return whether the run has times of modules, from a profile or without one."""
    return view.now("has times", lambda: _found(view) is not None)


def phases(view: RunView) -> pd.DataFrame | None:
    """Return the milliseconds of each phase, one row per profiled step; None without a profile."""
    return view.now("phases", lambda: _phases(view))


def _phases(view: RunView) -> pd.DataFrame | None:
    try:
        table = view.run.profile(by="step")
    except UnknownNameError:
        return None
    return table[[*PHASES]]


def paint_of(
    view: RunView, boxes: Iterable[tuple[str, tuple[str, ...]]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the paint of each box and the legend.

    Shows the time of a module, including modules within it: in a profile, of its forward and
    backward pass, on the device or, if no device was used, on the host. Without a profile, of its
    forward pass on the host. A folded group shows the time of its own module or, if it has none,
    the sum over its nodes.

    Args:
        view: The run, which has times.
        boxes: Id of each box, and the nodes in it, its own module first.
    """
    times, legend = view.now("times", lambda: _found(view)) or ({}, {})
    longest = max(times.values(), default=0.0) or 1.0
    paint: dict[str, dict[str, Any]] = {}
    for box, members in boxes:
        time = size_of_box(members, times)
        if time is not None:
            fill = colour_at(min(time / longest, 1.0))
            paint[box] = {"fill": fill, "text": f"{number(time)} ms", "hatched": False}
    return paint, {
        "low": "0 ms",
        "high": f"{number(longest, digits=3)} ms",
        "colors": [colour_at(float(place)) for place in np.linspace(0, 1, len(SCALE))],
        **legend,
    }


def size_of_box(members: tuple[str, ...], sizes: Mapping[str, float]) -> float | None:
    """Return the size of a box: that of its own module, or the sum over its nodes; None if unknown.

    Args:
        members: The nodes in the box, its own module first.
        sizes: The size of each node, including modules within it.
    """
    known = [sizes[name] for name in members if name in sizes]
    first = members[0]
    within = all(name.startswith(f"{first}.") for name in members[1:])
    if first in sizes and within:
        return sizes[first]
    return sum(known) if known else None


def _found(view: RunView) -> tuple[dict[str, float], dict[str, str]] | None:
    """Return the milliseconds of each node, and the title and explanation of the legend."""
    try:
        return _profiled(view)
    except UnknownNameError:
        pass
    try:
        table = view.run.module_times()
    except UnknownNameError:
        return None
    times = {str(node): float(time) for node, time in table["forward_ms"].items()}
    steps = many(table.attrs["steps"], "step")
    return times, {
        "title": f"forward time per step on the host, mean of {steps}",
        "help": f"Forward pass of each module, including modules within it: the mean of {steps} "
        "that were not recorded. The same for all steps.",
    }


def _profiled(view: RunView) -> tuple[dict[str, float], dict[str, str]]:
    table = view.run.profile()
    where = "device" if table["device_ms"].any() else "host"
    passes = table.index.get_level_values("pass")
    # The program's own time outside every module has no box, so it must not set the scale.
    nodes = table.index.get_level_values("node")
    modules = table[passes.isin(["forward", "backward", "no_grad"]) & (nodes != PROGRAM)]
    sums = modules[f"{where}_ms"].groupby(level="node").sum()
    steps = [int(step) for step in view.run.profile(by="step").index]
    return {str(node): float(time) for node, time in sums.items()}, {
        "title": f"time per step on the {where} in {span(steps)}",
        "help": "Forward and backward pass of each module in the profiled steps, including modules "
        "within it. The same for all steps.",
    }
