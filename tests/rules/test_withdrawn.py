"""A finding that no longer holds is withdrawn, in the log and in the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.records import Note
from comgra_decl.rules import Finding, diagnose
from comgra_decl.rules.actions import Actions
from comgra_decl.rules.live import LiveRules
from comgra_decl.spec import Spec
from comgra_decl.spec.rules import FindingSpec

FOUND = Finding(
    rule="dead_units",
    severity="warning",
    first_step=3,
    last_step=9,
    message="0 is dead.",
    advice=".",
)


class Told:
    """Stores what it is given."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []

    def __call__(self, finding: Finding, explains: Sequence[Finding] = ()) -> None:
        self.all.append(("found", finding.rule))

    def withdraw(self, finding: Finding, step: int) -> None:
        self.all.append(("withdrawn", finding.rule))


def concluded(*found: list[Finding]) -> list[tuple[str, str]]:
    """Returns what happens when an engine finds one list of findings after another."""
    told = Told()
    rules: Any = LiveRules(Spec(), act=told)
    for findings in found:
        rules._engine.findings = lambda now=findings: now
        rules._conclude()
    return told.all


def test_what_is_no_longer_found_is_withdrawn_once() -> None:
    assert concluded([FOUND], [FOUND], [], []) == [
        ("found", "dead_units"),
        ("withdrawn", "dead_units"),
    ]


def test_a_finding_that_turns_out_to_be_a_consequence_still_holds() -> None:
    cause = replace(FOUND, rule="large_update")
    told = concluded([FOUND], [cause, replace(FOUND, because="large_update")])
    assert (
        told
        == [("found", "dead_units"), ("found", "large_update"), ("found", "dead_units")][
            : len(told)
        ]
    )
    assert ("withdrawn", "dead_units") not in told


def test_what_comes_and_goes_is_reported_three_times_at_most() -> None:
    told = concluded(*[[FOUND], []] * 6)
    assert [kind for kind, _ in told] == ["found", "withdrawn"] * 3


@pytest.mark.parametrize(
    ("severity", "level"), [("error", "WARNING"), ("warning", "WARNING"), ("hint", None)]
)
def test_it_is_withdrawn_where_it_was_reported(
    severity: Any, level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    notes: list[Note] = []
    actions = Actions(FindingSpec(), run="r", note=notes.append)
    with caplog.at_level(logging.DEBUG):
        actions.withdraw(replace(FOUND, severity=severity), 60)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    text = "comgra: dead_units is withdrawn at step 60 because it no longer holds: 0 is dead."
    assert said == ([] if level is None else [(level, text)])
    noted = [(60, "withdrawn: dead_units no longer holds: 0 is dead.")]
    assert [(note.step, note.text) for note in notes] == ([] if level is None else noted)


def test_units_that_come_back_to_life_are_withdrawn_in_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A ReLU is dead for eight steps and alive for twenty more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    declared = ["schedule.first=1000", "store.commit_interval=0"]
    with (
        caplog.at_level(logging.WARNING, logger="comgra_decl"),
        comgra.trace("debug", root=tmp_path, overrides=declared) as session,
    ):
        rules: Any = session._rules
        for step in range(28):
            if step in (1, 9):
                with torch.no_grad():
                    model[0].bias.fill_(-100.0 if step == 1 else 0.0)  # type: ignore[operator]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.randn(32, 4)), torch.randn(32, 2)).backward()
            optimizer.step()
            _settled(step, rules)
    assert session.path is not None
    run = comgra.open_run(session.path)
    texts = [text for text in run.notes()["text"] if "dead_units" in text]
    assert [text.startswith("withdrawn: ") for text in texts] == [False, True]
    logged = [r.getMessage() for r in caplog.records if "dead_units" in r.getMessage()]
    assert len(logged) == 2
    assert "is withdrawn at step" in logged[1]
    assert "dead_units" not in set(run.findings()["rule"])
    assert "dead_units" not in {finding.rule for finding in diagnose(run).findings}


def _settled(step: int, rules: Any) -> None:
    """Waits until the rules have seen a step, and makes them conclude at their next record."""
    end = time.monotonic() + 20
    while rules._engine.scene.last_step < step and time.monotonic() < end:
        time.sleep(0.01)
    rules._due = 0.0
