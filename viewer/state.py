"""State of one browser session: parameters only, no data or drawing."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import param

from comgra_decl.viewer.model.selection import Selection

SECTIONS = {
    "overview": "Overview",
    "inspect": "Inspect",
    "values": "Values",
    "pictures": "Pictures",
    "compare": "Compare",
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

SELECTION = tuple(field.name for field in fields(Selection))
"""Names of the parameters that make up a `Selection`."""


class ViewState(param.Parameterized):
    """State of one session. Only `Dashboard.change` changes it, and only `Dashboard` watches it.

    Attributes:
        run: Name of the run below the root; "" if there is no run.
        colour: What colours the graph: "kind", a pass name, "difference", "findings", or "rule:"
            followed by a rule's name.
        section: Key of `SECTIONS`.
        scale: How series are drawn: "linear" or "log".
        expanded: Expanded groups of the graph; None until the user expands or collapses one.
        follow: Whether to show the newest step as it arrives.
        revision: Revision of the displayed run.
        looked: Number of times a run was reopened.
        pass_: Pass that the Values and Compare sections show.
        slicing: Dims of raw values used as rows and columns; see `model.slicing`.
        order: One of `ORDERS`.
        window: First visible row and column of the value table: "0,0".
        other: Run to compare with; "" for this run.
        other_step: Step to compare with. None selects the same step of another run, or the first
            step of this run.
        axis: Whether compared series are absolute or relative to their first value.
        other_revision: Displayed revision of the other run.
        views: Displayed version of the custom views file.
        walk: Finding and stop of the walk through the evidence, "" outside a walk; see
            `model.walk`.
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
    walk = param.String(default="")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)  # type: ignore[no-untyped-call]

    @property
    def selection(self) -> Selection:
        """The current selection."""
        return Selection(**{name: getattr(self, name) for name in SELECTION})

    def put(self, selection: Selection, **others: object) -> None:
        """Sets all parameters at once, so that watchers run once."""
        self.param.update(**asdict(selection), **others)
