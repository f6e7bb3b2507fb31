"""From the spec to the finished run: when steps are recorded, and what the run shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import Run

NODES = {"all": {"select": "**", "capture": ["output", "output_grad"]}}


def trained(
    root: Path,
    lengths: Sequence[int],
    *,
    tags: dict[int, str] | None = None,
    evaluate: int = 0,
    **spec: Any,
) -> Run:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace({"nodes": NODES, **spec}, root=root) as session:
        for number, length in enumerate(lengths):
            comgra.tag(*[tags[number]] if tags and number in tags else [])
            optimizer.zero_grad()
            model(torch.randn(4, length, 3)).square().mean().backward()
            optimizer.step()
            if evaluate and number % evaluate == 0:
                model.train(False)
                with torch.no_grad():
                    model(torch.randn(4, 2, 3))
                    model(torch.randn(4, 2, 3))
                model.train()
    assert session.path is not None
    return comgra.open_run(session.path)


def test_windows(tmp_path: Path) -> None:
    schedule = {"first": 1, "every": 40, "windows": [[13, 15]]}
    run = trained(tmp_path, [2] * 50, schedule=schedule)
    assert run.steps.tolist() == [0, 13, 14, 15, 40]


def test_a_cadence_for_each_type(tmp_path: Path) -> None:
    by = {"input": 0, "shape": 1, "bins": [4], "names": ["short", "long"]}
    schedule = {"first": 1, "every": 1000, "types": {"long": {"every": 3}}}
    run = trained(tmp_path, [2, 2, 9, 2, 9, 9, 9, 2], types={"by": by}, schedule=schedule)
    assert run.records[["step", "type"]].values.tolist() == [[0, "short"], [2, "long"], [6, "long"]]
    assert run.series("Linear", "mean", type="long").index.tolist() == [2, 6]
    assert run.slot("Linear", of="grad").series("mean", type="long").notna().all()
    assert run.kpis().set_index("step").type.loc[[1, 5]].tolist() == ["short", "long"]


def test_types_from_the_program(tmp_path: Path) -> None:
    tags = {3: "restart", 5: "restart"}
    run = trained(tmp_path, [2] * 8, tags=tags, schedule={"first": 1, "every": 1000})
    assert run.records[["step", "type"]].values.tolist() == [[0, "train"], [5, "restart"]]


def test_the_whole_of_an_evaluation(tmp_path: Path) -> None:
    schedule = {"first": 1, "every": 1000, "eval": {"every": 2, "batches": "all"}}
    run = trained(tmp_path, [2] * 7, evaluate=2, schedule=schedule)
    assert run.records[["step", "type"]].values.tolist() == [[0, "train"], [1, "eval"], [5, "eval"]]
    assert run.slot("Linear", iteration=1).series("mean", type="eval").notna().all()


def test_what_a_budget_chose_can_be_read_in_the_run(tmp_path: Path) -> None:
    schedule = {"first": 1, "every": 1, "budget": {"time": "0.1%"}}
    run = trained(tmp_path, [2] * 200, schedule=schedule)
    assert len(run.steps) < 200
    assert "to stay below 0.1% of the time" in run.notes().text.iloc[0]


def test_a_disk_budget_ends_recording_before_it_is_exceeded(tmp_path: Path) -> None:
    schedule = {"first": 1, "every": 1, "budget": {"disk": "50kB"}}
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace({"nodes": NODES, "schedule": schedule}, root=tmp_path) as session:
        assert isinstance(session.path, Path)
        for number in range(60):
            if number == 20:  # something else fills the folder in the meantime
                (session.path / "notes.txt").write_bytes(bytes(60_000))
            assert session._attendant is not None
            session._attendant.look()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    run = comgra.open_run(session.path)
    assert 0 < len(run.steps) <= 21
    assert run.steps.max() <= 20
    assert run.notes().text.str.contains("used up: no more records").sum() == 1


def test_steps_of_the_program(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with comgra.trace({"nodes": NODES, "schedule": {"step": "explicit"}}, root=tmp_path) as session:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            comgra.step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert run.steps.tolist() == [0, 1, 2]
    assert run.slot("Linear", of="grad").series("mean").notna().all()
