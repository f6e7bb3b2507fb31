"""What a newcomer sees first: the graphs of a residual network and of a transformer, in a browser.

Each network is traced for one step. timm and transformers are optional.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from comgra_decl.viewer.page import create_page
from tests.support.shortened import shortened
from tests.support.traced import traced, train

pytestmark = pytest.mark.browser

NODES = {"all": {"select": "**", "capture": ["output", "parameter"]}}
LAPTOP, DESK = {"width": 1280, "height": 800}, {"width": 1920, "height": 1080}
LARGE = {"width": 3840, "height": 2160}

SIZES = pytest.mark.parametrize(
    "size", shortened([LAPTOP, DESK, LARGE], tried=1), ids=["laptop", "desk", "4k"]
)

LABELS = """labels => labels.map((text) => {
  const shown = text.getClientRects().length > 0;
  const size = parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a;
  return [text.textContent, shown ? size : 0];
})"""
"""The text of each label and its size on screen in pixels; 0 if it is hidden."""


class Stage(nn.Sequential):
    """Two residual blocks, as in a residual network with 18 layers."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__(Block(wide, out), Block(out, out))


class Block(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, out, 3, padding=1), nn.BatchNorm2d(out)
        self.drop, self.act1 = nn.Identity(), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out)
        self.act2 = nn.ReLU()
        self.shortcut = nn.Conv2d(wide, out, 1) if wide != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act1(self.drop(self.bn1(self.conv1(x))))
        return self.act2(self.bn2(self.conv2(inner)) + self.shortcut(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.maxpool = nn.MaxPool2d(2)
        self.layer1, self.layer2 = Stage(4, 4), Stage(4, 6)
        self.layer3, self.layer4 = Stage(6, 8), Stage(8, 8)
        self.global_pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.global_pool(x).flatten(1))


def resnet() -> Callable[[], None]:
    """Trains resnet18 of timm or, without timm, a network of the same structure."""
    try:
        import timm

        model: nn.Module = timm.create_model("resnet18", num_classes=10)
    except Exception:  # noqa: BLE001 - an installed timm may not match the installed torch
        model = Residual()
    images = torch.randn(2, 3, 32, 32)
    return lambda: train(model, images)


def gpt2() -> Callable[[], None]:
    """Trains GPT-2 with its 12 layers and small widths."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=24, n_head=2, vocab_size=60, n_positions=16)
    model, tokens = transformers.GPT2LMHeadModel(config), torch.randint(0, 60, (2, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def training() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()

    return training


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder with a run of each network."""
    torch.manual_seed(0)
    found = {}
    for name, make in (("resnet", resnet), ("gpt2", gpt2)):
        root = tmp_path_factory.mktemp(name) / "runs"
        traced(root, NODES, make())
        found[name] = root
    return found


@pytest.fixture
def look(
    runs: dict[str, Path], serve: Callable[..., str], open_page: Callable[..., Any]
) -> Callable[..., Any]:
    """Opens the viewer of a network in a window and waits for its graph."""

    def look_(name: str, size: dict[str, int]) -> Any:
        page = open_page(viewport=size)
        page.goto(serve(lambda: create_page([str(runs[name])])))
        page.locator(".node .label").first.wait_for()
        page.wait_for_function("() => !!(window.Bokeh && Bokeh.documents[0].is_idle)")
        return page

    return look_


def sizes(page: Any) -> dict[str, float]:
    """Returns the size of each label in pixels, once the browser has reported the pane's size."""
    last: dict[str, float] = {}
    for _ in range(60):
        now = dict(page.locator(".node .label").evaluate_all(LABELS))
        if now == last and now:
            break
        last = now
        page.wait_for_timeout(150)
    return last


@pytest.mark.slow
@SIZES
def test_a_residual_network_opens_as_a_dozen_readable_boxes(
    look: Callable[..., Any], size: dict[str, int]
) -> None:
    page = look("resnet", size)
    found = sizes(page)
    assert 10 <= len(found) <= 16
    assert {"conv1", "maxpool", "layer1", "layer2", "layer3", "layer4", "fc"} <= set(found)
    assert "bn1 \u00b7 act1" in found
    assert min(found.values()) >= 8
    assert page.locator(".node.kind-parameter").count() == 0
    assert page.locator('.mark[data-mark="conv1.weight"]').count() == 1
    assert all_inside(page)


@SIZES
@pytest.mark.slow
def test_a_transformer_of_twelve_layers_opens_as_its_blocks(
    look: Callable[..., Any], size: dict[str, int]
) -> None:
    page = look("gpt2", size)
    found = sizes(page)
    assert {f"h.{i}" for i in range(12)} <= set(found)
    assert min(found.values()) >= 8
    assert all_inside(page)


def all_inside(page: Any) -> bool:
    """Returns whether the drawing area shows every box."""
    inside: bool = page.locator(".node .shape").evaluate_all(
        """shapes => {
          const stage = shapes[0].getRootNode().querySelector(".stage").getBoundingClientRect();
          return shapes.every((shape) => {
            const b = shape.getBoundingClientRect();
            return b.left >= stage.left - 1 && b.right <= stage.right + 1
              && b.top >= stage.top - 1 && b.bottom <= stage.bottom + 1;
          });
        }"""
    )
    return inside
