"""The page's address, kept equal to what is shown."""

from __future__ import annotations

import param

from comgra_decl.viewer.components.base import Component, Message, source

_QUERY_LENGTH = 8000


class UrlSync(Component):
    """Writes the query part of the address and reports Back and Forward.

    Messages: `{"query": "?..."}`, once when the page is ready and whenever the user goes back or
    forward in the history. What it says comes from outside: look it up, never trust it.

    Attributes:
        query: Query part of the address, "" or "?key=value&...".
        push: Whether the next change of `query` is a new entry in the history (a node, a section)
            or replaces the current one (a step). Set both in one `param.update`.
    """

    query = param.String(default="")
    push = param.Boolean(default=False)

    _esm = source("shared.js", "urlsync.js")

    def check(self, message: Message) -> bool:
        """Whether the message is a query of sane length."""
        query = message.get("query")
        return isinstance(query, str) and len(query) <= _QUERY_LENGTH

    def accept(self, message: Message) -> None:
        """Takes over what the address says already."""
        self.query = message["query"]
