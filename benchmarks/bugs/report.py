"""What is printed and stored of the outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.bugs.play import Outcome, Said
from benchmarks.machine import machine_facts


def line(outcome: Outcome, *, details: bool = False) -> str:
    """Returns one line about a training; with `details` one more for each finding."""
    first = f"{outcome.name:30} {outcome.kind:12} {_verdict(outcome)}"
    lines = [f"{first}   loss {outcome.losses[0]:.3g} -> {outcome.losses[1]:.3g}"]
    healthy = outcome.family is None
    if details or healthy or not outcome.right:
        lines += [f"      {_words(said)}" for said in outcome.said]
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Returns recall and false alarms."""
    facts = scores(outcomes)
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def scores(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns recall over the bugs, false alarms over the healthy ones, and the misses' names."""
    bugs = [o for o in outcomes if o.family is not None]
    healthy = [o for o in outcomes if o.family is None]
    return {
        "bugs": len(bugs),
        "found": sum(o.right for o in bugs),
        "recall": _share(sum(o.right for o in bugs), len(bugs)),
        "found by rule alone": sum(o.right_rule for o in bugs),
        "recall by rule alone": _share(sum(o.right_rule for o in bugs), len(bugs)),
        "missed": [o.name for o in bugs if not o.right],
        "healthy": len(healthy),
        "false alarms": sum(o.alarms for o in healthy),
        "false alarms per healthy run": _share(sum(o.alarms for o in healthy), len(healthy)),
        "hints per healthy run": _share(sum(o.hints for o in healthy), len(healthy)),
        "alarmed": [o.name for o in healthy if o.alarms],
    }


def document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns all that is stored."""
    return {
        "machine": machine_facts(),
        "scores": scores(outcomes),
        "outcomes": [outcome.to_json() for outcome in outcomes],
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def _verdict(outcome: Outcome) -> str:
    if outcome.family is None:
        return f"{outcome.alarms} alarms, {outcome.hints} hints"
    if outcome.right and outcome.found is not None:
        return f"found {outcome.rank}. {_words(outcome.found, short=True)}"
    return "RULE ONLY" if outcome.right_rule else "MISSED"


def _words(said: Said, *, short: bool = False) -> str:
    where = "" if said.node is None else f" at {said.node}"
    text = f"{said.severity} {said.rule}{where}, step {said.step}"
    return text if short else f"{text}: {said.message[:110]}"
