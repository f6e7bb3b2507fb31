"""A table of runs that sorts, filters and scrolls in the browser."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import param

from comgra_decl.viewer.components.base import Component, Message, source


class RunsTableView(Component):
    """Shows one row per run.

    The page contains only the rows in view, so thousands of runs are fast.

    Messages: `{"ticked": [name, ...]}` with all ticked runs, and `{"open": name}`.

    Attributes:
        content: The table as JSON: `{"columns": [{"label": str, "help": str, "number": bool}, ...],
            "rows": [{"name": str, "colour": "#rrggbb", "text": [str, ...], "key": [number | str |
            None, ...]}, ...]}`. Rows are sorted and filtered by `key`; None sorts last.
        ticked: Names of the ticked runs.
        shown: Name of the open run.
        reading: Number of runs that are still being read.
    """

    content = param.String(default='{"columns": [], "rows": []}')

    ticked = param.List(default=[], item_type=str)
    shown = param.String(default="")
    reading = param.Integer(default=0)

    _esm = source("shared.js", "handover.js", "runs_table.js")
    _stylesheets: ClassVar = [source("runs_table.css")]

    @property
    def names(self) -> list[str]:
        """Names of the runs, in the order sent."""
        rows: list[dict[str, Any]] = json.loads(self.content)["rows"]
        return [row["name"] for row in rows]

    def check(self, message: Message) -> bool:
        """Return whether the message names only runs in the table."""
        ((action, value),) = message.items()
        known = set(self.names)
        if action == "ticked":
            return isinstance(value, list) and all(isinstance(n, str) and n in known for n in value)
        return action == "open" and isinstance(value, str) and value in known

    def accept(self, message: Message) -> None:
        """Copy the ticks that the browser already shows."""
        if "ticked" in message:
            self.ticked = message["ticked"]
