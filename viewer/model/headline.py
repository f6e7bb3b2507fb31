"""The verdict on a run in one line, and the counts on the section tabs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from comgra_decl.query import Ending, metrics_of
from comgra_decl.records import SEVERITIES
from comgra_decl.rules import Diagnosis, Finding, health
from comgra_decl.viewer.model.findings import rule_label
from comgra_decl.viewer.model.numbers import count, number
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.series import drawn
from comgra_decl.viewer.model.verdicts import Found, found

Tone = Literal["error", "warning", "hint", "good", "neutral"]
"""A severity: the worst of the findings; good: every check was completed and nothing was found;
neutral: nothing was found, but some checks could not be completed.
"""


_POINTS = 60
"""Maximum number of points in the curve of the loss, which is about as wide in pixels."""

_NO_LOSS = np.empty(0, np.int64), np.empty(0)


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict on a run.

    Attributes:
        tone: See `Tone`.
        lead: The counts, such as "1 error, 2 warnings".
        text: The most important finding, or the checks that were not completed.
        numbers: How the loss developed, such as "loss 2.27 → 3.60"; "" if unknown.
        worst: The most important finding; None without findings.
        unasked: Whether no rule has checked this run.
        averaged: The same as the checklist judges it, where `numbers` are the first and last loss.
        curve: Points (step, loss) of the training loss to draw; empty if unknown.
    """

    tone: Tone
    lead: str
    text: str = ""
    numbers: str = ""
    worst: Finding | None = None
    unasked: bool = False
    averaged: str = ""
    curve: tuple[tuple[float, float], ...] = ()


def headline(view: RunView) -> Headline:
    """Return the verdict on a run from its end, the latest findings and the checklist."""
    said = headline_of(found(view), live=view.run.state == "live", last=_last(view))
    said = _with_loss(view, said)
    ending = ending_of(view)
    if ending is None:
        return said
    text = ending.headline.removeprefix("the program failed ")
    failed = text != ending.headline
    lead = "The program failed" if failed else "The program ended early"
    return replace(said, tone="error", lead=lead, text=text, unasked=False)


def _with_loss(view: RunView, said: Headline) -> Headline:
    """Return the verdict with the training loss, as in Runs, and its curve."""
    if not said.numbers.startswith("loss "):
        return said
    steps, values = view.now("training loss", lambda: metrics_of(view.run).get("loss", _NO_LOSS))
    finite = np.isfinite(values)
    if not finite.any():
        return said
    _, semicolon, rest = said.numbers.partition("; ")
    text = f"loss {number(float(values[0]))} \u2192 {number(float(values[-1]))}{semicolon}{rest}"
    steps, values = steps[finite], values[finite]
    keep = drawn(steps, values, _POINTS)
    curve = tuple(zip(steps[keep].tolist(), values[keep].tolist(), strict=True))
    return replace(said, numbers=text, averaged=said.numbers, curve=curve)


def ending_of(view: RunView) -> Ending | None:
    """Return how the program ended, if it did not end normally."""
    ending: Ending | None = view.now("ending", lambda: view.run.ending)
    return ending


def headline_of(known: Found, *, live: bool, last: int) -> Headline:
    """Return the verdict on a run.

    Args:
        known: The rule results.
        live: Whether training is still running.
        last: Step of the newest training record.
    """
    diagnosis = known.diagnosis
    if known.problem and diagnosis is None:
        return Headline("neutral", "The check failed", known.problem, unasked=True)
    looked = known.source == "looked"
    if diagnosis is None or not (diagnosis.records or diagnosis.findings or looked):
        lead = "Checking all records \u2026" if known.looking else "Not checked"
        text = "" if known.looking else "no rule has checked this run yet"
        return Headline("neutral", lead, text, unasked=not known.looking)
    reading = diagnosis.readings.get("falling")
    numbers = "" if reading is None else reading.text
    if diagnosis.findings:
        worst = diagnosis.findings[0]
        tone = min((f.severity for f in diagnosis.findings), key=SEVERITIES.index)
        text = about(worst, last) + (f" ({worst.severity})" if worst.severity != tone else "")
        return Headline(tone, counted(diagnosis.findings), text, numbers, worst)
    return _without_findings(diagnosis, live, numbers)


def _without_findings(diagnosis: Diagnosis, live: bool, numbers: str) -> Headline:
    """Return the verdict on a run without findings; "good" only if every check was completed."""
    lead = "No findings so far" if live else "No findings"
    asked = [c for c in health(diagnosis) if c.colour != "absent"]
    checks = [c for c in asked if not c.question.experiment or c.colour != "unchecked"]
    against = [check for check in checks if check.colour in ("red", "amber")]
    if against:
        first = against[0]
        text = f"but the values suggest otherwise: {first.question.text} {first.numbers}"
        return Headline("warning", lead, text.strip(), numbers)
    made = sum(check.colour == "green" for check in checks)
    if diagnosis.damage:
        return Headline("neutral", lead, "but part of the run is damaged", numbers)
    if not diagnosis.records:
        text = f"{len(checks) - made} of {len(checks)} checks need recorded training steps"
        return Headline("neutral", lead, text, numbers)
    if made < len(checks):
        missing = len(checks) - made
        text = f"{missing} of {len(checks)} checks could not be completed"
        return Headline("neutral", lead, text, numbers)
    return Headline("good", lead, f"all {made} checks were completed", numbers)


def counted(findings: Iterable[Finding]) -> str:
    """Return the number of findings of each severity, worst first: "1 error, 2 warnings"."""
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(
        f"{count(counts[severity])} {severity}{'s' * (counts[severity] > 1)}"
        for severity in SEVERITIES
        if counts[severity]
    )


def about(finding: Finding, last: int) -> str:
    """Return rule, tensor and steps of a finding.

    Args:
        finding: A finding.
        last: Step of the newest training record; a problem that lasts until then persists.
    """
    where = "" if finding.place is None else f" in {finding.place}"
    when = finding.span
    if finding.last_step >= last and finding.is_exact and finding.first_step < last:
        when = f"since step {finding.first_step}"
    elif when.startswith(("step ", "steps ")):
        when = f"at {when}"
    return f"{rule_label(finding.rule)}{where} {when}"


def tab_counts(view: RunView) -> dict[str, tuple[str, str]]:
    """Return the count on each section's tab and the worst severity in it, by section.

    Sections with nothing to count are left out.
    """
    diagnosis = found(view).diagnosis
    findings = [] if diagnosis is None else diagnosis.findings
    worst = min((f.severity for f in findings), key=SEVERITIES.index, default="")
    size = len(findings)
    if ending_of(view) is not None:
        size, worst = size + 1, "error"
    metrics, notes = view.now("tab counts", lambda: _sizes(view))
    counts = {"kpis": (metrics, ""), "findings": (size, worst), "notes": (notes, "")}
    return {key: (count(size), tone) for key, (size, tone) in counts.items() if size}


def _sizes(view: RunView) -> tuple[int, int]:
    return int(view.run.kpis(automatic=True)["name"].nunique()), len(view.run.notes())


def _last(view: RunView) -> int:
    steps = view.steps("")
    return int(steps[-1]) if len(steps) else 0
