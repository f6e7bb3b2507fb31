"""The checklist for a training that does not work, answered by the findings of the rules.

Its questions follow the usual order of debugging: code, data, initialization, dynamics,
activations, architecture. Each question lists the rules that answer it; a rule that no question
lists (a new one, or the user's own) answers the last question of its family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from comgra_decl.rules.catalogue import known
from comgra_decl.rules.diagnosis import Diagnosis
from comgra_decl.rules.finding import Finding

Colour = Literal["red", "amber", "green", "unchecked"]
"""red: an error, or what explains one; amber: a warning, a hint, or only findings that another one
explains; green: at least one rule checked it and found nothing; unchecked: none could check it."""


@dataclass(frozen=True, slots=True)
class Question:
    """A line of the checklist: its part, and the rules that answer it."""

    part: str
    text: str
    rules: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    experiment: str = ""
    """The experiment with the script that answers it, because no rule can."""


@dataclass(frozen=True, slots=True)
class Check:
    """An answered question.

    Attributes:
        question: the line of the checklist.
        colour: see `Colour`.
        evidence: one sentence: the worst finding, which rules checked how many records, the result
            of an experiment, or why the question is not answered.
        findings: the findings against it, best first.
    """

    question: Question
    colour: Colour
    evidence: str
    findings: tuple[Finding, ...] = ()


_COLOURS: dict[str, Colour] = {"good": "green", "bad": "red", "unclear": "unchecked"}

CHECKLIST = (
    Question("code", "Are all numbers finite?", ("nonfinite",)),
    Question("code", "Do shapes match without broadcasting?", ("silent_broadcasting",)),
    Question("code", "Are the right parameters trained?",
             ("untrained_parameter", "frozen_parameter_moves", "detached")),
    Question("code", "Are gradients cleared?", ("accumulated_gradient",)),
    Question("code", "Is half precision sufficient?", ("half_overflow", "half_underflow",
             "gradient_scale"), ("precision",)),
    Question("code", "Can it overfit one batch?", experiment="overfit_one_batch"),
    Question("code", "Are samples of a batch kept apart?", experiment="batch_mixing"),
    Question("data", "Are inputs normalized?", ("input_scale",)),
    Question("data", "Are labels balanced and mixed?",
             ("single_class", "unshuffled", "class_imbalance"), ("data",)),
    Question("data", "Are labels predictable from inputs?", ("no_better_than_guessing",)),
    Question("data", "Do predictions depend on the input?", ("input_independence",)),
    Question("data", "Is evaluation as good as training?", ("overfitting", "evaluation_gap")),
    Question("initialization", "Is the first loss that of guessing?", ("initial_loss",)),
    Question("initialization", "Do layers start at similar scales?",
             ("poor_initialisation",)),
    Question("dynamics", "Does the loss fall?", ("loss_not_falling", "loss_diverges",
             "negative_loss")),
    Question("dynamics", "Is the loss steady?", ("loss_spike", "loss_oscillates"), ("loss",)),
    Question("dynamics", "Do gradients keep their scale?",
             ("vanishing_gradient", "exploding_gradient"), ("gradients",)),
    Question("dynamics", "Are updates of a healthy size?",
             ("large_update", "small_update", "growing_weight"), ("parameters",)),
    Question("activations", "Are units alive?", ("dead_units", "dormant_units", "all_zero",
             "unchanged_output")),
    Question("activations", "Are they unsaturated?", ("saturated",)),
    Question("activations", "Do they keep their spread and rank?",
             ("activation_drift", "rank_collapse"), ("activations", "values")),
    Question("architecture", "Does the last layer match the loss?",
             ("rectified_answer", "probabilities_as_logits", "sigmoid_twice")),
    Question("architecture", "Does every branch contribute?",
             ("branch_ignored", "gradient_imbalance"), ("structure",)),
    Question("architecture", "Is attention spread out?",
             ("attention_collapse", "attention_sink", "attention_diagonal"), ("attention",)),
    Question("architecture", "Do your own rules pass?", families=("",)),
)  # fmt: skip
"""All questions, in their order."""


def health(diagnosis: Diagnosis) -> list[Check]:
    """Returns the answered checklist, in the order of `CHECKLIST`.

    Leaves out the question about the user's own rules if there are none.
    """
    asked = _assigned([*diagnosis.checked, *(entry.rule for entry in diagnosis.unchecked)])
    return [
        _answer(question, asked.get(question, ()), diagnosis)
        for question in CHECKLIST
        if question in asked or question.rules or question.experiment
    ]


def _assigned(names: Sequence[str]) -> dict[Question, list[str]]:
    """Returns the rules of each question."""
    by_rule = {rule: question for question in CHECKLIST for rule in question.rules}
    by_family = {family: question for question in CHECKLIST for family in question.families}
    found: dict[Question, list[str]] = {}
    for name in names:
        question = by_rule.get(name) or by_family.get(_family(name), by_family[""])
        found.setdefault(question, []).append(name)
    return found


def _family(rule: str) -> str:
    """Returns the folder of a rule; an empty string for the user's own."""
    kind = known().get(rule)
    return "" if kind is None else kind.__module__.split(".")[-2]


def _answer(question: Question, rules: Sequence[str], diagnosis: Diagnosis) -> Check:
    if question.experiment:
        return _shown(question, diagnosis)
    against = tuple(
        sorted(
            (finding for finding in diagnosis.findings if finding.rule in rules),
            key=lambda finding: finding.because is not None,
        )
    )
    if against:
        return Check(question, _worst(against), against[0].message, against)
    looked = [rule for rule in rules if rule in diagnosis.checked]
    if looked:
        many = f"{diagnosis.records} training records"
        return Check(question, "green", f"nothing found in {many} by {', '.join(looked)}")
    reasons = list(dict.fromkeys(_reasons(rules, diagnosis)))
    return Check(question, "unchecked", "; ".join(reasons) or "all of its rules are off")


def _shown(question: Question, diagnosis: Diagnosis) -> Check:
    """Answers by the result of an experiment with the script."""
    command = question.experiment.replace("_", "-")
    for verdict in diagnosis.experiments:
        if verdict.name == question.experiment:
            when = f"{datetime.fromtimestamp(verdict.time, UTC):%Y-%m-%d %H:%M} UTC"
            evidence = f"{verdict.reason} ({command}, {when})"
            return Check(question, _COLOURS[verdict.outcome], evidence)
    tells = f"run comgra-decl {command} --for RUN -- train.py ARGS"
    damage = diagnosis.unreadable.get(question.experiment)
    if damage is not None:
        tells = f"its verdict cannot be read: {damage}; {tells} again"
    return Check(question, "unchecked", tells)


def _worst(findings: Sequence[Finding]) -> Colour:
    errors = any(f.weight == "error" and f.because is None for f in findings)
    return "red" if errors else "amber"


def _reasons(rules: Sequence[str], diagnosis: Diagnosis) -> Iterator[str]:
    return (entry.reason for entry in diagnosis.unchecked if entry.rule in rules)
