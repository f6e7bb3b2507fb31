"""Passes a run to all rules and collects their findings."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from comgra_decl.records import (
    ATTENTIONS,
    BATCH_SOFTMAXES,
    INTERVENTION_CHECKS,
    OBJECTIVES,
    OPTIMIZERS,
    PERTURBATIONS,
    PICTURE_CHECKS,
    PROFILE,
    TELLING,
    SlotInfo,
    Structure,
)
from comgra_decl.rules.base import Rule, Scene, Seen, SlotRule
from comgra_decl.rules.calls import LossCall
from comgra_decl.rules.causes import Causes, Unusual
from comgra_decl.rules.curve import Curve
from comgra_decl.rules.finding import Finding, best_first
from comgra_decl.rules.readings import Reading, Readings
from comgra_decl.rules.window import Numbers, Window

_log = logging.getLogger("comgra_decl")
_MOST_STRUCTURES = 64
_MOST_CALLS = 256


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A rule that could not check the run, with the reason."""

    rule: str
    reason: str


DOCUMENTS = ("modules", "report", PERTURBATIONS, PICTURE_CHECKS, INTERVENTION_CHECKS, PROFILE)
"""The documents that rules read."""


class Engine:
    """Passes one run to rules, in the order in which it was recorded.

    The findings do not depend on how records and metrics are interleaved and divided into windows.
    A rule that raises an exception is disabled and reported; the others continue.

    Args:
        rules: new rule instances, as returned by `catalogue.build`.
        statistics: names of the recorded statistics.
    """

    def __init__(self, rules: Sequence[Rule], statistics: tuple[str, ...]) -> None:
        self.scene = Scene(statistics=statistics)
        self._rules = list(rules)
        self._listening = [rule for rule in rules if _overrides(rule, "look_at_numbers")]
        self._looking = [
            rule
            for rule in rules
            if _overrides(rule, "look") and not _overrides(rule, "look_at_evaluation")
        ]
        self._comparing = [rule for rule in rules if _overrides(rule, "look_at_evaluation")]
        self._seeing_skipped = [rule for rule in rules if _overrides(rule, "look_at_skipped")]
        self._failed: dict[str, str] = {}
        self._unusual = Unusual()
        self._readings: Readings | None = Readings(self.scene.curves)  # None after a failure
        self._structures: dict[str, Structure] = {}
        self._calls: list[LossCall] = []
        self._seen: list[Seen] = []  # one for each loss call of the latest record
        for rule in self._rules:
            rule.scene = self.scene

    @property
    def names(self) -> list[str]:
        """Names of the rules."""
        return [rule.name for rule in self._rules]

    # -- input

    def add_slots(self, new: Sequence[SlotInfo]) -> None:
        """Add new slots."""
        if new:
            self.scene.table = self.scene.table.extended(new)

    def add_structure(self, structure: Structure) -> None:
        """Add a dependency graph; called before the first record with this graph."""
        self._structures[structure.hash] = structure

    def add_document(self, name: str, content: Any) -> None:
        """Add the newest version of a document."""
        self.scene.documents[name] = content

    def look(self, window: Window) -> None:
        """Process the next records; a record with a new graph starts a new window."""
        edges = [0, *self._news(window), len(window)]
        for start, stop in pairwise(edges):
            if start < stop:
                part = window.only(np.arange(start, stop), window.first + start)
                self._use_structures(part)
                self._look(part)

    def _news(self, window: Window) -> list[int]:
        known = set(self.scene.structures)
        news = []
        for row, digest in enumerate(window.structures):
            if digest is not None and digest not in known:
                known.add(digest)
                news.append(row)
        return news

    def _use_structures(self, window: Window) -> None:
        seen = self.scene.structures
        for row, digest in enumerate(window.structures):
            if digest is None or digest not in self._structures:
                continue
            self.scene.structure = self._structures[digest]
            if digest not in seen and len(seen) < _MOST_STRUCTURES:
                seen[digest] = self._structures[digest]
                self.scene.reshaped[digest] = window.reshaped(row)

    def _look(self, window: Window) -> None:
        self._each("look_at_skipped", window, self._seeing_skipped)
        window = window.without_skipped()
        train = np.flatnonzero(window.train)
        first, first_evaluation = self.scene.records, self.scene.evaluations
        self.scene.last_step = max(self.scene.last_step, int(window.steps.max()))
        self.scene.has_histograms = self.scene.has_histograms or window.histograms
        self.scene.records += len(train)
        self.scene.evaluations += len(window) - len(train)
        if len(train):
            part = window.only(train, first)
            self._see_facts(part)
            if part.has("l2"):
                gradients = np.flatnonzero(part.table.parameter_gradients)
                self.scene.clipping.look(part.steps, part.read("l2", gradients))
            self.scene.phases.look(part)
            self._each("look", part, self._looking)
            self._unusual.look(part)
            self._read("look", part)
        for method, part in _in_turn(window, first, first_evaluation) if self._comparing else ():
            self._each(method, part, self._comparing)

    def _see_facts(self, window: Window) -> None:
        """Store the arguments of losses and the settings of optimizers."""
        for step, facts in zip(window.steps.tolist(), window.facts, strict=False):
            calls = self.scene.calls_of(facts)
            if calls is not self._calls:
                self._calls = calls
                self._seen = [self._seen_of(call, step) for call in calls]
            for seen in self._seen:
                seen.last = step
                seen.records += 1
            optimizers = facts.get(OPTIMIZERS) or ()
            self.scene.optimizers = [*optimizers] or self.scene.optimizers
            self.scene.maximizes |= any(
                group.get("maximize") for each in optimizers for group in each.get("groups", ())
            )
            self.scene.rates.add(step, facts.get(OPTIMIZERS) or ())
            if len(self.scene.attentions) < _MOST_CALLS:
                self.scene.attentions += facts.get(ATTENTIONS) or ()
            if len(self.scene.telling) < _MOST_CALLS:
                self.scene.telling += facts.get(TELLING) or ()
            if len(self.scene.objectives) < _MOST_CALLS and OBJECTIVES in facts:
                self.scene.objectives.append(facts[OBJECTIVES])
            softmaxes = {tuple(shape) for shape in facts.get(BATCH_SOFTMAXES) or ()}
            self.scene.batch_softmaxes += softmaxes - {*self.scene.batch_softmaxes}

    def _seen_of(self, call: LossCall, step: int) -> Seen:
        """Return when a call was seen, as stored in the scene unless there are too many."""
        known = self.scene.calls
        if call not in known and len(known) >= _MOST_CALLS:
            return Seen(step, step, 0)
        return known.setdefault(call, Seen(step, step, 0))

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Process the next values of one metric and type of execution."""
        if len(numbers.steps):
            self.scene.last_step = max(self.scene.last_step, int(numbers.steps.max()))
            if numbers.name == "loss":
                curve = self.scene.curves.setdefault(numbers.type, Curve())
                curve.add(numbers.steps, numbers.values)
            self._each("look_at_numbers", numbers, self._listening)
            self._read("look_at_numbers", numbers)

    def _read(self, method: str, seen: Window | Numbers) -> None:
        """Pass data to the readings. An error in the readings must not affect the rules."""
        try:
            if self._readings is not None:
                getattr(self._readings, method)(seen)
        except Exception as error:  # noqa: BLE001
            self._give_up_reading(error)

    def _give_up_reading(self, error: Exception) -> None:
        self._readings = None
        _log.warning("checklist values are disabled", exc_info=error)

    def _each(self, method: str, seen: Window | Numbers, rules: Sequence[Rule]) -> None:
        for rule in rules:
            if rule.name in self._failed:
                continue
            try:
                getattr(rule, method)(seen)
            except Exception as error:  # noqa: BLE001 (one rule must not stop the others)
                self._give_up(rule, error)

    def _give_up(self, rule: Rule, error: Exception) -> None:
        self._failed[rule.name] = f"it failed: {type(error).__name__}: {error}"
        _log.warning("comgra.rules.%s failed and was switched off", rule.name, exc_info=error)

    # -- output

    def fired(self) -> int:
        """Return a counter that is incremented when a rule finds something new about a tensor.

        Fast; ignores rules that are not about individual tensors.
        """
        rules = [rule for rule in self._rules if isinstance(rule, SlotRule)]
        return sum(int((rule.streak.first >= 0).sum()) for rule in rules)

    def findings(self) -> list[Finding]:
        """Return all findings so far, most important first."""
        found: list[Finding] = []
        marks: dict[int, tuple[int, str]] = {}
        for rule in self._rules:
            if rule.name in self._failed or self._is_turned_round(rule):
                continue
            try:
                found += rule.findings(self.scene)
                for slot, step in rule.marks().items():
                    marks[slot] = min(marks.get(slot, (step, rule.name)), (step, rule.name))
            except Exception as error:  # noqa: BLE001
                self._give_up(rule, error)
        causes = Causes(self.scene, marks, self._unusual)
        by_name = {rule.name: rule for rule in self._rules}
        found = [by_name[f.rule].narrowed(causes.with_chain(f)) for f in found]
        return best_first(_explained(found, by_name))

    def _is_turned_round(self, rule: Rule) -> bool:
        """Whether a rule is about the sign of what is minimized, but an optimizer maximizes."""
        return rule.minimizes and self.scene.maximizes

    def readings(self) -> dict[str, Reading]:
        """Return the run's values for the checklist questions, by name."""
        try:
            return {} if self._readings is None else self._readings.readings(self.scene)
        except Exception as error:  # noqa: BLE001
            self._give_up_reading(error)
            return {}

    def caveats(self) -> list[str]:
        """Return possible problems with the losses that no rule can detect, one sentence each."""
        return [] if self._readings is None else self._readings.losses.caveats()

    def end(self) -> None:
        """Mark the run as ended, so that rules work with the available data."""
        self.scene.ended = True

    def unchecked(self) -> list[Unchecked]:
        """Return the rules that could not check the run, with the reason, by name."""
        reasons = dict(self._failed)
        for rule in self._rules:
            if rule.name not in reasons:
                reason = _MAXIMIZES if self._is_turned_round(rule) else rule.missing(self.scene)
                if reason is not None:
                    reasons[rule.name] = reason
        return [Unchecked(name, reasons[name]) for name in sorted(reasons)]


_MAXIMIZES = "an optimizer maximizes (`maximize=True`), and the rule is about the sign of a loss"


def _overrides(rule: Rule, method: str) -> bool:
    """Return whether a rule's class defines a method that `Rule` leaves empty."""
    return getattr(type(rule), method) is not getattr(Rule, method)


def _in_turn(window: Window, first: int, first_evaluation: int) -> Iterator[tuple[str, Window]]:
    """Yield the records in order, divided wherever training and evaluation alternate."""
    turns = np.flatnonzero(np.diff(window.train)) + 1
    for rows in np.split(np.arange(len(window)), turns):
        if window.train[rows[0]]:
            yield "look", window.only(rows, first)
            first += len(rows)
        else:
            yield "look_at_evaluation", window.only(rows, first_evaluation)
            first_evaluation += len(rows)


def _explained(findings: list[Finding], by_name: Mapping[str, Rule]) -> list[Finding]:
    """Mark findings that another rule's finding explains; avoid cycles.

    A finding that is only a hint because it does no harm explains only other hints.
    """
    because: dict[str, str] = {}  # by rule

    def leads_to(cause: str | None, rule: str) -> bool:
        while cause is not None and cause != rule:
            cause = because.get(cause)
        return cause == rule

    result = []
    for finding in findings:
        rule = by_name[finding.rule]
        for other in findings:
            if other.first_step > finding.last_step or leads_to(other.rule, finding.rule):
                continue
            if finding.severity != "hint" and _impairs_nothing(other, by_name[other.rule]):
                continue
            if rule.follows(finding, other):
                because[finding.rule] = other.rule
                finding = finding.explained_by(other.rule)
                break
        result.append(finding)
    return result


def _impairs_nothing(finding: Finding, rule: Rule) -> bool:
    """Return whether a finding is only a hint because it does no harm to training."""
    harmless = isinstance(rule, SlotRule) and rule.harmless
    return finding.severity == "hint" and (harmless or not rule.hints_explain)
