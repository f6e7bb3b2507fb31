"""Actions on a finding happen once, on one rank, and findings of ranks are reported together."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from comgra_decl.query.ranks.facts import join_findings
from comgra_decl.records import Note
from comgra_decl.rules import Finding, Place
from comgra_decl.rules.actions import Actions
from comgra_decl.spec.rules import FindingSpec

FOUND = Finding(
    rule="dead_units",
    severity="warning",
    first_step=30,
    last_step=40,
    message="0 is dead.",
    advice="Revive it.",
    place=Place("0"),
)


@pytest.mark.parametrize("loud", [True, False])
def test_one_rank_says_aloud_what_all_of_them_note(
    loud: bool, caplog: pytest.LogCaptureFixture
) -> None:
    notes: list[Note] = []
    actions = Actions(FindingSpec(), run="r", note=notes.append, loud=loud)
    with caplog.at_level(logging.INFO):
        actions(FOUND)
        actions(replace(FOUND, rule="flat", because="dead_units"))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["comgra: dead_units: 0 is dead. Revive it."] * loud
    assert [(note.step, note.text) for note in notes] == [(30, "dead_units: 0 is dead.")]


def test_the_log_takes_one_finding_per_second_and_counts_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    actions = Actions(FindingSpec(), run="r", note=lambda _: None, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for second in (100.0, 100.5, 100.99, 101.0, 101.5, 102.5):
            now[0] = second
            actions(replace(FOUND, message=f"at {second}."))
    more = "more: see `comgra-decl diagnose`"
    assert [
        record.getMessage().removeprefix("comgra: dead_units: ") for record in caplog.records
    ] == [
        "at 100.0. Revive it.",
        f"at 101.0. Revive it. (2 {more})",
        f"at 102.5. Revive it. (1 {more})",
    ]


def test_an_error_is_logged_however_soon_it_follows(caplog: pytest.LogCaptureFixture) -> None:
    actions = Actions(FindingSpec(), run="r", note=lambda _: None, clock=lambda: 5.0)
    with caplog.at_level(logging.INFO):
        for severity in ("warning", "error", "warning", "error"):
            actions(replace(FOUND, severity=severity))
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "ERROR"]
    assert "(1 more" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(("keep", "steps"), [("never", []), ("error", [7]), ("warning", [30, 7])])
def test_findings_that_are_bad_enough_ask_for_their_steps_once(keep: Any, steps: list[int]) -> None:
    actions = Actions(FindingSpec(keep=keep), run="r", note=lambda _: None)
    actions(FOUND)
    actions(replace(FOUND, rule="nonfinite", severity="error", first_step=7))
    assert [request.step for request in actions.requests()] == steps
    assert actions.requests() == []


def document(*findings: Finding) -> dict[str, Any]:
    return {"findings": [finding.to_json() for finding in findings], "unchecked": {"a": "b"}}


def test_what_only_another_rank_has_found_carries_its_number() -> None:
    elsewhere = replace(FOUND, place=Place("1"))
    alone = replace(FOUND, rule="nonfinite", place=None)
    joined = join_findings(
        [document(FOUND), None, document(FOUND, elsewhere, alone), document(alone)], [0, 1, 2, 3]
    )
    assert joined is not None
    said = [(found["rule"], found["message"]) for found in joined["findings"]]
    assert said == [
        ("dead_units", "0 is dead."),
        ("dead_units", "Rank 2: 0 is dead."),
        ("nonfinite", "Rank 2: 0 is dead."),
    ]
    assert joined["unchecked"] == {"a": "b"}
    assert join_findings([None, None], [0, 1]) is None
