"""Interventions without any effect are a finding, with the step since when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.rules import diagnose
from comgra_decl.rules.finding import Finding


class Gated(nn.Module):
    """A network with a layer that is not used, and one that is used until it is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.late = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.gate = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.unused(x)
        return self.head(x + self.gate * self.late(x))


def reported(root: Path, interventions: dict[str, Any]) -> Finding | None:
    torch.manual_seed(0)
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    spec = {
        "schedule": {"first": 9},
        "probes": {"eyes": {"samples": {"count": 3}, "schedule": {"first": 9}}},
        "interventions": {name: {"of": "eyes", **each} for name, each in interventions.items()},
    }
    with comgra.trace(spec, root=root) as session:
        for step in range(4):
            model.gate = float(step < 2)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
            optimizer.step()
    assert session.path is not None
    diagnosis = diagnose(comgra.open_run(session.path))
    found = [f for f in diagnosis.findings if f.rule == "intervention_did_nothing"]
    return found[0] if found else None


def test_a_change_that_nothing_depends_on_is_reported(tmp_path: Path) -> None:
    finding = reported(tmp_path, {"idle": {"select": "unused", "do": "zero"}})
    assert finding is not None
    assert (finding.severity, finding.first_step) == ("hint", 0)
    assert str(finding.place) == "unused"
    assert finding.message.startswith(
        "At step 3, the intervention 'idle' did nothing: it changed 6 of 6 elements in 1 tensor by "
    )
    assert finding.message.endswith(", but the model's output is the same.")


@pytest.mark.slow
def test_since_when_it_does_nothing_is_the_first_step(tmp_path: Path) -> None:
    changes = {
        "idle": {"select": "late", "do": "zero"},
        "used": {"select": "first", "do": "zero"},
        "swept": {"select": "late", "do": "mean", "sweep": "feature"},
        "same": {"select": "head", "do": {"patch": "clean"}, "every": 3},
    }
    idle = reported(tmp_path / "a", {k: v for k, v in changes.items() if k != "same"})
    assert idle is not None
    assert (idle.first_step, idle.evidence["interventions"]) == (2, 2)
    assert idle.message.endswith("Neither did 'swept' have an effect.")
    same = reported(tmp_path / "b", {"same": changes["same"]})
    assert same is not None
    assert "'same' did nothing: every element kept its value" in same.message
    assert reported(tmp_path / "c", {"used": changes["used"]}) is None


def test_a_run_without_interventions_cannot_be_checked(tmp_path: Path) -> None:
    with comgra.trace({"probes": {"eyes": {"samples": {"count": 2}}}}, root=tmp_path) as session:
        model = Gated()
        F.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert session.path is not None
    unchecked = {u.rule: u.reason for u in diagnose(comgra.open_run(session.path)).unchecked}
    assert unchecked["intervention_did_nothing"].startswith("it needs `interventions`")
