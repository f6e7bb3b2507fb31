"""Menus, numbers and buttons with labels, as native HTML elements that respond quickly."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import param

from comgra_decl.viewer.components.base import Component, Message, source


class Chooser(Component):
    """A column of selectors; sends `{field: value}` when the user picks a value.

    Attributes:
        layout: Selectors as JSON: `[{"title": str, "fields": [field, ...]}, ...]` from top to
            bottom; each field is `{"name": str, "label": str, "value": str, "help": str,
            "style": "menu" | "buttons" | "actions" | "number" | "slider", "options": [{"value":
            str, "label": str, "group": str}, ...], "low": int, "high": int}`. A menu with fewer
            than two options is disabled. A number lies between `low` and `high`. The layout is JSON
            text because param and Bokeh compare nested lists slowly.
    """

    layout = param.String(default="[]")

    _esm = source("shared.js", "handover.js", "chooser.js")
    _stylesheets: ClassVar = [source("chooser.css")]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The current selectors."""
        groups: list[dict[str, Any]] = json.loads(self.layout)
        return groups

    def check(self, message: Message) -> bool:
        """Return whether the value is an option of its field, or a number in its range."""
        ((name, value),) = message.items()
        for group in self.groups:
            for field in group["fields"]:
                if field["name"] == name and field["style"] == "number":
                    return _whole(value) and field["low"] <= int(value) <= field["high"]
                if field["name"] == name:
                    return any(option["value"] == value for option in field["options"])
        return False


def _whole(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 16
