"""A run that contains only evaluations is checked and described as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import open_run
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.headline import headline
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.verdicts import look


def evaluated(root: Path, calls: int) -> Path:
    """Records a model that is called without a backward pass."""
    model = nn.Linear(4, 2).eval()
    with comgra.trace("debug", root=root, group="group", name="run"), torch.no_grad():
        for _ in range(calls):
            model(torch.randn(3, 4))
    return root


@pytest.fixture
def page(tmp_path: Path) -> Dashboard:
    """A page of a finished run with a single evaluation."""
    return Dashboard(Catalogue(evaluated(tmp_path, 1)), query="?section=kpis")


def test_a_check_is_made_and_its_result_is_shown(page: Dashboard, tmp_path: Path) -> None:
    view = RunView(open_run(tmp_path / "group" / "run"))
    assert headline(view).unasked
    assert look(view).wait(60)
    said = headline(view)
    assert not said.unasked
    assert (said.lead, said.tone) == ("No findings", "neutral")
    assert "checks need recorded training steps" in said.text
    strip = page.screen.strip
    assert "Check now" in strip.view.html
    shown = strip._shown
    assert shown is not None
    strip._on_message({"send": "look"})
    assert look(shown.view).wait(60)
    strip.update(shown)
    assert "Not checked" not in strip.view.html
    page.change(section="findings")
    page.poll()
    findings: Any = page.screen.sections["findings"].panes[0]
    assert "there are no training records" in findings.view.html


def test_nothing_speaks_of_training(page: Dashboard) -> None:
    assert "1 record<" in page.screen.head.html
    groups = page.screen.selectors.view.groups
    (types,) = [f for group in groups for f in group["fields"] if f["name"] == "type"]
    assert "training" not in types["options"][0]["label"]
    kpis: Any = page.screen.sections["kpis"].panes[0]
    assert "had no backward pass" in kpis._empty.html
