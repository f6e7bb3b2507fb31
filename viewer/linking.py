"""Links HoloViews elements with the page: a stream of what is selected, and brushing both ways.

HoloViews links elements by an expression over their dimensions, which fails for elements that lack
one of them: a box in a cloud of `mean` and `std` says nothing about a curve of the loss. Therefore,
each kind of selection has a linker of its own, and its expressions contain only the column
`sample`, `step` or `run`, which all of its elements have.

Only sections with HoloViews elements import this module, so that other pages do not load HoloViews.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import holoviews as hv
import numpy as np
import pandas as pd
import param
from bokeh.models import BoxZoomTool
from holoviews.element.selection import Selection1DExpr

from comgra_decl.errors import UnknownNameError
from comgra_decl.viewer.elements import literal
from comgra_decl.viewer.model.brushing import NOTHING, Brush
from comgra_decl.viewer.palette import GREY, ORANGE
from comgra_decl.viewer.plotting import use

BRUSHED = ("sample", "run", "step")
"""Dimensions by which elements are linked; an element with several of them uses the first."""

_MARKS = 5_000
"""Number of selected points above which only some are marked in an image."""

_WORN = 100
"""Number of linked elements after which to begin anew: HoloViews keeps those that were replaced."""


@atexit.register
def _leave_quietly() -> None:
    """Skip what HoloViews does to links that Python deletes at its end, because it would raise."""
    for kind in (hv.streams.History, hv.streams.Derived):
        if "__del__" in vars(kind):
            del kind.__del__


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
        self._brush = NOTHING
        self._following = False
        self._owner: object = None
        self.forget()

    @property
    def worn(self) -> bool:
        """Whether so many elements were replaced that all views should be built anew."""
        return sum(map(len, self._elements.values())) + self._gone > _WORN

    def follow(self, now: Mapping[str, Any]) -> None:
        """Tell the stream and the linked elements what the page shows."""
        changed = {
            name: value for name, value in now.items() if getattr(self.stream, name) != value
        }
        if changed:
            self.stream.event(**changed)
        self.mark(Brush(now["samples"], now["steps"], now["runs"]))

    def mark(self, brush: Brush) -> None:
        """Show in the linked elements what is brushed on the page."""
        before, self._brush = self._brush, brush
        now = {name: getattr(brush, f"{name}s") for name in BRUSHED}
        if any(getattr(self.stream, f"{name}s") != values for name, values in now.items()):
            self.stream.event(**{f"{name}s": values for name, values in now.items()})
        for name, linker in self._linkers.items():
            if now[name] != getattr(before, f"{name}s"):
                self._select(name, linker, now[name])

    def link(self, element: Any, *, by: str | None = None) -> Any:
        """Return an element whose selections apply to all linked elements and to the page.

        Args:
            element: An element, or a layout or an overlay of elements.
            by: The dimension by which it is linked: "sample", "run" or "step". By default, that of
                the horizontal axis of a curve, or else the first one that the element has.

        Raises:
            UnknownNameError: The element has no such dimension.
        """
        if isinstance(element, hv.Layout):
            return hv.Layout([self.link(part, by=by) for part in element])
        image = element if isinstance(element, hv.DynamicMap) else None
        if image is not None and isinstance(image[()], hv.RGB):
            while isinstance(element, hv.DynamicMap):  # to what Datashader draws
                element = element.callback.inputs[0]
        else:
            image = None
        element = _with_keys(element)
        parts = [*_parts(element)]
        known = by or next(filter(None, map(_key_of, parts)), "")
        having = [part for part in parts if known in map(str, part.dimensions())]
        if known not in BRUSHED or not having:
            there = {str(dimension) for part in parts for dimension in part.dimensions()}
            wanted = f"dimension {by!r}" if by else f"dimension {', '.join(BRUSHED[:-1])} or step"
            raise UnknownNameError(
                f"cannot link an element without a {wanted}; "
                f"its dimensions are {', '.join(sorted(there))}."
            )
        if image is not None:
            return self._link_image(image, having, known)
        if len(having) < len(parts) and isinstance(element, hv.Overlay):
            own = {id(part) for part in having}
            linked = [self.link(p, by=known) if id(p) in own else p for p in element]
            options = element.opts.get("plot", backend="bokeh").kwargs
            return _ready_to_drag(hv.Overlay(linked).collate(), **options)
        linker = self._linker(known)
        self._elements.setdefault(self._owner, []).append((known, element))
        along = all(_along(part, known) for part in having)
        linked = linker(element, index_cols=None if along else [known])
        if isinstance(element, hv.Element):  # its title, which an overlay would show as a legend
            return _ready_to_drag(linked, title=element.label, show_legend=False)
        return _ready_to_drag(linked)

    def begin(self, owner: object) -> None:
        """Remove the elements of a view that is about to be built anew; later ones are its own."""
        self._owner = owner
        self._gone += len(self._elements.pop(owner, ()))

    def forget(self) -> None:
        """Remove all elements, because their views are rebuilt."""
        self._elements: dict[object, list[tuple[str, Any]]] = {}  # by the view that contains them
        self._linkers: dict[str, Any] = {}
        self._gone = 0

    def _linker(self, name: str) -> Any:
        """Return what links elements by a dimension; the last selection replaces earlier ones."""
        if name not in self._linkers:
            linker = hv.selection.link_selections.instance(cross_filter_mode="overwrite")
            if values := getattr(self._brush, f"{name}s"):
                self._select(name, linker, values)
            linker.param.watch(lambda _: self._brushed(name), "selection_expr")
            self._linkers[name] = linker
        return self._linkers[name]

    def _select(self, name: str, linker: Any, values: tuple[Any, ...]) -> None:
        """Show a selection that was not made in these elements."""
        self._following = True
        try:
            linker.selection_expr = hv.dim(name).isin([*values]) if values else None
        finally:
            self._following = False

    def _link_image(self, image: hv.DynamicMap, parts: list[Any], name: str) -> Any:
        """Return an image by Datashader with a box that selects the points of these elements."""
        tables = [_places(part, name) for part in parts]

        def select(bounds: tuple[float, float, float, float] | None) -> None:
            x0, y0, x1, y1 = bounds or (np.inf,) * 4
            chosen: set[Any] = set()
            for part, table in zip(parts, tables, strict=True):
                inside = table["x"].between(x0, x1)
                if not _along(part, name):
                    inside &= table["y"].between(y0, y1)
                chosen |= {*table[name][inside].tolist()}
            values = getattr(Brush.of(**{f"{name}s": chosen}), f"{name}s")
            if name in self._linkers:
                self._select(name, self._linkers[name], values)
            self._tell(name, chosen)

        def marked(**now: tuple[Any, ...]) -> hv.Points:
            known = pd.concat([table[table[name].isin(now[f"{name}s"])] for table in tables])
            known = known[:: 1 + len(known) // _MARKS]
            return hv.Points(known, ["x", "y"], [name]).opts(color=ORANGE, size=3)

        image = image.opts(hv.opts.RGB(tools=["box_select"]))
        box = hv.streams.BoundsXY(source=image)
        box.add_subscriber(select)
        marks = hv.streams.Params(self.stream, [f"{name}s"])
        return _ready_to_drag(image * hv.DynamicMap(marked, streams=[marks]))

    def _brushed(self, name: str) -> None:
        if self._following:
            return
        expression = self._linkers[name].selection_expr
        chosen: set[Any] = set()
        shown = (each for own in self._elements.values() for by, each in own if by == name)
        for part in chain.from_iterable(map(_parts, shown)) if expression is not None else ():
            table: pd.DataFrame = part.dframe([name])
            inside = np.asarray(expression.apply(hv.Dataset(table)), bool)
            chosen |= {*table[name][inside].tolist()}
        self._tell(name, chosen)

    def _tell(self, name: str, values: set[Any]) -> None:
        """Tell the page what was selected."""
        key = f"{name}s"
        self._brush = replace(self._brush, **{key: getattr(Brush.of(**{key: values}), key)})
        self.stream.event(**{key: getattr(self._brush, key)})
        self._act(brush=self._brush)


def _ready_to_drag(linked: Any, *, hooks: Sequence[Any] = (), **options: Any) -> Any:
    """Return a linked figure in which dragging selects at once, without choosing a tool first."""
    hooks = [*hooks, literal, _suit_the_page]
    return linked.opts(hv.opts.Overlay(active_tools=["box_select"], hooks=hooks, **options))


def _suit_the_page(plot: Any, _: Any) -> None:
    """Let the page's theme show through, and leave out tools that have no room in a low figure."""
    figure = plot.handles["plot"]
    figure.update(background_fill_alpha=0, border_fill_alpha=0, outline_line_color=None)
    for axis in figure.axis:
        axis.update(axis_line_color=GREY, major_tick_line_color=GREY, minor_tick_line_color=None)
    for legend in figure.legend:
        legend.update(background_fill_alpha=0, border_line_color=None, title=None)
    figure.toolbar.logo = None
    figure.toolbar.tools = [t for t in figure.toolbar.tools if not isinstance(t, BoxZoomTool)]


def _with_keys(element: Any) -> Any:
    """Return an element whose parts have the dimensions by which an overlay is keyed."""
    if not isinstance(element, hv.NdOverlay):
        return element
    keys = [str(dimension) for dimension in element.kdims]
    parts = {}
    for key, part in element.data.items():
        for name, value in zip(keys, key, strict=True):
            if name in BRUSHED and name not in map(str, part.dimensions()):
                part = part.add_dimension(name, len(part.vdims), value, vdim=True)
        parts[key] = part
    return element.clone(parts)


def _places(part: Any, name: str) -> pd.DataFrame:
    """Return the places of the points of an element, and the values of a dimension."""
    across, down = part.dimensions()[:2]
    columns = {"x": across, "y": down, name: name}
    return pd.DataFrame({key: part.dimension_values(of) for key, of in columns.items()})


def _parts(element: Any) -> Iterator[Any]:
    """Yield the elements of an element or overlay."""
    yield from element.traverse(lambda part: part, [lambda part: isinstance(part, hv.Element)])


def _key_of(part: Any) -> str | None:
    there = [str(dimension) for dimension in part.dimensions()]
    along = (name for name in BRUSHED if _along(part, name))
    return next(along, next((name for name in BRUSHED if name in there), None))


def _along(part: Any, name: str) -> bool:
    """Return whether a box in an element selects a range of this dimension only."""
    return isinstance(part, Selection1DExpr) and str(part.kdims[0]) == name
