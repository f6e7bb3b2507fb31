"""Successive and nested traces, traces in notebooks, and interrupted ones."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import comgra_decl as comgra
from tests.support.forked import Program, forked
from tests.ways.models import Net, batches
from tests.ways.proof import Outcome, Told, attached, outcome, same, seeded

SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**", "capture": ["output", "output_grad", "parameter_grad"]}},
    "schedule": {"first": 1000},
    "store": {"commit_interval": 0.0},
}


def step(model: Net, optimizer: torch.optim.Optimizer) -> float:
    ((x, y),) = batches(1)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def cells(tmp_path: Path | None) -> Outcome:
    """Three cells of a notebook; the second is interrupted with Ctrl-C, and the third continues."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for number in range(3):
        trace = comgra.trace(SPEC, root=tmp_path, group="g") if tmp_path else None
        if trace:
            trace.__enter__()
        try:
            losses += [step(model, optimizer) for _ in range(3)]
            if number == 1:
                handle = model.head.register_forward_hook(interrupted)
                try:
                    step(model, optimizer)
                finally:
                    handle.remove()
        except KeyboardInterrupt:
            optimizer.zero_grad()
        if trace:
            trace.__exit__(None, None, None)
    return outcome(losses, model)


def test_cells_of_a_notebook(tmp_path: Path) -> None:
    plain = seeded(lambda _: cells(None), Told(listening=False))
    before = attached()
    found = seeded(lambda _: cells(tmp_path), Told(listening=False))
    same(plain, found)
    assert attached() == before
    runs = [comgra.open_run(s.path) for s in comgra.list_runs(tmp_path)]
    assert sorted(len(run.steps) for run in runs) == [3, 3, 3]


def test_a_trace_inside_another(tmp_path: Path) -> None:
    """Both see the steps within both; the outer one continues alone."""

    def training(traced: bool) -> Outcome:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not traced:
            return outcome([step(model, optimizer) for _ in range(4)], model)
        losses = []
        with comgra.trace(SPEC, root=tmp_path, group="outer"):
            losses.append(step(model, optimizer))
            with comgra.trace(SPEC, root=tmp_path, group="inner"):
                losses += [step(model, optimizer) for _ in range(2)]
            losses.append(step(model, optimizer))
        return outcome(losses, model)

    plain = seeded(lambda _: training(False), Told(listening=False))
    before = attached()
    found = seeded(lambda _: training(True), Told(listening=False))
    same(plain, found)
    assert attached() == before
    counts = {s.group: len(comgra.open_run(s.path).steps) for s in comgra.list_runs(tmp_path)}
    assert counts == {"outer": 4, "inner": 2}


def test_an_exception_ends_the_training_and_what_was_recorded_is_there(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @comgra.trace(SPEC, root=tmp_path, group="g")
    def training() -> None:
        for _ in range(3):
            step(model, optimizer)
        model(torch.randn(8, 7))

    with pytest.raises(RuntimeError, match="mat1"):
        training()
    (summary,) = comgra.list_runs(tmp_path)
    assert {0, 1, 2} <= set(comgra.open_run(summary.path).steps)


SCRIPT = """
    import sys, torch
    import comgra_decl as comgra
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = {"schedule": {"first": 1000000}, "store": {"commit_interval": 0.0}}
    with comgra.trace(spec, root=sys.argv[1], group="g"):
        while True:
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    "sent", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_training_that_is_ended_by_a_signal(tmp_path: Path, sent: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    program = Program(tmp_path, script, tmp_path / "runs")
    while program.process.is_alive() and not several_records(tmp_path / "runs"):
        time.sleep(0.02)
    assert program.process.pid is not None
    os.kill(program.process.pid, sent)
    done = program.ended()
    assert done.returncode == -sent or "KeyboardInterrupt" in done.stderr
    (summary,) = comgra.list_runs(tmp_path / "runs")
    run = comgra.open_run(summary.path)
    steps = list(run.steps)
    assert steps == [*range(len(steps))]
    assert len(steps) > 1


def several_records(root: Path) -> bool:
    """Return whether the only run below `root` has more than one record."""
    return root.exists() and any(summary.records > 1 for summary in comgra.list_runs(root))


BEFORE = """
    import os, signal, sys, time, torch
    import comgra_decl as comgra
    from comgra_decl.store import RunWriter

    def commit(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    RunWriter.commit = commit
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace("debug", root=sys.argv[1], group="g"):
        while True:
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
"""


def test_a_training_that_is_ended_before_anything_was_committed(tmp_path: Path) -> None:
    """Its run exists and is empty, and the next one is next to it."""
    (tmp_path / "script.py").write_text(textwrap.dedent(BEFORE))
    done = forked(tmp_path, "script.py", "runs")
    assert done.returncode == -signal.SIGTERM
    (summary,) = comgra.list_runs(tmp_path / "runs")
    assert (summary.state, summary.records) == ("stopped", 0)
    run = comgra.open_run(summary.path)
    assert (len(run.records), [*run.steps], run.nodes) == (0, [], [])
    assert run.findings().empty
    model = Net()
    with comgra.trace(SPEC, root=tmp_path / "runs", group="g") as session:
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert session.path != summary.path
    assert comgra.open_run(tmp_path / "runs").path == session.path
