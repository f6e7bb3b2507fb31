"""The cause comes first, whatever its severity, and its consequences are listed beneath it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from comgra_decl.records import Note
from comgra_decl.rules import Finding
from comgra_decl.rules.actions import Actions
from comgra_decl.rules.activations.dead import DeadUnits
from comgra_decl.rules.api import Rule, Scene
from comgra_decl.rules.finding import best_first, consequences_of, roots_of
from comgra_decl.rules.loss.diverging import LossDiverges, NegativeLoss
from comgra_decl.rules.precision.nonfinite import Nonfinite
from comgra_decl.spec.rules import FindingSpec
from tests.rules.tape import Tape

PLAIN = Finding(rule="", severity="warning", first_step=0, last_step=9, message="m.", advice="a.")


def finding(rule: str, severity: Any, because: str | None = None, **facts: Any) -> Finding:
    return replace(PLAIN, rule=rule, severity=severity, because=because, **facts)


FOUND = [
    finding("collapse", "error", "shrinking"),
    finding("flat", "warning", "collapse"),
    finding("other", "error", certainty=0.4),
    finding("shrinking", "hint"),
    finding("lonely", "hint"),
    finding("alone", "warning"),
]


def test_a_hint_that_explains_an_error_stands_among_errors_with_its_consequences_beneath() -> None:
    ordered = best_first(FOUND)
    assert [f.rule for f in ordered] == [
        *("other", "shrinking", "collapse", "flat", "alone", "lonely"),
    ]
    assert [f.rule for f in roots_of(ordered)] == ["other", "shrinking", "alone", "lonely"]
    assert [f.rule for f in consequences_of(ordered[1], ordered)] == ["collapse", "flat"]
    assert [(f.rule, f.weight) for f in roots_of(ordered)] == [
        ("other", "error"),
        ("shrinking", "error"),
        ("alone", "warning"),
        ("lonely", "hint"),
    ]
    assert ordered[1].severity == "hint"
    assert best_first(ordered[::-1]) == ordered
    assert Finding.from_json(ordered[1].to_json()) == ordered[1]


def test_a_cause_that_is_not_listed_hides_nothing() -> None:
    orphan = finding("flat", "warning", "gone")
    assert best_first([orphan]) == [orphan]
    assert roots_of([orphan]) == [orphan]


def test_a_cause_is_acted_upon_as_what_it_explains(caplog: pytest.LogCaptureFixture) -> None:
    notes: list[Note] = []
    actions = Actions(FindingSpec(stop="error"), run="r", note=notes.append)
    with caplog.at_level(logging.INFO):
        for each in best_first(FOUND[:2] + FOUND[3:4]):
            actions(each)
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert [note.text for note in notes] == ["shrinking: m."]
    assert actions.reason is not None
    assert actions.reason.startswith("shrinking")


class Fixed(Rule):
    """Reports the findings that a test specifies."""

    severity = "warning"
    definition = source = advice = "."
    first, after = 0, None

    def findings(self, scene: Scene) -> list[Finding]:
        return [
            self.finding(
                scene, first_step=self.first, after_step=self.after, last_step=90, message="."
            )
        ]

    def missing(self, scene: Scene) -> None:
        return None


def rule(name: str, first: int = 0, after: int | None = None, **facts: Any) -> Rule:
    kind = type(name, (Fixed,), {"name": name, "first": first, "after": after, **facts})
    made: Rule = kind()
    return made


def causes(*rules: Rule) -> dict[str, str | None]:
    return {f.rule: f.because for f in Tape().play(*rules).findings()}


def test_two_rules_that_explain_each_other_do_not_hide_both() -> None:
    found = causes(rule("a", explained_by=("b",)), rule("b", explained_by=("a",)))
    assert sorted(found.values(), key=str) == [None, "b"]
    three = causes(
        rule("a", explained_by=("b",)),
        rule("b", explained_by=("c",)),
        rule("c", explained_by=("a",)),
    )
    assert list(three.values()).count(None) == 1


@pytest.mark.parametrize(
    ("first", "after", "explains"),
    [(30, None, True), (40, 39, True), (41, 40, False), (45, 36, True), (45, 40, False)],
)
def test_some_causes_must_have_begun_no_later(
    first: int, after: int | None, explains: bool
) -> None:
    later = rule("later", 40, explained_by_earlier=("cause",))
    assert causes(later, rule("cause", first, after))["later"] == ("cause" if explains else None)


def test_shrinking_weights_explain_what_fades_with_them() -> None:
    from comgra_decl.rules.parameters.shrinking import ShrinkingWeight
    from comgra_decl.rules.values.independent import InputIndependence

    tape = Tape()
    weight = tape.slot("layer", (3, 3), role="weight", kind="parameter")
    out = tape.slot("layer", (4, 3))
    samples = np.arange(12.0).reshape(4, 3) - 5
    for step in range(40):
        left = 0.8**step  # 0.8^12 is the first power below a tenth of the median of three, 0.8
        tape.record({weight: np.full((3, 3), left), out: 1 + samples * left**3})
    found = {f.rule: f for f in tape.play(ShrinkingWeight(), InputIndependence()).findings()}
    assert list(found) == ["shrinking_weight", "input_independence"]
    assert found["shrinking_weight"].first_step == 12
    assert found["input_independence"].because == "shrinking_weight"
    assert (found["shrinking_weight"].severity, found["shrinking_weight"].weight) == (
        "warning",
        "error",
    )


def test_a_negative_loss_explains_that_it_diverges_and_becomes_infinite_later() -> None:
    tape = Tape()
    weight = tape.slot("layer", (3, 3), role="weight", kind="parameter")
    answer = tape.slot("answer", (8, 3))
    target = tape.slot("target", (8,), role="target", kind="target", dtype="int64")
    tape.loss_call("cross_entropy", answer, target)
    losses = [-(1.5**step) for step in range(40)] + [np.nan] * 20
    for loss in losses:
        tape.record(
            {
                weight: np.full((3, 3), loss),
                answer: np.arange(24.0).reshape(8, 3),
                target: np.arange(8) % 3,
            }
        )
    tape.losses(losses)
    rules = NegativeLoss(), LossDiverges(), Nonfinite()
    found = {f.rule: f for f in tape.play(*rules).findings()}
    assert next(iter(found)) == "negative_loss"
    assert found["nonfinite"].because == "negative_loss"
    assert found["loss_diverges"].because in ("negative_loss", "nonfinite")


def test_columns_of_very_different_sizes_explain_dead_units() -> None:
    dead = finding("dead_units", "warning")
    assert DeadUnits().follows(dead, finding("uneven_columns", "warning"))
