"""The bar of recorded steps."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import param
from numpy.typing import ArrayLike

from comgra_decl.viewer.components.base import Component, Message, source


class StepBar(Component):
    """Shows every recorded step on a linear axis and reports navigation.

    Messages: `{"index": position in steps}` and `{"follow": bool}`. When the user leaves the newest
        step, `{"follow": False}` is sent before the index.

    Attributes:
        steps: The recorded steps, ascending: a list or an integer array.
        index: Position of the current step in `steps`; -1 if there are no steps.
        marks: Flags above the axis, `{"index": int, "color": "#rrggbb", "title": str}`.
        follow: Whether to show the newest step as it arrives.
        runs: Compact form of `steps` for the browser, see `arithmetic_runs`; set by the component.
    """

    steps = param.ClassSelector(default=[], class_=(list, tuple, np.ndarray))
    index = param.Integer(default=-1)
    marks = param.List(default=[])
    follow = param.Boolean(default=False)
    runs = param.List(default=[])

    _esm = source("shared.js", "stepbar.js")
    _stylesheets: ClassVar[list[str]] = [source("stepbar.css")]
    _rename: ClassVar[dict[str, str | None]] = {"steps": None}

    def __init__(self, **params: Any) -> None:
        super().__init__(**{**params, "runs": arithmetic_runs(params.get("steps", ()))})

    @param.depends("steps", watch=True)
    def _send_runs(self) -> None:
        self.runs = arithmetic_runs(self.steps)

    def check(self, message: Message) -> bool:
        """Return whether the index is valid, or `follow` is a boolean."""
        ((action, value),) = message.items()
        if action == "follow":
            return isinstance(value, bool)
        is_index = isinstance(value, int) and not isinstance(value, bool)
        return action == "index" and is_index and 0 <= value < len(self.steps)

    def accept(self, message: Message) -> None:
        """Move to the position that the browser already shows."""
        self.param.update(**message)


def arithmetic_runs(steps: ArrayLike) -> list[int]:
    """Return ascending steps as `[start, stride, count, start, stride, count, ...]`.

    Schedules record at regular intervals, so a list of 100,000 steps becomes a handful of numbers.
    A run of one step has stride 0.

    Args:
        steps: Integers `[n]`, ascending.
    """
    values = np.asarray(steps, dtype=np.int64)
    runs: list[int] = []
    gaps = np.diff(values)
    bends = np.flatnonzero(np.diff(gaps)) + 1  # positions where the stride changes
    start = 0
    for bend in [*bends.tolist(), len(values) - 1]:
        if bend < start:
            continue  # the previous run already ends at this step
        stride = int(gaps[start]) if bend > start else 0
        runs += [int(values[start]), stride, bend - start + 1]
        start = bend + 1
    return runs
