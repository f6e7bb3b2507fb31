"""Notes are shown as they were written, whatever they contain."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl
from comgra_decl.viewer.model.notes import notes
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.notes import NotesPane

SPEC: dict[str, Any] = {"nodes": {"all": {"select": "**"}}, "schedule": {"first": 0, "every": 4}}


@pytest.fixture
def noted(tmp_path: Path) -> RunView:
    """A training run of nine steps with two notes, one of them hostile."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with comgra_decl.trace(SPEC, root=tmp_path) as session:
        for step in range(9):
            if step == 5:
                comgra_decl.note("rate halved")
            if step == 7:
                comgra_decl.note("<script>alert(1)</script>")
            net(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.path is not None
    return RunView(comgra_decl.open_run(session.path))


def shown(view: RunView) -> Shown:
    at = resolve(view, Selection(), {})
    return Shown(view, at, colour="kind", scale="linear", expanded=None, follow=False)


def test_notes_are_listed_with_step_and_time(noted: RunView) -> None:
    first, second = notes(noted)
    assert (first.step, first.text) == (5, "rate halved")
    assert (second.step, second.text) == (7, "<script>alert(1)</script>")
    assert first.time[:10] == time.strftime("%Y-%m-%d")


def test_a_note_is_text_and_never_markup(noted: RunView) -> None:
    pane = NotesPane(lambda **_: None)
    pane.refresh(shown(noted))
    assert "&lt;script&gt;" in pane.view.html
    assert "<script>" not in pane.view.html


def test_a_click_on_a_note_goes_to_the_nearest_record(noted: RunView) -> None:
    wanted: list[dict[str, object]] = []
    pane = NotesPane(lambda **change: wanted.append(change))
    pane.refresh(shown(noted))
    assert pane.view.check({"send": "step:7"})
    assert not pane.view.check({"send": "step:6"})
    pane._on_message({"send": "step:7"})
    assert wanted == [{"step": 8, "follow": False}]
