"""A finding keeps its step and those before it, and says which; training is unaffected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_array_equal
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import SpecError
from comgra_decl.query import Run
from comgra_decl.rules import diagnose, stored
from tests.support.shortened import shortened

NODES = {"all": {"select": "**", "capture": ["output", "output_grad", "parameter"]}}
RARELY = {"first": 2, "every": 50}
EVERY = {"first": 1, "every": 1}
ONLY = {"ring": 6, "after": 2, "when": []}


def train(steps: int, *, wild: int) -> list[float]:
    """At step `wild`, one that the schedule records, the outputs are not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        x, y = torch.randn(4, 6), torch.randn(4, 1)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x * (float("inf") if step == wild else 1.0)), y)
        loss.backward()
        if step == wild:
            optimizer.zero_grad()
        optimizer.step()
        losses.append(loss.item())
    return losses


def traced(root: Path, *, wild: int = 100, steps: int = 120, **spec: Any) -> tuple[Run, list[Any]]:
    declared = {"nodes": NODES, "schedule": RARELY, **spec}
    with comgra.trace(declared, root=root, group="g") as session:
        losses = train(steps, wild=wild)
    assert session.path is not None
    return comgra.open_run(session.path), losses


def reasons(run: Run) -> dict[int, str]:
    table = run.records.dropna(subset="kept")
    return dict(zip(table["step"].tolist(), table["kept"].tolist(), strict=True))


@pytest.mark.parametrize("interval", shortened([0, 0.25], tried=1))
def test_a_finding_keeps_its_step_and_those_around_it(tmp_path: Path, interval: float) -> None:
    run, losses = traced(
        tmp_path,
        keep=ONLY,
        on_finding={"keep": "error"},
        store={"commit_interval": interval},
        rules={"nonfinite": {}},
    )
    scheduled = {0, 1, 50, 100}
    assert run.steps.tolist() == sorted(scheduled | {*range(94, 103)})
    assert reasons(run) == {
        **dict.fromkeys(range(94, 100), "before finding nonfinite at 100"),
        100: "finding nonfinite",
        **dict.fromkeys((101, 102), "after finding nonfinite at 100"),
    }
    live, found = stored(run), diagnose(run)
    assert live is not None
    assert live == found
    assert found.records == len(scheduled)  # nor are kept steps passed to the rules
    kept = [text for text in run.notes()["text"] if text.startswith("kept for")]
    assert kept == ["kept for finding nonfinite at step 100: steps 94 to 100 and 2 after"]
    assert_array_equal(losses, train(120, wild=100))
    full, _ = traced(tmp_path, schedule=EVERY)
    for node in ("0", "2"):
        for statistic in full.statistics:
            expected = full.series(node, statistic)[run.steps]
            assert_array_equal(run.series(node, statistic), expected)


@pytest.mark.slow
def test_what_is_kept_for_a_finding_is_not_shown_to_the_rules_again(tmp_path: Path) -> None:
    keep = {"ring": 8, "when": ["nonfinite"]}
    run, _ = traced(tmp_path, keep=keep, on_finding={"keep": "warning"}, wild=75)
    live = run.document("findings")
    found = diagnose(run)
    assert live["findings"] == json.loads(json.dumps([f.to_json() for f in found.findings]))
    assert live["unchecked"] == {u.rule: u.reason for u in found.unchecked}
    assert found.findings[0].rule == "nonfinite"
    assert found.records == len(run.steps)  # the trigger kept them all before any rule requested it
    assert run.document("keep")["unseen"] == []


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"on_finding": {"keep": "error"}}, "the steps before a finding are not buffered"),
        ({"keep": {"when": []}}, "nothing would be kept"),
        ({"keep": {}, "rules": "off", "on_finding": {"keep": "hint"}}, "there are no findings"),
    ],
)
def test_a_spec_that_would_keep_nothing_is_refused(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        comgra.load_spec(spec)


def test_a_dry_run_of_such_a_spec_is_possible() -> None:
    from comgra_decl.experiments.dry_run import _rehearsed

    spec = comgra.load_spec({"keep": ONLY, "on_finding": {"keep": "error"}})
    assert _rehearsed(spec, Path("x")).on_finding.keep == "never"


@pytest.mark.slow
def test_the_last_records_of_a_training_are_looked_at(tmp_path: Path) -> None:
    for on_finding in ({}, {"keep": "error"}):
        keep = {"ring": 30, "when": ["nonfinite"]}
        run, _ = traced(tmp_path, keep=keep, on_finding=on_finding, wild=-1, steps=102)
        live = run.document("findings")
        found = diagnose(run)
        assert live["findings"] == json.loads(json.dumps([f.to_json() for f in found.findings]))
