"""After a loss that suddenly jumps or becomes non-finite, the next steps are recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import comgra_decl as comgra
from comgra_decl.hooks.scalars.alarm import LossAlarm
from comgra_decl.hooks.schedule.agenda import Agenda, Plan
from comgra_decl.hooks.schedule.budget import Budget, Meter
from comgra_decl.spec import load_spec

NAN, INF = float("nan"), float("inf")
ORDINARY = [2.0, 1.0, 1.5, 1.75] * 8
"""The last 32 are between 1 and 2. A loss is sudden above 2 + max(3 * 1, 2) = 5."""


def alarms(losses: list[float]) -> list[int]:
    """Returns the positions of the losses that raise an alarm."""
    alarm = LossAlarm()
    found = []
    for at, loss in enumerate(losses):
        alarm.take(loss)
        if alarm.taken() is not None:
            found.append(at)
    return found


@pytest.mark.parametrize(
    ("loss", "sounds"), [(5.0, False), (5.01, True), (-40.0, False), (NAN, True), (INF, True),
                         (-INF, True)]
)  # fmt: skip
def test_a_loss_far_above_the_usual_range_is_sudden(loss: float, sounds: bool) -> None:
    assert alarms([*ORDINARY, loss]) == [32] * sounds


@pytest.mark.parametrize("count", [0, 15])
def test_before_sixteen_losses_nothing_is_a_jump_but_a_nan_is_sudden(count: int) -> None:
    assert alarms([*ORDINARY[:count], 1e9]) == []
    assert alarms([*ORDINARY[:count], NAN]) == [count]


def test_what_stays_bad_sounds_once_and_again_after_sixteen_ordinary_losses() -> None:
    assert alarms([*ORDINARY, *[NAN] * 100]) == [32]
    assert alarms([*ORDINARY, NAN, *ORDINARY[:15], NAN]) == [32]
    assert alarms([*ORDINARY, NAN, *ORDINARY[:16], NAN]) == [32, 49]


def test_a_run_has_sixteen_alarms_at_most() -> None:
    assert len(alarms([*ORDINARY, *[NAN, *ORDINARY] * 40])) == 16


def test_a_constant_or_growing_loss_is_not_sudden() -> None:
    assert alarms([3.0] * 100) == []
    assert alarms([1.01**step for step in range(500)]) == []
    assert alarms([-5.0] * 40 + [-1.0]) == []


def agenda(**schedule: Any) -> Agenda:
    spec = load_spec({"schedule": {"first": 0, "every": None, **schedule}})
    budget = Budget(spec.schedule.budget, meter=Meter(), say=lambda *_: None)
    return Agenda(spec, budget)


def test_the_steps_after_an_alarm_are_recorded_and_no_others() -> None:
    plans = agenda(sudden=3)
    assert plans.plan(40) is Plan.WAIT
    assert plans.alarm(41) == (41, 43)
    found = []
    for step in range(41, 50):
        if plans.plan(step) is Plan.ARM:
            found.append(step)
        plans.end(recorded=step in found)
    assert found == [41, 42, 43]
    assert plans.quiet_until == float("inf")


@pytest.mark.parametrize("schedule", [{}, {"sudden": 3, "steps": [7]}])
def test_a_schedule_may_have_none(schedule: dict[str, Any]) -> None:
    plans = agenda(**schedule)
    assert plans.alarm(41) is None
    assert plans.plan(41) is (Plan.ARM if "steps" in schedule else Plan.WAIT)


def recorded(root: Path, *, bad: float, sudden: str) -> tuple[list[int], list[str], list[float]]:
    """Trains for 200 steps; from step 100 on, the loss is multiplied by `bad`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    losses = []
    changes = ["schedule.first=2", "schedule.every=null", f"schedule.sudden={sudden}"]
    with comgra.trace("debug", root=root, overrides=changes) as session:
        for step in range(200):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean() * (bad if step >= 100 else 1.0)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    return run.steps.tolist(), run.notes()["text"].tolist(), losses


@pytest.mark.parametrize("bad", [NAN, 1000.0])
def test_a_training_is_recorded_within_fifty_steps_of_its_sudden_loss(
    tmp_path: Path, bad: float
) -> None:
    steps, notes, losses = recorded(tmp_path, bad=bad, sudden="5")
    after = steps[2:]
    assert steps[:2] == [0, 1]
    assert after == list(range(after[0], after[0] + 5))
    assert 100 < after[0] <= 150
    (note,) = [text for text in notes if "schedule.sudden" in text]
    assert note.endswith(f"steps {after[0]} to {after[-1]} are recorded")
    without, _, same = recorded(tmp_path, bad=bad, sudden="null")
    assert without == [0, 1]
    assert [x for x in losses if x == x] == [x for x in same if x == x]


def test_several_ranks_are_told_that_they_record_no_further_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comgra_decl.hooks.steps._is_one_of_several", lambda: True)
    steps, notes, _ = recorded(tmp_path, bad=NAN, sudden="5")
    assert steps == [0, 1]
    (note,) = [text for text in notes if "schedule.sudden" in text]
    assert "no effect on multiple ranks" in note


def test_the_steps_that_a_note_announces_are_recorded_without_an_optimizer(tmp_path: Path) -> None:
    """A manual update is seen in the next backward pass, when the next step has begun."""
    weight = torch.nn.Linear(2, 1)
    spec = {"schedule": {"first": 2, "every": None, "sudden": 3}, "graph": False}
    with comgra.trace(spec, root=tmp_path) as session:
        for step in range(40):
            weight.zero_grad()
            out = weight(torch.full((4, 2), 1e6 if step == 30 else 1.0))
            torch.nn.functional.mse_loss(out, torch.zeros(4, 1)).backward()
            with torch.no_grad():
                for parameter in weight.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(1e-13 * parameter.grad)
    assert session.path is not None
    run = comgra.open_run(session.path)
    (text,) = [t for t in run.notes().text if t.startswith("schedule.sudden")]
    assert text.endswith("steps 32 to 34 are recorded")
    assert [*run.steps] == [0, 1, 32, 33, 34]
