"""Writes the state into the URL query and parses it.

URL values are untrusted. `parse` checks the form of each field and drops malformed ones;
`resolve` then matches the remaining values against existing names.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from urllib.parse import parse_qsl, urlencode

from comgra_decl.viewer.model.runs import SMOOTHINGS, X_AXES
from comgra_decl.viewer.state import HIDDEN, LEAST, MOST, ORDERS, SECTIONS, SHOWN, ViewState

_TEXTS = {
    "run": "run",
    "type": "type",
    "node": "node",
    "role": "role",
    "gradient": "gradient",
    "batch": "batch",
    "stat": "statistic",
    "colour": "colour",
    "pass": "pass_",
    "slice": "slicing",
    "window": "window",
    "other": "other",
    "other_type": "other_type",
    "metric": "metric",
    "against": "against",
    "between": "between",
}
_NUMBERS = {"step": "step", "iteration": "iteration", "other_step": "other_step"}
_CHOICES: dict[str, Collection[str]] = {
    "section": SECTIONS,
    "scale": ("linear", "log"),
    "order": ORDERS,
    "axis": ("recorded", "relative"),
    "smoothing": SMOOTHINGS,
    "x_axis": X_AXES,
    "measure": ("raw", "relative"),
    "graph": (HIDDEN, SHOWN, *map(str, range(LEAST, MOST + 1))),
}
_LONGEST = 500
_MOST = {"open": 500, "tick": 100}
"""Maximum numbers of expanded groups and of ticked runs."""

_OF_A_NODE = "inspect"
"""Section that is shown if a URL names a node but no section."""

PUSHED = frozenset({"run", "type", "node", "role", "section", "other", "other_type"})
"""Parameters whose changes add browser history entries. Others replace the current entry."""


def parse(query: str) -> dict[str, Any]:
    """Return the well-formed fields of a query (with or without "?"), by parameter name."""
    found: dict[str, Any] = {}
    lists: dict[str, list[str]] = {key: [] for key in _MOST}
    for key, value in parse_qsl(query.lstrip("?"), keep_blank_values=True, max_num_fields=None):
        if len(value) > _LONGEST:
            continue
        # Links written by hand have the name on the tab.
        value = value.lower() if key == "section" else value
        if key in _TEXTS:
            found[_TEXTS[key]] = value
        elif key in _NUMBERS and value.isascii() and value.isdecimal() and len(value) < 16:
            found[_NUMBERS[key]] = int(value)
        elif key in _CHOICES and value in _CHOICES[key]:
            found[key] = value
        elif key in lists and len(lists[key]) < _MOST[key]:
            lists[key].append(value)
    if lists["open"]:
        found["expanded"] = frozenset(lists["open"]) - {""}
    if lists["tick"]:
        found["ticked"] = tuple(name for name in lists["tick"] if name)
    if "node" in found:
        found.setdefault("section", _OF_A_NODE)
    return found


def format_query(state: ViewState) -> str:
    """Return the query that `parse` turns back into this state; omits defaults."""
    pairs: list[tuple[str, str]] = []
    for key, name in {**_TEXTS, **_NUMBERS, **{key: key for key in _CHOICES}}.items():
        value = "" if getattr(state, f"auto_{name}", False) else getattr(state, name)
        default = _OF_A_NODE if name == "section" and state.node else state.param[name].default
        if value is not None and value != default:
            pairs.append((key, str(value)))
    if state.follow:  # the newest step has no number
        pairs = [pair for pair in pairs if pair[0] != "step"]
    if state.expanded is not None:
        pairs += [("open", scope) for scope in sorted(state.expanded) or [""]]
    if state.ticked is not None:
        pairs += [("tick", name) for name in state.ticked[: _MOST["tick"]] or [""]]
    return f"?{urlencode(pairs)}" if pairs else ""
