"""What one browser session shows: parameters only, no data and no drawing."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import param

from comgra_decl.viewer.model.selection import Selection

SECTIONS = {
    "overview": "Overview",
    "inspect": "Inspect",
    "values": "Values",
    "compare": "Compare",
    "kpis": "KPIs",
    "modules": "Modules",
    "findings": "Findings",
    "notes": "Notes",
    "run": "Run",
    "views": "Views",
}
"""Sections of the page: id and label, in order; "views" only where someone has given some."""

ORDERS = ("", "high", "low", "largest", "smallest")
"""How raw values are listed: by place, or by value or magnitude."""

SELECTION = tuple(field.name for field in fields(Selection))
"""Names of the parameters that make up a `Selection`."""


class ViewState(param.Parameterized):
    """The state of one session; changed by `Dashboard.change` alone, watched by it alone.

    Attributes:
        run: Name of the run below the root, "" while there is none.
        colour: What paints the graph: "kind", the name of a pass, "difference", "findings", or
            "rule:" and the name of one rule.
        section: Key of `SECTIONS`.
        scale: How series are drawn: "linear" or "log".
        expanded: Opened scopes of the graph; None until the user opens or closes one.
        follow: Whether the newest step is shown as it comes.
        revision: Revision of the run that is on screen.
        looked: Counts how often somebody looked at a run again.
        pass_: Which pass of the tensor the sections Values and Compare show.
        slicing: Which dims of raw values are rows and columns; see `model.slicing`.
        order: One of `ORDERS`.
        window: First row and column of the raw values that are written out: "0,0".
        other: Name of the run to compare with, "" for this run itself.
        other_step: Step to compare with; None: the same of another run, the first of this one.
        axis: Whether compared series are drawn as recorded or relative to their start.
        other_revision: Revision of the other run that is on screen.
        views: Version of the file of custom views that is on screen.
        type, step, node, role, iteration, gradient, batch, statistic: See `Selection`.
    """

    run = param.String(default="")
    type = param.String(default="")
    step = param.Integer(default=None, allow_None=True)
    node = param.String(default="")
    role = param.String(default="")
    iteration = param.Integer(default=0)
    gradient = param.String(default="grad")
    batch = param.String(default="mean")
    statistic = param.String(default="")
    colour = param.String(default="kind")
    scale: Any = param.Selector(default="linear", objects=["linear", "log"])
    section: Any = param.Selector(default="overview", objects=list(SECTIONS))
    expanded = param.ClassSelector(default=None, class_=frozenset, allow_None=True)
    follow = param.Boolean(default=False)
    revision = param.Integer(default=-1)
    looked = param.Integer(default=0)
    pass_ = param.String(default="forward")
    slicing = param.String(default="")
    order: Any = param.Selector(default="", objects=list(ORDERS))
    window = param.String(default="")
    other = param.String(default="")
    other_step = param.Integer(default=None, allow_None=True)
    axis: Any = param.Selector(default="recorded", objects=["recorded", "relative"])
    other_revision = param.Integer(default=-1)
    views = param.Integer(default=-1)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)  # type: ignore[no-untyped-call]

    @property
    def selection(self) -> Selection:
        """The point of view on the run."""
        return Selection(**{name: getattr(self, name) for name in SELECTION})

    def put(self, selection: Selection, **others: object) -> None:
        """Sets all at once, so that watchers hear of one change."""
        self.param.update(**asdict(selection), **others)
