"""The checklist for training problems, answered by the findings of the rules.

The questions follow the usual order of debugging: code, data, initialization, dynamics,
activations, architecture. Each question lists the rules that answer it, and states which of them
are decisive. A question is ticked only if all decisive rules could check the run, no part of the
run is damaged, and the required values were recorded and do not contradict the rules. Rules that
no question lists (new rules, or the user's own) answer the last question of their family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from comgra_decl.rules.catalogue import known
from comgra_decl.rules.diagnosis import Diagnosis
from comgra_decl.rules.finding import Finding
from comgra_decl.rules.readings import Reading

Colour = Literal["red", "amber", "green", "partly", "unchecked", "absent"]
"""The answer to a question:

- red: there is an error, or a finding that explains an error.
- amber: there is a warning or a hint, there are only findings that another finding explains, or the
  values answer the question "no".
- green: all decisive rules checked the run without findings, there are values, and no value
  contradicts the rules.
- partly: only some of the decisive rules could check the run, or part of the run is damaged.
- unchecked: no decisive rule could check the run, or the required values are missing.
- absent: the question does not apply, because the run has no tensors of this kind.
"""


@dataclass(frozen=True, slots=True)
class Question:
    """A question of the checklist.

    Attributes:
        part: the part of the checklist to which it belongs.
        text: the question.
        deciding: the rules that must have checked the run before the question is ticked.
        rules: other rules whose findings answer the question.
        families: folders of rules that answer the question unless another question names them.
        reading: the name of the run's values for the question.
        experiment: the experiment with the training script that answers the question, if no rule
            can answer it.
        only_found: whether the question is asked only if a rule answers it "no".
    """

    part: str
    text: str
    deciding: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    reading: str = ""
    experiment: str = ""
    only_found: bool = False

    @property
    def named(self) -> tuple[str, ...]:
        """All rules that the question names."""
        return self.deciding + self.rules


@dataclass(frozen=True, slots=True)
class Check:
    """An answered question.

    Attributes:
        question: the question of the checklist.
        colour: see `Colour`.
        evidence: one sentence with the recorded values, followed by the worst finding, by the rules
            and the number of records that they checked, by the result of an experiment, or by the
            reason why the question is not answered.
        numbers: the run's values, such as "loss 2.27 → 3.60"; "" if unknown.
        looked: number of decisive rules that could check the run.
        deciding: number of decisive rules.
        incomplete: whether all of them checked the run, except for its damaged part.
        findings: the findings that answer the question "no", most important first.
    """

    question: Question
    colour: Colour
    evidence: str
    findings: tuple[Finding, ...] = ()
    numbers: str = ""
    looked: int = 0
    deciding: int = 0
    incomplete: bool = False

    @property
    def state(self) -> str:
        """Colour in words, such as "partly checked (1 of 3)"."""
        part = "damaged" if self.incomplete else f"{self.looked} of {self.deciding}"
        words = {
            "unchecked": "not checked",
            "partly": f"partly checked ({part})",
            "absent": "does not apply",
        }
        return words.get(self.colour, self.colour)


_NUMBERS: dict[str, Colour] = {"poor": "amber", "bad": "red"}
_COLOURS: dict[str, Colour] = {"good": "green", "bad": "red", "unclear": "unchecked"}

CHECKLIST = (
    Question("code", "Are all numbers finite?", ("nonfinite",), reading="finite"),
    Question("code", "Do shapes match without broadcasting?", ("silent_broadcasting",),
             reading="shapes"),
    Question("code", "Are the right parameters trained?", ("untrained_parameter", "detached"),
             ("frozen_parameter_moves", "zero_learning_rate", "cleared_gradient"),
             reading="trained"),
    Question("code", "Are gradients cleared?", ("accumulated_gradient",),
             ("stale_gradient",), reading="cleared"),
    Question("code", "Is half precision sufficient?", ("half_overflow", "half_underflow"),
             ("gradient_scale",), ("precision",), reading="half"),
    Question("code", "Can the model fit one batch?", experiment="overfit_one_batch"),
    Question("code", "Are the samples in a batch independent?", experiment="batch_mixing"),
    Question("code", "Does the program run without leaks or waiting?", families=("resources",),
             only_found=True),
    Question("data", "Are inputs normalized?", ("input_scale",), reading="inputs"),
    Question("data", "Are labels balanced and shuffled?", ("unshuffled",),
             ("single_class", "class_imbalance"), ("data",), reading="labels"),
    Question("data", "Are labels predictable from inputs?", ("no_better_than_guessing",),
             reading="predictable"),
    Question("data", "Do predictions depend on the input?", ("input_independence",),
             reading="dependent"),
    Question("data", "Is evaluation as good as training?", ("overfitting",), ("evaluation_gap",),
             reading="evaluation"),
    Question("initialization", "Does the loss start at guessing level?", ("initial_loss",),
             reading="first_loss"),
    Question("initialization", "Do layers start at similar scales?", ("poor_initialisation",),
             reading="scales"),
    Question("dynamics", "Does the loss fall?", ("loss_not_falling", "loss_diverges"),
             ("negative_loss",), reading="falling"),
    Question("dynamics", "Is the loss steady?", ("loss_spike", "loss_oscillates"),
             families=("loss",), reading="steady"),
    Question("dynamics", "Do gradients keep their scale?",
             ("vanishing_gradient", "exploding_gradient"), families=("gradients",),
             reading="gradients"),
    Question("dynamics", "Are update sizes healthy?", ("large_update", "small_update"),
             ("growing_weight",), ("parameters",), reading="updates"),
    Question("activations", "Are units alive?", ("dead_units", "all_zero"),
             ("dormant_units", "unchanged_output"), reading="alive"),
    Question("activations", "Are units unsaturated?", ("saturated",), reading="unsaturated"),
    Question("activations", "Do activations keep their spread and rank?",
             ("activation_drift", "rank_collapse"), families=("activations", "values"),
             reading="spread"),
    Question("architecture", "Does the last layer match the loss?", ("rectified_answer",),
             ("probabilities_as_logits", "logits_as_log_probabilities", "sigmoid_twice"),
             reading="last_layer"),
    Question("architecture", "Does every branch contribute?",
             ("branch_ignored", "gradient_imbalance"), families=("structure",),
             reading="branches"),
    Question("architecture", "Is attention spread out?", ("attention_collapse",),
             ("attention_sink", "attention_diagonal"), ("attention",), reading="attention"),
    Question("architecture", "Do your own rules pass?", families=("",)),
)  # fmt: skip
"""All questions, in their order."""

_UNSEEN = (
    "No rule can detect the following problems: targets that partly leak into the inputs, samples "
    "that are in both the training and the validation data, consistently wrong labels, and data "
    "that differs from production data."
)


def health(diagnosis: Diagnosis) -> list[Check]:
    """Return the answered checklist, in the order of `CHECKLIST`.

    Leaves out the question about the user's own rules if there are none, and questions that are
    asked only if the answer is "no".
    """
    asked = _assigned([*diagnosis.checked, *(entry.rule for entry in diagnosis.unchecked)])
    answered = [
        _answer(question, asked.get(question, ()), diagnosis)
        for question in CHECKLIST
        if question in asked or question.named or question.experiment
    ]
    return [check for check in answered if check.findings or not check.question.only_found]


def unseen(diagnosis: Diagnosis) -> list[str]:
    """Return the problems that can exist even if the checklist is green, one sentence each.

    These are possible problems with the losses of this run, and those that no rule can detect.
    """
    return [*diagnosis.caveats, _UNSEEN]


def _assigned(names: Sequence[str]) -> dict[Question, list[str]]:
    """Return the rules of each question."""
    by_rule = {rule: question for question in CHECKLIST for rule in question.named}
    by_family = {family: question for question in CHECKLIST for family in question.families}
    found: dict[Question, list[str]] = {}
    for name in names:
        question = by_rule.get(name) or by_family.get(_family(name), by_family[""])
        found.setdefault(question, []).append(name)
    return found


def _family(rule: str) -> str:
    """Return the folder of a rule; an empty string for the user's own."""
    kind = known().get(rule)
    return "" if kind is None else kind.__module__.split(".")[-2]


def _answer(question: Question, rules: Sequence[str], diagnosis: Diagnosis) -> Check:
    if question.experiment:
        return _shown(question, diagnosis)
    reading = diagnosis.readings.get(question.reading, Reading(""))
    deciding = (*(question.deciding or rules), *reading.deciding)
    looked = [rule for rule in rules if rule in diagnosis.checked]
    decided = [rule for rule in deciding if rule in looked]
    against = tuple(
        sorted(
            (finding for finding in diagnosis.findings if finding.rule in rules),
            key=lambda finding: finding.because is not None,
        )
    )
    colour, evidence = _judged(
        against,
        reading,
        some=bool(decided) and (bool(reading.text) or not question.reading),
        complete=len(decided) == len(deciding),
    )
    incomplete = colour == "green" and diagnosis.incomplete
    if incomplete:
        colour = "partly"
    if evidence is None:
        missing = [rule for rule in deciding if rule not in decided]
        parts = [
            reading.text,
            _nothing(looked, diagnosis) if colour != "unchecked" else "",
            "part of the run is damaged and was not checked" if incomplete else "",
            *_reasons(missing, diagnosis, by_rule=colour == "partly"),
        ]
        evidence = "; ".join(part for part in parts if part) or "no value was recorded for it"
    return Check(
        question,
        colour,
        evidence,
        against,
        reading.text,
        len(decided),
        len(deciding),
        incomplete,
    )


def _judged(
    against: Sequence[Finding], reading: Reading, *, some: bool, complete: bool
) -> tuple[Colour, str | None]:
    """Return the colour, and the evidence if a finding or a value is sufficient.

    Args:
        against: the findings that answer the question "no".
        reading: the recorded values.
        some: whether any decisive rule could check the run, and there are values if the question
            asks for them.
        complete: whether all decisive rules could check the run.
    """
    number = _NUMBERS.get(reading.verdict)
    if against:
        return ("red" if number == "red" else _worst(against)), against[0].message
    if number is not None:
        return number, reading.text
    if reading.verdict == "absent":
        return "absent", reading.text
    if not some or reading.verdict == "unknown":
        return "unchecked", None
    return ("green" if complete else "partly"), None


def _nothing(looked: Sequence[str], diagnosis: Diagnosis) -> str:
    return f"no findings in {diagnosis.records} training records by {', '.join(looked)}"


def _shown(question: Question, diagnosis: Diagnosis) -> Check:
    """Answer a question with the result of an experiment with the script."""
    command = question.experiment.replace("_", "-")
    for verdict in diagnosis.experiments:
        if verdict.name == question.experiment:
            when = f"{datetime.fromtimestamp(verdict.time, UTC):%Y-%m-%d %H:%M} UTC"
            evidence = f"{verdict.reason} ({command}, {when})"
            return Check(question, _COLOURS[verdict.outcome], evidence)
    tells = f"run comgra-decl {command} --for RUN -- train.py ARGS"
    damage = diagnosis.unreadable.get(question.experiment)
    if damage is not None:
        tells = f"the stored verdict cannot be read: {damage}; {tells} again"
    return Check(question, "unchecked", tells)


def _worst(findings: Sequence[Finding]) -> Colour:
    errors = any(f.weight == "error" and f.because is None for f in findings)
    return "red" if errors else "amber"


def _reasons(rules: Sequence[str], diagnosis: Diagnosis, *, by_rule: bool) -> list[str]:
    """Return the reasons why rules could not check the run, without duplicates.

    The reasons contain the names of the rules if other rules could check the run.
    """
    known = {entry.rule: entry.reason for entry in diagnosis.unchecked}
    reasons = [
        f"{rule} not checked: {known.get(rule, 'it is switched off')}"
        if by_rule
        else known.get(rule, "")
        for rule in rules
    ]
    told = list(dict.fromkeys(reason for reason in reasons if reason))
    return told or (
        [] if by_rule or not rules else ["all rules for this question are switched off"]
    )
