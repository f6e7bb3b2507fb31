"""State of one browser session: parameters only, no data or drawing."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import param

from comgra_decl.viewer.model.brushing import NOTHING, Brush
from comgra_decl.viewer.model.runs import SMOOTHINGS, X_AXES, Overlaid
from comgra_decl.viewer.model.selection import Selection

SECTIONS = {
    "overview": "Overview",
    "inspect": "Inspect",
    "values": "Values",
    "data": "Data",
    "attention": "Attention",
    "pictures": "Pictures",
    "compare": "Compare",
    "runs": "Runs",
    "explore": "Explore",
    "kpis": "KPIs",
    "modules": "Modules",
    "findings": "Findings",
    "notes": "Notes",
    "run": "Run",
    "views": "Views",
}
"""Sections of the page: key and label, in order; "views" only with custom views."""

ORDERS = ("", "high", "low", "largest", "smallest")
"""Sort orders for raw values: by position, value or magnitude."""

HIDDEN, SHOWN = "hidden", "shown"
LEAST, MOST = 150, 3000
"""Whether the user wants to see the graph; smallest and largest height in pixels."""

SELECTION = tuple(field.name for field in fields(Selection))
"""Names of the parameters that make up a `Selection`."""


class ViewState(param.Parameterized):
    """State of one session. Only `Dashboard.change` changes it, and only `Dashboard` watches it.

    Attributes:
        run: Name of the run below the root; "" if there is no run.
        colour: What colours the graph: "kind", a pass name, "difference", "findings", "effects:"
            and an intervention, or "rule:"
            followed by a rule's name.
        section: Key of `SECTIONS`.
        scale: How series are drawn: "linear" or "log".
        expanded: Expanded groups of the graph; None until the user expands or collapses one.
        measure: Whether values are drawn as recorded or relative to their batch.
        graph: `HIDDEN`, `SHOWN` or the height of the graph in pixels; "" leaves it to the section.
        between: Second node, compared with the selected one; "" if there is none.
        route: Number of the path between the two nodes that the graph shows.
        follow: Whether to show the newest step as it arrives.
        revision: Revision of the displayed run.
        looked: Number of checks and searches of the run that have ended.
        pass_: Pass that the Values and Compare sections show.
        slicing: Dims of raw values used as rows and columns; see `model.slicing`.
        order: One of `ORDERS`.
        window: First visible row and column of the value table: "0,0".
        other: Run to compare with; "" for this run.
        other_step: Step to compare with. None selects the same step of another run, or the first
            step of this run.
        other_type: Type of execution to compare with; "" for that of this side. See
            `model.comparison_target.ALL_TRAINING`.
        axis: Whether compared series are absolute or relative to their first value.
        other_revision: Displayed revision of the other run.
        views: Displayed version of the custom views file.
        walk: Finding and stop of the walk through the evidence, "" outside a walk; see
            `model.walk`.
        ticked, smoothing, x_axis, metric, against: See `model.runs.Overlaid`.
        brush: Samples, steps and runs selected in figures that are linked by brushing.
        library: Number of facts about other runs that were read in the background.
        type, step, node, role, iteration, gradient, batch, statistic, auto_batch, auto_statistic:
            See `Selection`; "" as batch or statistic stands for the one that fits the tensor.
    """

    run = param.String(default="")
    type = param.String(default="")
    step = param.Integer(default=None, allow_None=True)
    node = param.String(default="")
    role = param.String(default="")
    iteration = param.Integer(default=0)
    gradient = param.String(default="grad")
    batch = param.String(default="")
    statistic = param.String(default="")
    auto_batch = param.Boolean(default=True)
    auto_statistic = param.Boolean(default=True)
    colour = param.String(default="kind")
    scale: Any = param.Selector(default="linear", objects=["linear", "log"])
    section: Any = param.Selector(default="overview", objects=list(SECTIONS))
    expanded = param.ClassSelector(default=None, class_=frozenset, allow_None=True)
    measure: Any = param.Selector(default="raw", objects=["raw", "relative"])
    graph = param.String(default="")
    between = param.String(default="")
    route = param.Integer(default=0)
    follow = param.Boolean(default=False)
    revision = param.Integer(default=-1)
    looked = param.Integer(default=0)
    pass_ = param.String(default="forward")
    slicing = param.String(default="")
    order: Any = param.Selector(default="", objects=list(ORDERS))
    window = param.String(default="")
    other = param.String(default="")
    other_step = param.Integer(default=None, allow_None=True)
    other_type = param.String(default="")
    axis: Any = param.Selector(default="recorded", objects=["recorded", "relative"])
    other_revision = param.Integer(default=-1)
    views = param.Integer(default=-1)
    walk = param.String(default="")
    ticked = param.ClassSelector(default=None, class_=tuple, allow_None=True)
    smoothing: Any = param.Selector(default="0", objects=list(SMOOTHINGS))
    x_axis: Any = param.Selector(default="step", objects=list(X_AXES))
    metric = param.String(default="")
    against = param.String(default="")
    brush = param.ClassSelector(default=NOTHING, class_=Brush)
    library = param.Integer(default=-1)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)  # type: ignore[no-untyped-call]

    @property
    def overlaid(self) -> Overlaid:
        """What the *Runs* section shows."""
        return Overlaid(**{f.name: getattr(self, f.name) for f in fields(Overlaid)})

    @property
    def selection(self) -> Selection:
        """The current selection."""
        return Selection(**{name: getattr(self, name) for name in SELECTION})

    def put(self, selection: Selection, **others: object) -> None:
        """Set all parameters at once, so that watchers run once."""
        self.param.update(**asdict(selection), **others)
