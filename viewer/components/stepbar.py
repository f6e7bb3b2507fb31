"""The bar of recorded steps."""

from __future__ import annotations

import param

from comgra_decl.viewer.components.base import Component, Message, source


class StepBar(Component):
    """Shows every recorded step on a true axis and says where the user moved.

    Messages: `{"index": position in steps}` and `{"follow": bool}`.

    Attributes:
        steps: The recorded steps, ascending.
        index: Position of the current step in `steps`; -1 without steps.
        marks: Flags above the axis, `{"index": int, "color": "#rrggbb", "title": str}`.
        follow: Whether the newest step is shown as it comes.
    """

    steps = param.List(default=[])
    index = param.Integer(default=-1)
    marks = param.List(default=[])
    follow = param.Boolean(default=False)

    _esm = source("shared.js", "stepbar.js")
    _stylesheets = [source("stepbar.css")]

    def check(self, message: Message) -> bool:
        """Whether the index is one of a recorded step, or `follow` is a truth value."""
        ((action, value),) = message.items()
        if action == "follow":
            return isinstance(value, bool)
        is_index = isinstance(value, int) and not isinstance(value, bool)
        return action == "index" and is_index and 0 <= value < len(self.steps)
