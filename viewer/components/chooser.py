"""Labelled drop-downs and button rows, drawn natively so that a choice arrives at once."""

from __future__ import annotations

from typing import ClassVar

import param

from comgra_decl.viewer.components.base import Component, Message, source


class Chooser(Component):
    """A column of choices; says `{field: value}` when the user picks one.

    Attributes:
        groups: `{"title": str, "fields": [field, ...]}` from top to bottom; each field is
            `{"name": str, "label": str, "value": str, "help": str, "style": "menu" | "buttons",
            "options": [{"value": str, "label": str, "group": str}, ...]}`. A field with fewer
            than two options is shown but cannot be changed.
    """

    groups = param.List(default=[])

    _esm = source("shared.js", "chooser.js")
    _stylesheets: ClassVar = [source("chooser.css")]

    def check(self, message: Message) -> bool:
        """Whether the value is one of the options of its field."""
        ((name, value),) = message.items()
        for group in self.groups:
            for field in group["fields"]:
                if field["name"] == name:
                    return any(option["value"] == value for option in field["options"])
        return False
