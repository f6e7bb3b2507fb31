"""The cloud in the Pictures section: no record that arrives later moves a drawn point."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl
from comgra_decl.query import Picture, Run
from comgra_decl.viewer.model.clouds import Cloud, Clouds, NoCloud, laid_out, layouts_here
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.clouds import FIT_AGAIN, cloud_card
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
    pattern = r'data-send="sample:(\d+)"><circle cx="([\d.]+)" cy="([\d.]+)"'
    found = sorted(re.findall(pattern, pane.view.html))
    assert len(found) == 6
    return [(x, y) for _, x, y in found]


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


def wait_for_layout(view: RunView, clouds: Clouds, step: int = 0) -> Cloud | NoCloud:
    """Return the cloud once its layout has ended."""
    before = laid_out(view)
    found = clouds.of(view, EYES, step, NODE)
    if isinstance(found, NoCloud) and "background" in found.why:
        for thread in threading.enumerate():
            if thread.name == "comgra_decl layout":
                thread.join(60)
        assert laid_out(view) == before + 1
    return clouds.of(view, EYES, step, NODE)


def test_a_layout_is_computed_in_the_background_and_kept(growing: RunView) -> None:
    pytest.importorskip("openTSNE")
    clouds = Clouds()
    clouds.method = "tsne"
    first = wait_for_layout(growing, clouds)
    assert isinstance(first, Cloud)
    wanted = growing.run.embedding(NODE, method="tsne", type=EYES)
    np.testing.assert_array_equal(first.points, wanted.values[0])
    assert first.note.startswith("t-SNE, trustworthiness")
    grow(growing)
    again = clouds.of(growing, EYES, 0, NODE)
    assert isinstance(again, Cloud)
    np.testing.assert_array_equal(again.points, first.points)
    newer = clouds.of(growing, EYES, 22, NODE)
    assert isinstance(newer, NoCloud)
    assert newer.again
    assert f'data-send="{FIT_AGAIN}"' in cloud_card(newer, NODE, 0)
    clouds.fit_again()
    assert isinstance(wait_for_layout(growing, clouds, 22), Cloud)


def test_the_page_answers_while_a_layout_is_computed(
    growing: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    slow = Run.embedding

    def embedding(run: Run, node: str, *given: Any, method: str = "pca", **more: Any) -> Picture:
        if method == "umap":
            assert go_on.wait(60)
        return slow(run, node, *given, **more)

    monkeypatch.setattr(Run, "embedding", embedding)
    monkeypatch.setattr("comgra_decl.viewer.model.clouds.find_spec", lambda _: True)
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(growing))
    pane._on_message({"send": "cloud:umap"})
    assert "laid out in the background" in pane.view.html
    assert pane.view.check({"send": "cloud:pca"})  # one can go back meanwhile
    pane._on_message({"send": "cloud:pca"})
    assert len(dots(pane)) == 6
    go_on.set()
    wait_for_layout(growing, pane._clouds)


def test_a_layout_that_fails_says_why_and_offers_the_others(growing: RunView) -> None:
    clouds = Clouds()
    clouds.method = "umap"
    found = wait_for_layout(growing, clouds)
    if isinstance(found, Cloud):  # umap-learn is installed
        assert found.note.startswith("UMAP")
        return
    assert "comgra-decl[projections]" in found.why
    card = cloud_card(found, NODE, 0)
    assert 'data-send="cloud:pca"' in card or len(layouts_here()) == 1


def test_images_of_the_samples_are_the_points_of_their_cloud() -> None:
    points = np.array([[0.0, 0.0], [1.0, 0.5]])
    cloud = Cloud(points, (0.0, 0.0), (1.0, 1.0), ["a", "b"], "note", 1)
    card = cloud_card(cloud, NODE, 0, ["data:one", "data:two"])
    pattern = r'data-send="sample:(\d)"><image href="([^"]*)" x="([\d.]+)" y="([\d.]+)"'
    drawn = re.findall(pattern, card)
    assert drawn == [("1", "data:two", "274.0", "138.0"), ("0", "data:one", "2.0", "274.0")]
    assert card.count("<circle") == 0
