"""Ways in which comgra's recordings are lost or do harm, none of which exist here."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import ComgraError, SpecError
from comgra_decl.query import Run
from tests.support.forked import Program
from tests.support.traced import train

SPEC = {"nodes": {"all": {"select": "**"}}, "schedule": {"first": 1_000_000}}


def recorded(root: Path, *, steps: int = 2, group: str = "g", name: str = "run") -> Run:
    with comgra.trace(SPEC, root=root, group=group, name=name) as session:
        train(nn.Linear(3, 2), torch.ones(4, 3), steps=steps)
    assert session.path is not None
    return comgra.open_run(session.path)


def test_f04_a_name_that_is_taken_deletes_nothing(tmp_path: Path) -> None:
    first = recorded(tmp_path, steps=3)
    second = recorded(tmp_path)
    assert second.path.name == "run-2"
    first.refresh()
    assert len(comgra.open_run(first.path).steps) == 3


@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "/", " ", "../g"])
@pytest.mark.parametrize("which", ["group", "name"])
def test_f05_an_odd_name_is_refused_and_touches_nothing(
    tmp_path: Path, name: str, which: str
) -> None:
    recorded(tmp_path)
    (tmp_path / "g" / "foreign.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SpecError):
        recorded(
            tmp_path,
            group=name if which == "group" else "g",
            name=name if which == "name" else "run",
        )
    assert sorted(tmp_path.rglob("*")) == before


ENDLESS = """
import sys
import torch
import comgra_decl as comgra
from tests.support.forked import Program

with comgra.trace("debug", root=sys.argv[1], name="run", overrides=["schedule.backoff=1.0"]):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1_000_000):
        comgra.kpi("step", step)
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
"""


def test_f10_a_killed_training_keeps_its_records_and_its_curves(tmp_path: Path) -> None:
    program = Program(tmp_path, "-c", ENDLESS, tmp_path)
    try:
        committed = _wait_for_records(tmp_path, 20)
    finally:
        program.kill()
    run = comgra.open_run(tmp_path)
    assert len(run.steps) >= committed
    assert run.steps.tolist() == list(range(len(run.steps)))
    kpis = run.kpis()
    steps = kpis.step[kpis.name == "step"].tolist()
    assert steps == list(range(len(steps)))
    assert len(steps) >= committed
    assert run.value("Linear", int(run.steps[-1])).shape == (2, 2)


def _wait_for_records(root: Path, count: int) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            run = comgra.open_run(root)
            found = min(len(run.steps), len(run.kpis()) // 2)  # metrics follow within seconds
        except ComgraError:
            found = 0
        if found >= count:
            return found
        time.sleep(0.05)
    raise AssertionError("nothing was recorded")


class Harm:
    """What a planted pickle would do."""

    done: list[int] = []  # noqa: RUF012

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Harm.done.append, (1,))


def test_f11_nothing_in_a_run_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path)
    planted = pickle.dumps(Harm())
    for file in ("plan.pkl", "config.pkl", "trace.ocdbt/planted", "sitecustomize.py"):
        Path(str(run.path), file).write_bytes(planted)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    again = comgra.open_run(run.path)
    assert len(again.row(0))
    assert again.report
    assert Harm.done == []
