"""The checklist is complete, its colours follow from the findings, and it gives its reasons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import comgra_decl
from comgra_decl.query import open_run
from comgra_decl.records import Severity
from comgra_decl.rules import (
    CHECKLIST,
    Diagnosis,
    Finding,
    Reading,
    Unchecked,
    diagnose,
    health,
    stored,
    unseen,
)
from comgra_decl.rules.catalogue import known
from comgra_decl.rules.health import Check
from comgra_decl.rules.readings import Verdict
from tests.support.fake_run import FakeRun

CLEAN = Diagnosis([], [], sorted(known()), 100)
FALLS = {"falling": Reading("loss 2.27 \u2192 1.6 in 100 steps")}
FLAT = Finding(
    rule="loss_not_falling",
    severity="error",
    first_step=3,
    last_step=9,
    message="The loss stays at 2.",
    advice="Raise the learning rate.",
)


def asked(diagnosis: Diagnosis, text: str) -> Check:
    (found,) = [check for check in health(diagnosis) if text in check.question.text]
    return found


def test_every_rule_answers_a_question() -> None:
    for rule in known():
        finding = replace(FLAT, rule=rule)
        answered = health(replace(CLEAN, findings=[finding]))
        assert [check.findings for check in answered if check.findings] == [(finding,)]


def test_every_rule_that_a_question_names_exists() -> None:
    assert {rule for question in CHECKLIST for rule in question.named} <= set(known())


@pytest.mark.parametrize(
    ("severity", "because", "colour"),
    [
        ("error", None, "red"),
        ("error", "nonfinite", "amber"),
        ("warning", None, "amber"),
        ("hint", None, "amber"),
    ],
)
def test_colours_follow_from_the_worst_finding(
    severity: Severity, because: str | None, colour: str
) -> None:
    finding = replace(FLAT, severity=severity, because=because)
    check = asked(replace(CLEAN, findings=[finding]), "loss fall")
    assert (check.colour, check.evidence) == (colour, FLAT.message)


def test_nothing_is_green_if_part_of_the_run_is_damaged() -> None:
    whole = replace(CLEAN, readings=FALLS)
    damaged = replace(whole, damage=("rows 3 to 9",), incomplete=True)
    assert asked(whole, "loss fall").colour == "green"
    assert "green" not in {check.colour for check in health(damaged)}
    check = asked(damaged, "loss fall")
    assert (check.colour, check.state) == ("partly", "partly checked (damaged)")
    assert "damaged" in check.evidence


def test_green_says_who_looked_at_how_much_and_what_the_numbers_are() -> None:
    reading = Reading("loss 2.27 \u2192 1.6 in 100 steps")
    check = asked(replace(CLEAN, readings={"falling": reading}), "loss fall")
    assert (check.colour, check.numbers) == ("green", reading.text)
    assert check.evidence.startswith(f"{reading.text}; no findings in 100 training records by ")
    assert "loss_not_falling" in check.evidence


def test_a_tick_needs_all_deciding_rules() -> None:
    why = "it needs 60 losses; the run has 50"
    names = [name for name in CLEAN.checked if name != "loss_not_falling"]
    missing = [Unchecked("loss_not_falling", why)]
    partly = replace(CLEAN, checked=names, unchecked=missing, readings=FALLS)
    check = asked(partly, "loss fall")
    assert (check.colour, check.state) == ("partly", "partly checked (1 of 2)")
    assert f"loss_not_falling not checked: {why}" in check.evidence
    assert "no findings in 100 training records by loss_diverges" in check.evidence


def test_a_rule_that_does_not_decide_ticks_nothing() -> None:
    only = replace(CLEAN, checked=["negative_loss"], readings=FALLS)
    assert asked(only, "loss fall").colour == "unchecked"
    names = [name for name in CLEAN.checked if name != "negative_loss"]
    without = replace(CLEAN, checked=names, readings=FALLS)
    assert asked(without, "loss fall").colour == "green"


@pytest.mark.parametrize(("verdict", "colour"), [("poor", "amber"), ("bad", "red")])
def test_numbers_that_say_no_are_never_ticked(verdict: Verdict, colour: str) -> None:
    reading = Reading("loss 2.27 \u2192 3.6 in 50 steps", verdict)
    for checked in (CLEAN.checked, []):
        check = asked(replace(CLEAN, checked=checked, readings={"falling": reading}), "loss fall")
        assert (check.colour, check.evidence) == (colour, reading.text)


def test_numbers_that_are_missing_are_no_tick() -> None:
    reading = Reading("first loss 0.9; without classes, the cost of guessing is unknown", "unknown")
    check = asked(replace(CLEAN, readings={"first_loss": reading}), "guessing level")
    assert (check.colour, check.numbers) == ("unchecked", reading.text)


def test_a_question_without_numbers_is_not_ticked() -> None:
    answers = [c for c in health(CLEAN) if c.question.reading or c.question.experiment]
    assert {check.colour for check in answers} == {"unchecked"}
    assert asked(CLEAN, "attention").evidence == "no value was recorded for it"


def test_a_question_about_tensors_that_the_run_lacks_does_not_apply() -> None:
    why = "no attention in the model"
    for checked in CLEAN.checked, []:
        readings = {"attention": Reading(why, "absent")}
        check = asked(replace(CLEAN, checked=checked, readings=readings), "attention")
        assert (check.colour, check.state, check.evidence) == ("absent", "does not apply", why)
    found = replace(CLEAN, findings=[replace(FLAT, rule="attention_sink")], readings=readings)
    assert asked(found, "attention").colour == "red"


def test_a_reading_adds_the_rules_that_its_kind_of_run_needs() -> None:
    names = [name for name in CLEAN.checked if name != "class_imbalance"]
    for deciding, colour in ((), "green"), (("class_imbalance",), "partly"):
        reading = Reading("targets int64 [8]", "fine", deciding)
        found = replace(CLEAN, checked=names, readings={"labels": reading})
        assert asked(found, "labels balanced").colour == colour


def test_the_checklist_never_stands_without_what_no_rule_can_see() -> None:
    assert ["leak into the inputs" in sentence for sentence in unseen(CLEAN)] == [True]
    zero = replace(CLEAN, caveats=("The loss is exactly 0.",))
    assert unseen(zero) == ["The loss is exactly 0.", *unseen(CLEAN)]


def test_what_nobody_could_check_is_not_green() -> None:
    rules = [name for name in CLEAN.checked if name.startswith("attention_")]
    unchecked = [Unchecked(name, "no probabilities are recorded") for name in rules]
    names = [name for name in CLEAN.checked if name not in rules]
    check = asked(replace(CLEAN, unchecked=unchecked, checked=names), "attention")
    assert (check.colour, check.evidence) == ("unchecked", "no probabilities are recorded")
    assert check.state == "not checked"
    off = asked(replace(CLEAN, checked=[]), "loss fall")
    assert (off.colour, off.evidence) == (
        "unchecked",
        "all rules for this question are switched off",
    )


def test_rules_of_the_user_have_a_question_of_their_own() -> None:
    assert not [c for c in health(CLEAN) if "own rules" in c.question.text]
    mine = replace(FLAT, rule="quiet_block")
    with_mine = Diagnosis([mine], [], [*CLEAN.checked, "quiet_block"], 100)
    assert asked(with_mine, "own rules").findings == (mine,)


def test_stored_findings_come_back_whole(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "group" / "run", layers=1, nonfinite_from=3)
    fake.write(6)
    fake.close()
    run = open_run(fake.path)
    assert stored(run) is None  # nothing was checked while it was written
    assert diagnose(run).findings


def test_a_recorded_run_has_the_findings_it_was_recorded_with(tmp_path: Path) -> None:
    import torch
    from torch import nn

    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with comgra_decl.trace("debug", root=tmp_path, overrides=["schedule.every=1"]) as session:
        for step in range(8):
            (net(torch.ones(2, 3)).sum() * (float("inf") if step > 4 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.path is not None
    run = open_run(session.path)
    kept = stored(run)
    assert kept is not None
    assert [f.rule for f in kept.findings] == list(run.findings()["rule"])
    assert kept.records == len(run.steps)
    assert asked(kept, "finite").colour == "red"
    found = diagnose(run)
    assert (kept.readings, kept.caveats) == (found.readings, found.caveats)
    assert kept.readings["finite"].text.endswith("of 8 records from step 5 on")
