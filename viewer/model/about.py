"""Facts about a run other than its records: spec, capture report, config and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import yaml

from comgra_decl.query.report import price_text, remarks
from comgra_decl.viewer.model.numbers import count, duration
from comgra_decl.viewer.model.runview import RunView

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """Capture counts of one entry of the spec's `nodes`."""

    name: str
    matched: int
    fired: int
    written: int
    never_called: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class About:
    """Data for the Run section. `remarks` are warnings to show first."""

    summary: Facts
    entries: tuple[Entry, ...]
    remarks: tuple[str, ...]
    spec: str
    config: str
    facts: Facts


def about(view: RunView) -> About:
    """Return the run's facts as text, and its spec and config as YAML."""
    run = view.run
    report = run.report or {}
    return About(
        _summary(view),
        tuple(_entry(name, entry) for name, entry in (report.get("entries") or {}).items()),
        (*_stopped(run.error), *remarks(report)),
        _yaml(_plain_spec(run.spec)),
        _yaml(run.config) if run.config else "",
        tuple(_flat(run.facts)),
    )


def schedule(view: RunView) -> str:
    """Return the spec's schedule, which selects the steps to record, as YAML."""
    spec = _plain_spec(view.spec)
    asked = spec.get("schedule") if isinstance(spec, Mapping) else None
    given = {key: value for key, value in (asked or {}).items() if value not in (None, [], {})}
    return _yaml({"schedule": given}).rstrip() if given else ""


def _summary(view: RunView) -> Facts:
    run = view.run
    records = run.records
    cost = float(records["cost"].mean()) if len(records) else 0.0
    parameters = sum(
        int(p.get("count", 0))
        for module in run.modules
        for p in module.get("parameters", {}).values()
        if not p.get("tied_to")
    )
    facts = [
        ("folder", str(run.path)),
        ("state", str(run.state)),
        ("records", count(len(records))),
        ("steps", _span(view)),
        ("step types", ", ".join(run.types) or "none yet"),
        ("nodes", count(len(view.nodes))),
        ("series (slots)", count(len(view.slots))),
        ("model parameters", count(parameters) if parameters else "unknown"),
        (
            "cost per record",
            price_text(run.report or {}) or (duration(cost) if cost else "unknown"),
        ),
    ]
    return tuple(facts)


def _span(view: RunView) -> str:
    steps = view.steps("")
    return f"{count(int(steps[0]))} to {count(int(steps[-1]))}" if len(steps) else "none yet"


def _entry(name: str, entry: Mapping[str, Any]) -> Entry:
    matched, fired, written = (int(entry.get(key, 0)) for key in ("matched", "fired", "written"))
    return Entry(name, matched, fired, written, tuple(entry.get("never_called", ())))


def _stopped(error: str | None) -> tuple[str, ...]:
    return (f"Recording stopped before training ended: {error}",) if error else ()


def _plain_spec(spec: Any) -> Any:
    return spec.model_dump(mode="json") if hasattr(spec, "model_dump") else spec


def _yaml(document: Any) -> str:
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    return text


def _flat(document: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """Flattens nested facts to pairs of `dotted.name` and text."""
    lines: list[tuple[str, str]] = []
    for key, value in document.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            lines += _flat(value, f"{name}.")
        else:
            lines.append((name, _text(key, value)))
    return lines


def _text(key: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    if key in ("started", "time") and isinstance(value, (int, float)):
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S")
    return "none" if value is None else str(value)
