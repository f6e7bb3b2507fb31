"""Which rules check a run, and what happens when one of them reports a finding.

Only the form is checked here. Names and parameters are checked by `comgra_decl.rules` before a run
is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from comgra_decl.spec.base import Number, SpecModel

Limit = Literal["error", "warning", "hint", "never"]
"""The lowest severity of findings that triggers an action."""


def _switched(value: Any) -> Any:
    """Convert booleans back to `off` and `on`, which YAML reads as booleans."""
    return {False: "off", True: "default"}.get(value, value) if isinstance(value, bool) else value


def _entries(value: Any) -> Any:
    """Return the entries of a mapping in their long form."""
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
"""Settings of one rule."""

Rules = Annotated[
    Literal["default", "off"] | dict[str, RuleEntry],
    BeforeValidator(_entries),
]
"""All rules with their defaults, no rules, or a mapping from rule name to changed settings."""


class NotifySpec(SpecModel):
    """Sends each finding to a URL, as JSON in a POST request, from a separate thread."""

    url: Annotated[str, Field(pattern=r"^https?://")]
    """The URL. It is stored with the run, so use `${oc.env:NAME}` if it is secret."""

    severity: Limit = "warning"
    """Lowest severity of the findings to send."""

    timeout: Annotated[Number, Field(gt=0, le=60)] = 5.0
    """Timeout in seconds; failed requests are not repeated."""


class FindingSpec(SpecModel):
    """Actions to take on findings, each with the lowest severity that triggers it.

    Every finding is also stored with the run.
    """

    log: Limit = "warning"
    """Write one line per finding to the program's log, at most one per second."""

    note: Limit = "warning"
    """Add a note to the run, at the step of the finding."""

    keep: Limit = "never"
    """Keep the step at which the finding began, the `keep.ring` steps before it, and the
    `keep.after` steps after it, if they are still buffered. Requires `keep`, which buffers
    steps."""

    stop: Limit = "never"
    """End the program at its next optimizer step, with the finding as the reason."""

    break_: Limit = Field(default="never", alias="break")
    """Stop in pdb at the next module call. This happens only once, and standard input must be a
    terminal."""

    notify: NotifySpec | None = None
    """Send the finding to a URL; null for none."""
