"""Findings: the problems that rules report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from comgra_decl.records import SEVERITIES, Severity

MOST_OTHERS = 20
"""Maximum number of other tensors that a finding names; `also` counts all of them."""


@dataclass(frozen=True, slots=True)
class Place:
    """A slot in the form shown to users: location of a finding or of a link in its chain."""

    node: str
    role: str = "output"
    iteration: int = 0
    pass_: str = "forward"

    def __str__(self) -> str:
        text = self.node if self.role == "output" else f"{self.node} {self.role}"
        if self.iteration:
            text += f", iteration {self.iteration}"
        return text if self.pass_ == "forward" else f"{text} ({self.pass_})"


@dataclass(frozen=True, slots=True)
class Link:
    """A tensor in a chain of causes: its location, its first unusual step, and the deviation."""

    place: Place
    first_step: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem, regardless of how many tensors show it.

    Attributes:
        rule: name of the rule.
        severity: see `Severity`.
        place: the first tensor that shows the problem; None if the problem concerns the whole run.
        first_step: the first recorded step with the problem.
        last_step: the last recorded step with the problem; the step of the newest record if the
            problem persists.
        message: one sentence that includes the main numbers.
        advice: what to do about the problem.
        certainty: from 0 to 1; orders findings of the same severity.
        evidence: the values that support the finding, by name.
        also: number of other tensors that show the same problem.
        others: the first of these tensors.
        chain: the tensors from the probable cause to `place`.
        because: the rule whose finding probably explains this one, and precedes it in lists.
        sample: index of the recorded sample that shows the problem first, if known.
        after_step: the last step known to be free of the problem, usually the step of the previous
            record. The problem began after this step and no later than `first_step`. None if no
            earlier step is known.
        outcome: the worst severity among the findings that this one explains, if it is worse than
            the severity of this finding.
    """

    rule: str
    severity: Severity
    first_step: int
    last_step: int
    message: str
    advice: str
    certainty: float = 0.5
    place: Place | None = None
    evidence: Mapping[str, float | int | str] = field(default_factory=dict)
    also: int = 0
    others: tuple[Place, ...] = ()
    chain: tuple[Link, ...] = ()
    because: str | None = None
    sample: int | None = None
    after_step: int | None = None
    outcome: Severity | None = None

    @property
    def weight(self) -> Severity:
        """Worst severity among this finding and the findings that it explains."""
        return self.severity if self.outcome is None else self.outcome

    @property
    def is_exact(self) -> bool:
        """Whether the problem is known to have begun exactly at `first_step`."""
        return self.after_step is None or self.after_step >= self.first_step - 1

    @property
    def began(self) -> str:
        """Time at which the problem began, such as "step 74" or "between steps 73 and 80"."""
        return began(self.first_step, self.after_step)

    @property
    def span(self) -> str:
        """Steps with the problem, such as "steps 74 to 300"."""
        if not self.is_exact:
            return f"{self.began}, until step {self.last_step}"
        if self.first_step == self.last_step:
            return self.began
        return f"steps {self.first_step} to {self.last_step}"

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON-compatible data; non-finite numbers become strings."""
        content = asdict(self)
        content["evidence"] = {name: _plain(value) for name, value in self.evidence.items()}
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Finding:
        """Restore a finding from the result of `to_json`, ignoring unknown keys."""
        known = {name: content[name] for name in cls.__dataclass_fields__ if name in content}
        place, chain = known.get("place"), known.get("chain", ())
        known["place"] = None if place is None else Place(**place)
        known["others"] = tuple(Place(**other) for other in known.get("others", ()))
        known["chain"] = tuple(Link(**{**link, "place": Place(**link["place"])}) for link in chain)
        return cls(**known)

    def explained_by(self, rule: str) -> Finding:
        """Return this finding, marked as a consequence of another rule's finding."""
        return replace(self, because=rule)


def began(first: int, after: int | None) -> str:
    """Describe the beginning of a problem present at step `first` and absent at step `after`."""
    if after is None or after >= first - 1:
        return f"step {first}"
    return f"between steps {after + 1} and {first}"


def since(first: int, after: int | None) -> str:
    """Return the beginning as the start of a period: "from step 74 on"."""
    when = began(first, after)
    return f"from {when} on" if when.startswith("step") else f"starting {when}"


def best_first(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings, each followed by its consequences.

    Findings that no other finding explains are sorted by the worst severity among them and their
    consequences, then by severity, certainty and first step. Consequences of the same cause are
    sorted in the same way.
    """
    weights = {id(f): _weight(f, findings) for f in findings}
    ordered = sorted(
        findings,
        key=lambda f: (
            SEVERITIES.index(weights[id(f)]),
            SEVERITIES.index(f.severity),
            -f.certainty,
            f.first_step,
            f.rule,
        ),
    )
    result: list[Finding] = []
    for finding in ordered:
        if finding.because is None:
            result.append(finding)
            result += [f for f in ordered if f.because and root_of(f, ordered) is finding]
    placed = {id(finding) for finding in result}
    found = [*result, *(finding for finding in ordered if id(finding) not in placed)]
    return [_with_outcome(finding, weights[id(finding)]) for finding in found]


def root_of(finding: Finding, findings: Sequence[Finding]) -> Finding | None:
    """Return the root cause of a finding: the finding that explains it and has no cause itself.

    Returns None if `findings` does not contain the root cause. If a rule has several findings, the
    first of them is used.
    """
    seen: set[str] = set()
    while finding.because is not None:
        cause = next((f for f in findings if f.rule == finding.because), None)
        if cause is None or cause.rule in seen:
            return None
        seen.add(cause.rule)
        finding = cause
    return finding


def roots_of(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that no other finding explains, in the order of `findings`."""
    return [f for f in findings if f.because is None or root_of(f, findings) is None]


def consequences_of(finding: Finding, findings: Sequence[Finding]) -> list[Finding]:
    """Return the direct and indirect consequences of a finding, in the order of `findings`."""
    return [f for f in findings if f.because is not None and root_of(f, findings) is finding]


def _weight(finding: Finding, findings: Sequence[Finding]) -> Severity:
    consequences = consequences_of(finding, findings) if finding.because is None else []
    return min((f.severity for f in (finding, *consequences)), key=SEVERITIES.index)


def _with_outcome(finding: Finding, weight: Severity) -> Finding:
    outcome = None if weight == finding.severity else weight
    return finding if finding.outcome == outcome else replace(finding, outcome=outcome)


def at_least(severity: Severity, limit: str | None) -> bool:
    """Return whether a severity is at least as bad as `limit`; False for None and "never"."""
    return limit in SEVERITIES and SEVERITIES.index(severity) <= SEVERITIES.index(limit)


def _plain(value: float | str) -> float | int | str:
    if isinstance(value, str) or value - value == 0:
        return value
    return str(value)
