"""What a person should read of a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def remarks(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns each sentence about what was declared and is not recorded, and each warning, once.

    Args:
        report: the document `report` of a run; empty before the first record.
    """
    refused = [
        f"{name} is not recorded: {why}" for name, why in (report.get("refused") or {}).items()
    ]
    said = [*(report.get("unmatched") or ()), *refused, *(report.get("warnings") or ())]
    return tuple(dict.fromkeys(map(str, said)))


_WORTH_SAYING = 0.1
"""Seconds of compiling from which on they are told."""


def price_text(report: Mapping[str, Any]) -> str | None:
    """Returns what a record has cost, in words; None where it was not measured.

    Args:
        report: the document `report` of a run; empty before the first record.
    """
    price = report.get("price") or {}
    plain, added = price.get("plain") or {}, price.get("added") or {}
    told = [
        f"{_milliseconds(added[clock])} to a step of {_milliseconds(plain[clock])} ({clock})"
        for clock in ("device", "host")
        if plain.get(clock) is not None and added.get(clock) is not None
    ]
    once, first = price.get("once") or 0.0, price.get("records") == 1
    if told and once >= _WORTH_SAYING:
        told.append(f"and {once:.3g} s were spent once, on compiling")
    which = "the first record, which found the model, added" if first else "a record adds"
    return f"{which} {', '.join(told)}" if told else None


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
