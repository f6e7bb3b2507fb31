"""The verdict on a run in one line, and the counts on the section tabs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from comgra_decl.query import Ending
from comgra_decl.records import SEVERITIES
from comgra_decl.rules import Diagnosis, Finding, health
from comgra_decl.viewer.model.findings import rule_label
from comgra_decl.viewer.model.numbers import count
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.verdicts import Found, found

Tone = Literal["error", "warning", "hint", "good", "neutral"]
"""A severity: the worst of the findings; good: every check was completed and nothing was found;
neutral: nothing was found, but some checks could not be completed.
"""


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
    """

    tone: Tone
    lead: str
    text: str = ""
    numbers: str = ""
    worst: Finding | None = None
    unasked: bool = False


def headline(view: RunView) -> Headline:
    """Return the verdict on a run from its end, the latest findings and the checklist."""
    said = headline_of(found(view), live=view.run.state == "live", last=_last(view))
    ending = ending_of(view)
    if ending is None:
        return said
    text = ending.headline.removeprefix("the program failed ")
    failed = text != ending.headline
    lead = "The program failed" if failed else "The program ended early"
    return replace(said, tone="error", lead=lead, text=text, unasked=False)


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
        return Headline(tone, counted(diagnosis.findings), about(worst, last), numbers, worst)
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
