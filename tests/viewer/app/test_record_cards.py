"""Cards of the Pictures section that the records suffice for, and maps over the image."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

import comgra_decl
from comgra_decl.query import Run
from comgra_decl.viewer.model.images import png, veil
from comgra_decl.viewer.model.likely_reads import neighbours
from comgra_decl.viewer.model.pictures import album
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.palette import colour_at, colours_at
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.pictures import PicturesPane

EYES = "probe:eyes"
KEPT = ["output", "output_grad", "parameter"]
SPEC: dict[str, Any] = {
    "nodes": {
        "all": {"select": "**"},
        "maps": {"select": "conv", "capture": KEPT, "values": True},
    },
    "schedule": {"first": 100},
    "rules": "off",
    "probes": {"eyes": {"samples": {"count": 6}, "schedule": {"first": 0, "every": 2}}},
    "pictures": {"cam": {"method": "grad_cam", "of": "eyes", "select": "conv", "target": "label"}},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.act = nn.ReLU()
        self.head = nn.Linear(64, 3)
        nn.init.constant_(self.conv.bias, -0.5)  # type: ignore[arg-type]
        nn.init.constant_(self.conv.bias[1], -9.0)  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.conv(x)).flatten(1))


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    targets = torch.arange(9) % 3
    with comgra_decl.trace(SPEC, root=tmp_path_factory.mktemp("runs")) as session:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(9, 1, 6, 6)), targets).backward()
            optimizer.step()
    assert session.path is not None
    return RunView(comgra_decl.open_run(session.path))


def shown(view: RunView, **wanted: Any) -> Shown:
    at = replace(resolve(view, Selection(), {}), **{"step": 4, "node": "conv", **wanted})
    return Shown(view, at, colour="kind", scale="linear", expanded=None, follow=False)


def card(view: RunView, title: str, **wanted: Any) -> str:
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(view, **wanted))
    begin = re.escape(f'<div class="card"><h3>{title}')
    (found,) = re.findall(rf'{begin}.*?(?=<div class="card|$)', pane.view.html, re.S)
    return str(found)


def images(html: str) -> list[NDArray[np.uint8]]:
    """Decode the images of a card, [height, width, 3] each."""
    sources = re.findall(r'(?:href|src)="data:image/png;base64,([^"]*)', html)
    return [pixels(source) for source in sources]


def pixels(source: str) -> NDArray[np.uint8]:
    content = base64.b64decode(source)
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    start = content.index(b"IDAT") + 4
    lines = np.frombuffer(zlib.decompress(content[start:]), np.uint8).reshape(height, -1)
    return lines[:, 1:].reshape(height, width, -1)


def rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def test_a_unit_that_never_fires_is_red_at_each_step(view: RunView) -> None:
    html = card(view, "dead units: act", node="act")
    (drawn,) = images(html)
    steps = view.steps(EYES).tolist()
    values = [view.run.value("act", step, type=EYES) for step in steps]
    dead = np.stack([(value <= 0).all((0, 2, 3)) for value in values], 1)
    assert dead[1].all()
    assert not dead.all()
    np.testing.assert_array_equal(drawn[..., 0] > 205, dead)
    assert f"{dead[:, 2].sum()} of 4 units" in html


def test_cells_of_the_similarity_of_steps_have_the_colours_of_their_cka(view: RunView) -> None:
    html = card(view, "similarity of steps (CKA, unbiased): head", node="head")
    (drawn,) = images(html)
    cka = view.run.picture("likeness_over_steps", node="head").values
    wanted = [[rgb(colour_at(value)) for value in row] for row in cka.tolist()]
    np.testing.assert_array_equal(drawn, wanted)
    assert html.count("<rect") == 2  # the selected step, in its row and in its column


def test_the_flow_of_gradients_has_the_order_of_the_calls(view: RunView) -> None:
    html = card(view, "gradient flow", step=3)
    rows = re.findall(r'data-send="node:(\w+)">\w+</th><td[^>]*>([^<]*)<', html)
    assert [node for node, _ in rows] == ["conv", "act", "head", "Net"]
    norms = view.run.row(3)["l2"]
    for node, text in rows:
        wanted = norms[(node, "output", 0, "grad")]
        assert float(text.replace("\u2212", "-")) == pytest.approx(wanted, rel=0.01)
    assert "step 3 of training" in card(view, "gradient flow", step=3)


def test_the_weight_spectrum_has_the_singular_values_of_the_step(view: RunView) -> None:
    html = card(view, "weight spectrum: conv")
    weights = view.run.slot("conv", role="weight")
    singular = [
        np.linalg.svd(weights.value(step)[0].reshape(4, -1), compute_uv=False) for step in range(6)
    ]
    most = np.max(singular)
    path = re.findall(r'<path d="([^"]*)"', html)[0]
    heights = [float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
    wanted = 14 + (130 - 16 - 14) * (1 - singular[4] / most)
    np.testing.assert_allclose(heights, wanted, atol=0.06)
    assert len(re.findall("<path", html)) == 3


def test_maps_of_the_loss_are_those_of_the_batch(view: RunView) -> None:
    html = card(view, "Grad-CAM of the loss: conv")
    slot = view.run.slot("conv")
    cams = []
    for step in range(6):
        output, gradient = slot.value(step), slot.grad.value(step)
        cams.append(np.einsum("nc,nchw->nhw", gradient.mean((2, 3)), output))
    most = np.abs(cams).max()
    drawn = images(html)
    assert len(drawn) == 8
    for image, cam in zip(drawn, cams[4], strict=True):
        blue = np.where(cam < 0, 255 - (255 - 0x24) * np.abs(cam) / most, 255)
        np.testing.assert_allclose(image[..., 0][cam < 0], blue[cam < 0], atol=1)


def test_cards_of_training_need_no_probe(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    spec = {key: SPEC[key] for key in ("nodes", "schedule", "rules")}
    with comgra_decl.trace(spec, root=tmp_path) as session:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.randn(9, 1, 6, 6)).square().mean().backward()
            optimizer.step()
    assert session.path is not None
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(RunView(comgra_decl.open_run(session.path)), step=1))
    assert "No samples to follow" in pane.view.html
    for title in ("gradient flow", "weight spectrum: conv", "Grad-CAM of the loss: conv"):
        assert f"<h3>{title}" in pane.view.html
    assert "These lines" not in pane.view.html


def test_a_veil_covers_more_where_the_map_is_larger() -> None:
    image = veil(np.array([[0.0, 0.5, -1.0]]))
    (drawn,) = images(f'src="{png(image)}"')
    np.testing.assert_array_equal(drawn, image)
    assert drawn[0, :, 3].tolist() == [0, 102, 204]
    assert drawn[0, 1, 0] > drawn[0, 1, 2]  # orange
    assert drawn[0, 2, 0] < drawn[0, 2, 2]  # blue


@pytest.mark.browser
@pytest.mark.slow
def test_maps_are_laid_over_the_image_of_the_sample(
    view: RunView, serve: Callable[..., str], page: Any
) -> None:
    from playwright.sync_api import expect

    panel: Any = pytest.importorskip("panel")

    def make() -> Any:
        pane = PicturesPane(lambda **_: None)
        pane.refresh(shown(view, batch="2"))
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.goto(serve(make))
    page.wait_for_function("!!(window.Bokeh && Bokeh.documents[0]?.is_idle)")
    found = page.locator(".card", has=page.get_by_role("heading", name="cam: grad_cam"))
    expect(found.locator("img")).to_have_count(1)
    page.get_by_role("button", name="maps over the image").press("Enter")
    expect(found.locator(".over img")).to_have_count(2)
    below, above = (found.locator(".over img").nth(i) for i in (0, 1))
    tile = page.get_by_role("button", name="sample 2").locator("img")
    assert below.get_attribute("src") == tile.get_attribute("src")
    assert below.bounding_box() == above.bounding_box()


def test_feature_maps_of_the_sample_are_sorted_on_one_scale(view: RunView) -> None:
    html = card(view, "feature maps: act", node="act", batch="2")
    steps = view.steps(EYES).tolist()
    most = max(np.abs(view.run.value("act", step, type=EYES)).max() for step in steps)
    channels = view.run.value("act", 4, type=EYES)[2]
    np.testing.assert_array_equal(
        view.run.picture("feature_maps", 4, "act", type=EYES).values[2], channels
    )
    order = np.argsort(-channels.mean((1, 2)), kind="stable")
    assert [int(i) for i in re.findall(r'alt="channel (\d+)', html)] == order.tolist()
    for image, channel in zip(images(html), channels[order], strict=True):
        np.testing.assert_allclose(image[..., 2], 255 - (255 - 0x1F) * channel / most, atol=1)
    assert html.count('class="dead"') == int((channels <= 0).all((1, 2)).sum()) > 0


def test_filters_are_shown_beside_those_of_the_first_step(view: RunView) -> None:
    html = card(view, "filters: conv", step=5)
    weight = view.run.slot("conv", role="weight")
    kernels = [weight.value(step)[0] for step in (5, 0)]
    found = view.run.picture("filters", 5, "conv")
    assert found.axes == ("filter", "channel", "height", "width")
    np.testing.assert_array_equal(found.values, kernels[0])
    most = np.abs(kernels).max()
    drawn = images(html)
    assert len(drawn) == 8
    for image, kernel in zip(drawn, np.concatenate(kernels)[:, 0], strict=True):
        below = kernel < 0
        wanted = 255 - (255 - 0x24) * np.abs(kernel) / most
        np.testing.assert_allclose(image[..., 0][below], wanted[below], atol=1)
    assert "select one that does, such as conv" in card_of_empty(view, "filters")


def card_of_empty(view: RunView, title: str) -> str:
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(view, node="act"))
    return pane.view.html.partition(f'<div class="card empty"><h3>{title}')[2][:200]


def test_colours_of_an_array_are_those_of_its_numbers() -> None:
    places = np.array([[-1.0, 0.0, 0.2501], [0.5, 0.9999, 7.0]])
    wanted = [[colour_at(each) for each in row] for row in places.tolist()]
    found = colours_at(places)
    assert [["#" + bytes(each).hex() for each in row] for row in found] == wanted
    assert colours_at(np.array([np.nan])).tolist() == [[128, 128, 128]]


def test_pictures_of_neighbouring_steps_are_read_ahead(
    view: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    original = Run.picture

    def picture(self: Run, name: str, *given: Any, **by: Any) -> Any:
        asked.append(name)
        return original(self, name, *given, **by)

    fresh = RunView(comgra_decl.open_run(view.run.path))
    steps = fresh.steps("").tolist()
    at, before = (replace(resolve(fresh, Selection(), {}), step=s) for s in steps[1::-1])
    monkeypatch.setattr(Run, "picture", picture)
    pane = PicturesPane(lambda **_: None)
    for other in neighbours(fresh, at, before.step):
        for work in pane.ahead(Shown(fresh, other, "kind", "linear", None, follow=False)):
            work()
    assert {"likeness", "linear_probe", "feature_maps"} <= {*asked}
    asked.clear()
    found = album(fresh, replace(at, step=steps[2]))
    assert any(each.picture is not None for each in found.computed)
    assert asked == []
