"""A run whose steps were selected afterwards, with samples by category."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.choices import choices, run_choice
from comgra_decl.viewer.model.notes import notes
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.statistics import sample_table

SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**"}},
    "schedule": {"steps": [0]},
    "keep": {"ring": 2, "when": ["nonfinite"]},
    "samples": {"count": 4, "by": "target"},
}
CLASSES = torch.tensor([1, 1, 1, 0, 0, 1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A training run of twelve steps, the ninth of which has an infinite input."""
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    with comgra_decl.trace(SPEC, root=tmp_path):
        for step in range(12):
            x = torch.ones(6, 2) * (float("inf") if step == 8 else 1.0)
            nn.functional.cross_entropy(net(x), CLASSES).backward()
            optimizer.zero_grad()
            optimizer.step()
    return tmp_path


def test_only_kept_steps_are_offered_and_notes_say_why(folder: Path) -> None:
    view = RunView(comgra_decl.open_run(folder))
    assert view.steps("").tolist() == [0, 6, 7, 8]
    (note,) = (note for note in notes(view) if note.text.startswith("kept"))
    assert note.step == 8
    assert note.text.startswith("kept for nonfinite: input input")


def test_samples_are_named_by_their_category(folder: Path) -> None:
    view = RunView(comgra_decl.open_run(folder))
    at = resolve(view, Selection(node="0", step=7), {})
    table = sample_table(view, at)
    assert table.labels == ("0", "1", "0", "1")
    assert table.batch_index == (3, 0, 4, 1)
    groups = choices(view, at, "statistic", "linear", run_choice((), ""))
    labels = [o.label for _, fields in groups for field in fields for o in field.options]
    assert "Sample 0 | 0" in labels
    assert "Sample 3 | 1" in labels


def test_the_dashboard_opens_it(folder: Path) -> None:
    dashboard = Dashboard(Catalogue(folder))
    assert dashboard.state.step == 8
