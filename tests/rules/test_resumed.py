"""Rules in a resumed run know what was recorded before, and report nothing twice."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import Run
from comgra_decl.rules import diagnose

SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**", "capture": ["output", "output_grad", "parameter"]}},
    "schedule": {"first": 1_000_000, "eval": {"every": 1}},
    "rules": {
        "early": {"when": "step >= 2", "node": "0", "patience": 3},
        "both": {"when": "step >= 0", "node": "1", "patience": 12},
        "later": {"when": "step >= 9", "node": "2"},
        "undone": {"when": "step >= 7", "node": "2", "patience": 5},
        "unlike": {"when": "mean > 1e9 * early(mean) and mean < early(mean)", "node": "0"},
    },
}


def train(steps: range, checkpoint: Any = None, *, save_after: int | None = None) -> Any:
    """Takes some training steps, with an evaluation every fourth; returns the saved state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if checkpoint is not None:
        model.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(checkpoint[1])
    saved = None
    for step in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        if step % 4 == 3:
            model.eval()
            model(x)
            model.train()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :1].sin()).backward()
        optimizer.step()
        if step == save_after:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return saved


def traced(root: Path, **run: Any) -> Any:
    return comgra.trace({**SPEC, "run": {"root": str(root), "group": "g", "name": "r", **run}})


def test_what_is_found_live_is_what_a_diagnosis_of_all_sessions_finds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with traced(tmp_path):
        saved = train(range(10), save_after=5)
    with caplog.at_level(logging.WARNING), traced(tmp_path, resume=True) as session:
        caplog.clear()
        train(range(6, 14), saved)
    resumed: Run = comgra.open_run(session.path)
    assert resumed.steps.tolist() == [*range(14)]
    live, found = resumed.document("findings"), diagnose(resumed)
    assert live["findings"] == json.loads(json.dumps([f.to_json() for f in found.findings]))
    assert live["unchecked"] == {u.rule: u.reason for u in found.unchecked}
    first = {f.rule: f.first_step for f in found.findings}
    assert first.items() >= {"early": 2, "both": 0, "later": 9, "undone": 7}.items()
    assert found.records == 14
    said = [message.split(": ")[1] for message in caplog.messages if "comgra: " in message]
    assert said[0] == "both"
    assert "early" not in said  # the first program has reported it
    assert "begin anew" not in caplog.text
