"""Keeps the page's URL in sync with the state."""

from __future__ import annotations

import param

from comgra_decl.viewer.components.base import Component, Message, source

_QUERY_LENGTH = 8000


class UrlSync(Component):
    """Writes the URL query and reports Back and Forward.

    Sends `{"query": "?..."}` once when the page is ready, and whenever the user goes back or
    forward. The query is untrusted input.

    Attributes:
        query: Query part of the URL: "" or "?key=value&...".
        push: Whether the next change to `query` adds a history entry (for a node or a section) or
            replaces the current entry (for a step). Set both in one `param.update`.
    """

    query = param.String(default="")
    push = param.Boolean(default=False)

    _esm = source("shared.js", "urlsync.js")

    def check(self, message: Message) -> bool:
        """Return whether the message is a query of reasonable length."""
        query = message.get("query")
        return isinstance(query, str) and len(query) <= _QUERY_LENGTH

    def accept(self, message: Message) -> None:
        """Copy the query that the browser already shows."""
        self.query = message["query"]
