"""What one browser session shows: parameters only, no data and no drawing."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import param

from comgra_decl.viewer.model.selection import Selection

SECTIONS = {
    "overview": "Overview",
    "inspect": "Inspect",
    "kpis": "KPIs",
    "modules": "Modules",
    "findings": "Findings",
    "notes": "Notes",
    "run": "Run",
}
"""Sections of the page: id and label, in order."""

SELECTION = tuple(field.name for field in fields(Selection))
"""Names of the parameters that make up a `Selection`."""


class ViewState(param.Parameterized):
    """The state of one session; changed by `Dashboard.change` alone, watched by it alone.

    Attributes:
        run: Name of the run below the root, "" while there is none.
        colour: What paints the graph: "kind", "findings" or the name of a pass.
        section: Key of `SECTIONS`.
        scale: How series are drawn: "linear" or "log".
        expanded: Opened scopes of the graph; None until the user opens or closes one.
        follow: Whether the newest step is shown as it comes.
        revision: Revision of the run that is on screen.
        looked: Counts how often somebody looked at a run again.
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
    section: Any = param.Selector(default="inspect", objects=list(SECTIONS))
    expanded = param.ClassSelector(default=None, class_=frozenset, allow_None=True)
    follow = param.Boolean(default=False)
    revision = param.Integer(default=-1)
    looked = param.Integer(default=0)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)  # type: ignore[no-untyped-call]

    @property
    def selection(self) -> Selection:
        """The point of view on the run."""
        return Selection(**{name: getattr(self, name) for name in SELECTION})

    def put(self, selection: Selection, **others: object) -> None:
        """Sets all at once, so that watchers hear of one change."""
        self.param.update(**asdict(selection), **others)
