"""Links custom views with the page: a stream of what is selected, and brushing in both directions.

Only custom views import this module, so that other pages do not load HoloViews.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import holoviews as hv
import numpy as np
import param

from comgra_decl.viewer.model.brushing import Brush
from comgra_decl.viewer.plotting import use

BRUSHED = ("sample", "step", "run")
"""Dimensions whose selection in a linked element also changes the page."""


class Selected(hv.streams.Stream):  # type: ignore[misc]  # HoloViews has no types
    """What the page shows; `hv.DynamicMap(draw, streams=[look.stream])` follows it.

    Attributes:
        run: The open run.
        node, role, iteration, step, type, statistic: As in `Look`.
        sample: Number of the selected sample; None for the batch.
        samples, steps, runs: What is brushed; empty if nothing is. revision: Incremented with new
        records.
    """

    run = param.Parameter()
    node = param.String(default="")
    role = param.String(default="")
    iteration = param.Integer(default=0)
    step = param.Integer(default=None, allow_None=True)
    type = param.String(default="")
    statistic = param.String(default="")
    sample = param.Integer(default=None, allow_None=True)
    samples = param.ClassSelector(default=(), class_=tuple)
    steps = param.ClassSelector(default=(), class_=tuple)
    runs = param.ClassSelector(default=(), class_=tuple)
    revision = param.Integer(default=-1)


class Links:
    """The stream and the linked elements of one session.

    Args:
        act: Changes the selection; called with `brush=...` after a selection in an element.
    """

    def __init__(self, act: Callable[..., None]) -> None:
        use("bokeh")
        self._act = act
        self.stream = Selected()
        self._linker: Any = None
        self._elements: dict[object, list[Any]] = {}  # by the view that contains them
        self._owner: object = None

    def follow(self, now: Mapping[str, Any]) -> None:
        """Tell the stream what the page shows."""
        changed = {
            name: value for name, value in now.items() if getattr(self.stream, name) != value
        }
        if changed:
            self.stream.event(**changed)

    def link(self, element: Any) -> Any:
        """Return an element whose selections apply to all linked elements and to the page."""
        if self._linker is None:
            self._linker = hv.selection.link_selections.instance()
            self._linker.param.watch(self._brushed, "selection_expr")
        self._elements.setdefault(self._owner, []).extend(
            element.traverse(lambda part: part, [lambda part: isinstance(part, hv.Element)])
        )
        return self._linker(element)

    def begin(self, owner: object) -> None:
        """Remove the elements of a view that is about to be built anew; later ones are its own."""
        self._owner = owner
        self._elements.pop(owner, None)

    def forget(self) -> None:
        """Remove all elements, because their views are rebuilt."""
        self._elements.clear()

    def _brushed(self, *_: Any) -> None:
        chosen: dict[str, set[Any]] = {name: set() for name in BRUSHED}
        expression = self._linker.selection_expr
        shown = [element for elements in self._elements.values() for element in elements]
        for element in shown if expression is not None else ():
            there = [str(dimension) for dimension in element.dimensions()]
            if not set(map(str, _dimensions(expression))) <= set(there):
                continue
            inside = np.asarray(expression.apply(hv.Dataset(element.dframe())), bool)
            for name in BRUSHED:
                if name in there:
                    chosen[name] |= {*element.dframe()[name][inside].tolist()}
        self._act(brush=Brush.of(**{f"{name}s": values for name, values in chosen.items()}))


def _dimensions(expression: Any) -> set[str]:
    """Return the names of the dimensions in an expression."""
    names = {str(expression.dimension)} if expression.dimension is not None else set()
    for operation in expression.ops:
        for argument in (*operation["args"], *operation["kwargs"].values()):
            if isinstance(argument, hv.dim):
                names |= _dimensions(argument)
    return names - {"*"}
