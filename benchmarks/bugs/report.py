"""Format the outcomes for printing and storing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.bugs.play import Outcome, Reported
from benchmarks.machine import machine_facts


def line(outcome: Outcome, *, details: bool = False) -> str:
    """Return one line about a training run and, with `details`, one line for each finding."""
    first = f"{outcome.name:30} {outcome.kind:12} {_verdict(outcome)}"
    lines = [f"{first}   loss {outcome.losses[0]:.3g} -> {outcome.losses[1]:.3g}"]
    healthy = outcome.family is None
    if details or healthy or not outcome.right:
        lines += [f"      {_words(finding)}" for finding in outcome.said]
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return recall and false alarms as text."""
    facts = scores(outcomes)
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def scores(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the recall over bugs, the false alarms over healthy runs, and the missed bugs."""
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
    """Return the data to store."""
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


def _words(finding: Reported, *, short: bool = False) -> str:
    where = "" if finding.node is None else f" at {finding.node}"
    text = f"{finding.severity} {finding.rule}{where}, step {finding.step}"
    return text if short else f"{text}: {finding.message[:110]}"
