"""Extract the parts of a run's report that concern the user."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any


def remarks(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one sentence for each warning and for everything declared but not recorded.

    Args:
        report: the run's document `report`; empty before the first record.
    """
    refused = [
        f"{name} is not recorded: {why}" for name, why in (report.get("refused") or {}).items()
    ]
    found = [*(report.get("unmatched") or ()), *refused, *(report.get("warnings") or ())]
    return tuple(dict.fromkeys(map(str, found)))


def verify_command(path: object) -> str:
    """Return the command that shows which data of a damaged run is lost and which is intact."""
    return f"comgra-decl verify {shlex.quote(str(path))}"


_SHOWN_FROM = 0.1
"""Minimum compile time to mention, in seconds."""


def price_text(report: Mapping[str, Any]) -> str | None:
    """Return a sentence with the cost of a record; None if it was not measured.

    Args:
        report: the run's document `report`; empty before the first record.
    """
    price = report.get("price") or {}
    plain, added = price.get("plain") or {}, price.get("added") or {}
    costs = [
        f"{_milliseconds(added[clock])} to a step of {_milliseconds(plain[clock])} ({clock})"
        for clock in ("device", "host")
        if plain.get(clock) is not None and added.get(clock) is not None
    ]
    once, first = price.get("once") or 0.0, price.get("records") == 1
    if costs and once >= _SHOWN_FROM:
        costs.append(f"plus {once:.3g} s once, for compiling")
    which = "the first record, which found the model, added" if first else "a record adds"
    return f"{which} {', '.join(costs)}" if costs else None


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
