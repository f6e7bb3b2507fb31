"""Correlations between two quantities, as candidates and as reported."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from comgra_decl.rules.correlations.origin import Origin
from comgra_decl.rules.finding import Place
from comgra_decl.rules.window import Floats

Kind = Literal["moves", "happens", "samples", "differs"]
"""The kind of a correlation:

- moves: two series rise and fall together.
- happens: one event coincides with another.
- samples: within a record, samples with larger values of one quantity have larger (or smaller)
  values of the other.
- differs: records with a given tag or type, or samples in a given category, have a larger (or
  smaller) metric or loss than the others.
"""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two quantities or events.

    Attributes:
        text: its name: "l2 of blocks.3 weight (update)", "loss", "tag hard".
        place: the tensor, if the side is one.
        statistic: the statistic of that tensor.
        event: for events, a description: "abnormally high"; "" for series.
    """

    text: str
    place: Place | None = None
    statistic: str = ""
    event: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.event}".strip()


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """Two correlated quantities or events, with strength and certainty.

    Attributes:
        kind: see `Kind`.
        first: the candidate, such as a statistic of a tensor.
        second: the quantity with which it is compared, such as a loss.
        effect: a correlation from -1 to 1. For events, the share of occurrences of `second` that
            coincide with `first`. For groups, Cliff's delta, which is the share of pairs in which
            the member has the larger value, minus the share in which it has the smaller one.
        low: lower end of the 95% interval of the effect.
        high: upper end of this interval.
        base: for events, the share of all records with `first`; otherwise None.
        lag_records: number of records by which `first` precedes `second`; negative if `first`
            follows.
        lag_steps: the lag in steps (the median over the records).
        records: number of records used.
        count: number of independent cases: effective records, episodes or samples; for groups, the
            number of members.
        total: for groups, the number of members and others; otherwise 0.
        medians: for groups, the median of `second` among members and among the others; None if a
            trend reverses their difference.
        q: the false discovery rate among all results that are at least as significant (Benjamini
            and Hochberg).
        first_step: a step that shows the correlation.
        also: other sides that practically coincide with `first`.
    """

    kind: Kind
    first: Side
    second: Side
    effect: float
    low: float
    high: float
    records: int
    count: int
    q: float
    first_step: int
    base: float | None = None
    lag_records: int = 0
    lag_steps: int = 0
    total: int = 0
    medians: tuple[float, float] | None = None
    also: tuple[Side, ...] = ()

    @property
    def strength(self) -> float:
        """Strength from 0 to 1: the end of the interval that is closer to no effect."""
        if self.base is not None:
            return max(0.0, self.low - self.base)
        return max(0.0, min(abs(self.low), abs(self.high)) if self.low * self.high > 0 else 0.0)

    @property
    def sentence(self) -> str:
        """Correlation in one sentence, with its evidence."""
        words = {
            "moves": self._moves,
            "happens": self._happens,
            "samples": self._samples,
            "differs": self._differs,
        }
        text = words[self.kind]()
        return (
            f"{text} The same applies to {len(self.also)} more that move with it."
            if self.also
            else text
        )

    def _moves(self) -> str:
        how = "rises" if self.effect > 0 else "falls"
        interval = f"correlation {self.effect:.2f}, {self.low:.2f} to {self.high:.2f}"
        if self.lag_records > 0:
            when = f"{self._steps()} before {self.second} rises"
        elif self.lag_records < 0:
            when = f"{self._steps()} after {self.second} rises"
        else:
            when = f"when {self.second} rises"
        return f"{self.first} {how} {when} ({interval}; {self.records} records)."

    def _steps(self) -> str:
        steps = abs(self.lag_steps)
        return f"{steps} step" if steps == 1 else f"{steps} steps"

    def _happens(self) -> str:
        assert self.base is not None
        when = f" {self._steps()} before" if self.lag_records else ""
        times = f"{round(self.effect * self.count)} of {self.count} times"
        return (
            f"{self.second}: {self.effect:.0%} with {self.first}{when} ({times}, "
            f"{self.low:.0%} to {self.high:.0%}; {self.base:.0%} of all {self.records} records)."
        )

    def _samples(self) -> str:
        more = "larger" if self.effect > 0 else "smaller"
        whose = (
            f"Samples of {self.second}"
            if self.second.text.startswith("category ")
            else f"Samples with a larger {self.second}"
        )
        return (
            f"{whose} have a {more} {self.first} (correlation within a record {self.effect:.2f}, "
            f"{self.low:.2f} to {self.high:.2f}; {self.count} samples in {self.records} records)."
        )

    def _differs(self) -> str:
        more = "larger" if self.effect > 0 else "smaller"
        of_samples = self.first.text.startswith("category ")
        whose = f"Samples of {self.first}" if of_samples else _members(self.first.text)
        sizes = [] if self.medians is None else ["{:.3g} against {:.3g}".format(*self.medians)]
        low, high = sorted((1 + abs(end)) / 2 for end in (self.low, self.high))
        pairs = f"{(1 + abs(self.effect)) / 2:.0%} of pairs, {low:.0%} to {high:.0%}"
        cases = f"{self.count} of {self.total} {'samples' if of_samples else 'records'}"
        how = [*sizes, f"{more} in {pairs}", cases]
        return f"{whose} have a {more} {self.second} ({'; '.join(how)})."

    def to_json(self) -> dict[str, Any]:
        """Return the correlation as JSON-compatible data."""
        return {**asdict(self), "sentence": self.sentence}


def _members(text: str) -> str:
    """Return the subject of a sentence about the steps with a tag or of a type."""
    kind, _, name = text.partition(" ")
    return f"Steps with tag {name}" if kind == "tag" else f"Steps of type {name}"


@dataclass(frozen=True)
class Candidate:
    """A statistically significant correlation.

    Attributes:
        correlation: the correlation to report.
        course: the values of its first side over the run, aligned to make candidates comparable.
        origin: the origin of its first side in a step.
    """

    correlation: Correlation
    course: Floats
    origin: Origin
