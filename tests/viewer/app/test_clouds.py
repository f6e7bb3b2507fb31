"""The cloud in the Pictures section: no record that arrives later moves a drawn point."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl
from comgra_decl.viewer.model.clouds import Cloud, Clouds
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.clouds import FIT_AGAIN
from comgra_decl.viewer.panes.pictures import PicturesPane

EYES = "probe:eyes"
NODE = "2"


def trained(root: Path, steps: range) -> Path:
    """Train a network whose points move away from where they began; resume the run if it exists."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), 3.0)
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**"}},
        "schedule": {"first": 100},
        "rules": "off",
        "probes": {"eyes": {"samples": {"count": 6, "by": "target"}, "schedule": {"every": 1}}},
        "run": {"root": str(root), "group": "g", "resume": True, "resume_step": steps.start},
    }
    with comgra_decl.trace(spec) as session:
        for _ in steps:
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(9, 3)), torch.arange(9) % 3).backward()
            optimizer.step()
    assert session.path is not None
    return Path(str(session.path))


@pytest.fixture
def growing(tmp_path: Path) -> RunView:
    """A run of three steps."""
    return RunView(comgra_decl.open_run(trained(tmp_path, range(3))))


def grow(view: RunView) -> None:
    """Add twenty steps to the run."""
    trained(Path(str(view.run.path)).parents[1], range(3, 23))
    assert view.refresh()


def shown(view: RunView, **wanted: Any) -> Shown:
    at = replace(resolve(view, Selection(), {}), **{"node": NODE, "step": 0, **wanted})
    return Shown(view, at, colour="kind", scale="linear", expanded=None, follow=False)


def dots(pane: PicturesPane) -> list[tuple[str, str]]:
    """Return the places of the samples on the screen, in pixels."""
    found = re.findall(
        r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*data-send="sample:', pane.view.html
    )
    assert len(found) == 6
    return found


def test_a_record_that_arrives_later_moves_no_point_on_the_screen(growing: RunView) -> None:
    pane = PicturesPane(lambda **_: None)
    before = []
    for step in (0, 2):
        pane.refresh(shown(growing, step=step))
        before.append(dots(pane))
    first = Clouds()
    points = first.of(growing, EYES, 0, NODE)
    grow(growing)
    later = first.of(growing, EYES, 0, NODE)
    assert isinstance(points, Cloud)
    assert isinstance(later, Cloud)
    np.testing.assert_array_equal(points.points, later.points)  # bitwise
    assert (points.low, points.high, points.steps) == (later.low, later.high, 3)
    for step, places in zip((0, 2), before, strict=True):
        pane.refresh(shown(growing, step=step))
        assert dots(pane) == places
    assert "fitted to 3 steps" in pane.view.html


def test_points_that_left_the_frame_are_said_and_fitted_on_demand(growing: RunView) -> None:
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(growing))
    assert FIT_AGAIN not in pane.view.html
    grow(growing)
    pane.refresh(shown(growing, step=22))
    found = pane._clouds.of(growing, EYES, 22, NODE)
    assert isinstance(found, Cloud)
    assert found.outside
    assert f"{found.outside} point" in pane.view.html
    assert all(0 <= float(place) <= 190 for dot in dots(pane) for place in dot)
    assert pane.view.check({"send": FIT_AGAIN})
    pane._on_message({"send": FIT_AGAIN})
    assert FIT_AGAIN not in pane.view.html
    assert "fitted to 23 steps" in pane.view.html


def test_each_session_keeps_its_own_frame(growing: RunView) -> None:
    one, other = Clouds(), Clouds()
    one.of(growing, EYES, 0, NODE)
    grow(growing)
    frames = [clouds.of(growing, EYES, 0, NODE) for clouds in (one, other)]
    assert [cloud.steps for cloud in frames if isinstance(cloud, Cloud)] == [3, 23]
