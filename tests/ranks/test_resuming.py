"""Training resumed from a checkpoint continues the same run."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.ranks import worker

Checkpoint = tuple[dict[str, Any], dict[str, Any]]


def train(
    steps: range,
    checkpoint: Checkpoint | None = None,
    *,
    save_after: int | None = None,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    fail_after: int | None = None,
) -> Checkpoint | None:
    """Trains for some steps; returns the checkpoint made on the way."""
    model = worker.net()
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    if checkpoint is not None:
        model.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))  # receives the tensors themselves
    saved = None
    for step in steps:
        optimizer.zero_grad()
        model(worker.batch(step)).square().mean().backward()
        optimizer.step()
        comgra.kpi("told", step)
        if step == save_after:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == fail_after:
            raise KeyboardInterrupt
    return saved


def traced(root: Path, **run: Any) -> Any:
    return comgra.trace({**worker.SPEC, "run": {"root": str(root), "group": "g", **run}})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training without a crash."""
    with traced(tmp_path_factory.mktemp("whole"), name="run") as session:
        train(range(12))
    return comgra.open_run(session.path)


@pytest.fixture
def crashed(tmp_path: Path) -> Checkpoint:
    """A run of 9 steps whose checkpoint was made after step 6."""
    saved: list[Checkpoint | None] = []
    with traced(tmp_path, name="run"):
        saved.append(train(range(9), save_after=5))
    assert saved[0] is not None
    return saved[0]


@pytest.mark.parametrize("how", [True, "path"])
def test_a_resumed_run_reads_as_one_that_never_stopped(
    tmp_path: Path, crashed: Checkpoint, whole: Run, how: bool | str
) -> None:
    resume = str(tmp_path / "g" / "run") if how == "path" else True
    with traced(tmp_path, resume=resume) as session:
        train(range(6, 12), crashed)
    run = comgra.open_run(session.path)
    assert run.path == tmp_path / "g" / "run"
    assert list(run.steps) == list(range(12))
    for name, statistic, pass_ in (("blocks.0.0", "std", "forward"), ("spare", "l2", "grad")):
        found = run.slot(name, of=pass_).series(statistic)
        expected = whole.slot(name, of=pass_).series(statistic)
        np.testing.assert_array_equal(found.index, expected.index)
        np.testing.assert_array_equal(found, expected)
    for table in (run.kpis(), whole.kpis()):
        assert list(table[table.name == "told"].step) == list(range(12))
    np.testing.assert_array_equal(
        run.kpis()[run.kpis().name == "loss"].value, whole.kpis()[whole.kpis().name == "loss"].value
    )
    assert list(run.slots.node) == list(whole.slots.node)
    np.testing.assert_array_equal(run.value("spare", 7), whole.value("spare", 7))
    assert list(run.records.step) == list(range(12))
    assert run.edges() == whole.edges()


def test_it_says_which_steps_gave_way(tmp_path: Path, crashed: Checkpoint) -> None:
    with traced(tmp_path, resume=True) as session:
        train(range(6, 8), crashed)
    run = comgra.open_run(session.path)
    assert list(run.steps) == list(range(8))
    note = run.notes()[run.notes().type == "resume"].iloc[0]
    assert note.step == 6
    assert "resumes at step 6, by the optimizer's own step count; it replaces" in note.text
    assert list(run.sessions.step.dropna()) == [6]


@pytest.mark.slow
def test_a_run_may_be_resumed_many_times(tmp_path: Path, crashed: Checkpoint) -> None:
    for _ in range(3):
        with traced(tmp_path, resume=True) as session:
            train(range(6, 9), crashed)
    run = comgra.open_run(session.path)
    assert list(run.steps) == list(range(9))
    assert len(run.sessions) == 4


def test_the_spec_may_say_the_step(tmp_path: Path, crashed: Checkpoint) -> None:
    with traced(tmp_path, resume=True, resume_step=3) as session:
        train(range(3, 5), crashed)
    run = comgra.open_run(session.path)
    assert list(run.steps) == [0, 1, 2, 3, 4]


def test_without_any_count_it_goes_on_after_the_last_step(tmp_path: Path) -> None:
    with traced(tmp_path, name="run"):
        saved = train(range(4), save_after=3, kind=torch.optim.SGD)
    with traced(tmp_path, resume=True) as session:
        train(range(4, 6), saved, kind=torch.optim.SGD)
    run = comgra.open_run(session.path)
    assert list(run.steps) == list(range(6))
    assert "the actual one is unknown" in run.notes().text.iloc[-1]


@pytest.mark.usefixtures("crashed")
def test_a_fresh_optimizer_does_not_wipe_the_run(tmp_path: Path) -> None:
    """A count of 1 is no reason to treat the step as the very first."""
    with traced(tmp_path, resume=True) as session:
        train(range(2))
    assert list(comgra.open_run(session.path).steps) == list(range(11))


def test_resuming_where_there_is_nothing_begins_a_run(tmp_path: Path) -> None:
    """The same command line serves the first start and every restart."""
    with traced(tmp_path, resume=True) as session:
        train(range(2))
    assert list(comgra.open_run(session.path).steps) == [0, 1]


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"resume": "nowhere"}, "there is no run in .*nowhere to resume"),
        ({"resume": True, "name": "run"}, "samples.count was 4 and is now 2"),
    ],
)
def test_what_cannot_be_resumed_is_said_and_the_training_goes_on(
    tmp_path: Path,
    crashed: Checkpoint,
    caplog: pytest.LogCaptureFixture,
    run: dict[str, Any],
    told: str,
) -> None:
    spec = {**worker.SPEC, "samples": {"count": 2}}
    before = comgra.open_run(tmp_path / "g" / "run").records
    with (
        caplog.at_level(logging.ERROR, "comgra_decl"),
        comgra.trace({**spec, "run": {"root": str(tmp_path), "group": "g", **run}}),
    ):
        train(range(6, 8), crashed)
    (record,) = caplog.records
    assert "nothing is recorded" in record.getMessage()
    assert re.search(told, record.getMessage())
    after = comgra.open_run(tmp_path / "g" / "run")
    assert after.records.equals(before)
    assert after.state == "finished"


@pytest.mark.slow
def test_what_is_captured_may_change_between_sessions(tmp_path: Path, crashed: Checkpoint) -> None:
    spec = {
        **worker.SPEC,
        "nodes": {"few": {"select": "spare", "capture": ["output", "input"]}},
        "run": {"root": str(tmp_path), "group": "g", "resume": True},
    }
    with comgra.trace(spec):
        train(range(6, 8), crashed)
    run = comgra.open_run(tmp_path / "g" / "run")
    assert run.series("blocks.0.0", "std").isna().tolist() == [False] * 6 + [True] * 2
    assert not run.series("spare", "std").isna().any()
    inputs = run.slot("spare", role="input").series("std")
    assert inputs.isna().tolist() == [True] * 6 + [False] * 2


def test_resuming_leaves_the_training_alone(tmp_path: Path, crashed: Checkpoint) -> None:
    plain = train(range(6, 9), crashed, save_after=8)
    with traced(tmp_path, resume=True):
        followed = train(range(6, 9), crashed, save_after=8)
    assert plain is not None
    assert followed is not None
    for name, tensor in plain[0].items():
        assert torch.equal(tensor, followed[0][name])
