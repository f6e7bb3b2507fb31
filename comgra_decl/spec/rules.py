"""Which rules watch a run, and what happens when one of them finds something.

Here only their form is checked. Names and parameters are the rules' own: `comgra_decl.rules`
checks them when a run is about to be recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from comgra_decl.spec.base import Number, SpecModel

Limit = Literal["error", "warning", "hint", "never"]
"""Findings of this severity, or of a worse one."""


def _switched(value: Any) -> Any:
    """YAML reads `off` as false."""
    return {False: "off", True: "default"}.get(value, value) if isinstance(value, bool) else value


def _entries(value: Any) -> Any:
    """Returns the entries of a mapping in their long form."""
    value = _switched(value)
    if value is None:
        return "off"
    if not isinstance(value, Mapping):
        return value
    return {name: _entry(entry) for name, entry in value.items()}


def _entry(value: Any) -> Any:
    if value is None:
        return "off"
    value = _switched(value)
    if value == "default":
        return {}
    return {"when": value} if isinstance(value, str) and value != "off" else value


RuleEntry = Literal["off"] | dict[str, Any]
"""What the spec says of one rule."""

Rules = Annotated[
    Literal["default", "off"] | dict[str, RuleEntry],
    BeforeValidator(_entries),
]
"""All rules with their defaults, none, or what is different by the name of a rule."""


class NotifySpec(SpecModel):
    """Sends each finding to an address, as JSON in a POST request, from a thread of its own."""

    url: Annotated[str, Field(pattern=r"^https?://")]
    """Where to send it. It is stored with the run, so use `${oc.env:NAME}` for secret ones."""

    severity: Limit = "warning"
    """Least severity."""

    timeout: Annotated[Number, Field(gt=0, le=60)] = 5.0
    """Seconds until an address that does not answer is given up; nothing is sent again."""


class FindingSpec(SpecModel):
    """What happens when a rule has found something, by least severity.

    Every finding is stored with the run in any case.
    """

    log: Limit = "warning"
    """Write a line to the program's log; one per finding, at most one a second."""

    note: Limit = "warning"
    """Write it among the run's notes, at its step."""

    keep: Limit = "never"
    """Keep the step at which it began, the `keep.ring` steps before it and the `keep.after` steps
    after it, as far as they are still held; needs `keep`, which holds them."""

    stop: Limit = "never"
    """End the program at its next optimizer step, with the finding as the reason."""

    break_: Limit = Field(default="never", alias="break")
    """Stop in pdb at the next call of a module, once; needs a terminal as standard input."""

    notify: NotifySpec | None = None
    """Send it somewhere; null for nowhere."""
