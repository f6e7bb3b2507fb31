"""Labelled menus, numbers and buttons, drawn natively so that a choice arrives at once."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import param

from comgra_decl.viewer.components.base import Component, Message, source


class Chooser(Component):
    """A column of choices; says `{field: value}` when the user picks one.

    Attributes:
        layout: The choices as JSON: `[{"title": str, "fields": [field, ...]}, ...]` from top to
            bottom; each field is `{"name": str, "label": str, "value": str, "help": str,
            "style": "menu" | "buttons" | "actions" | "number", "options": [{"value": str, "label":
            str, "group": str}, ...], "low": int, "high": int}`. A menu with fewer than two options
            is shown but cannot be changed; a number lies between `low` and `high`. A text, because
            param compares and Bokeh searches nested lists, which takes longer than all the rest.
    """

    layout = param.String(default="[]")

    _esm = source("shared.js", "handover.js", "chooser.js")
    _stylesheets: ClassVar = [source("chooser.css")]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """What can be chosen now."""
        groups: list[dict[str, Any]] = json.loads(self.layout)
        return groups

    def check(self, message: Message) -> bool:
        """Whether the value is one of the options of its field, or a number in its range."""
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
