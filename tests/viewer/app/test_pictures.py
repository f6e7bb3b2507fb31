"""Previews of a real network, drawn in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.shortened import shortened
from tests.support.traced import traced, train
from tests.viewer.app.served import Server

pytestmark = pytest.mark.browser

TITLE = "forward \u00b7 preview"
FIGURES = """() => Bokeh.documents.flatMap((document) =>
  [...document._all_models.values()].filter((model) => model.type == "Figure").map((figure) => ({
    title: String(figure.title.text),
    label: String(figure.below[0].axis_label),
    shown: figure.renderers
      .filter(({data_source: {data}}) =>
        (data instanceof Map ? [...data.values()] : Object.values(data))[0].length)
      .map((each) => each.glyph.type),
  })))"""
"""Titles, labels and drawn glyphs of all figures."""


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.flatten(2).unflatten(2, (4, -1))[:, :3].transpose(1, 2)
        return (heads @ heads.transpose(-1, -2)).repeat(1, 1, 10, 10).softmax(-1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.relu = nn.ReLU()
        self.attention = Attention()
        self.score = nn.Linear(30, 1)
        nn.init.zeros_(self.conv.weight.data[5])
        assert self.conv.bias is not None
        nn.init.constant_(self.conv.bias.data[5], -1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.attention(self.relu(self.conv(x))).mean((1, 2)))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A viewer of a run with previews from its first step, and of the inputs of every step."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("pictures")
    nodes = {
        "all": {"select": "**", "capture": ["output", "output_grad"]},
        "weights": {"select": "conv", "capture": ["parameter"]},
        "attention": {"select": "attention", "axes": ["head", "query", "key"]},
    }
    x = torch.rand(4, 3, 24, 24)
    run = traced(root, nodes, lambda: train(Net(), x, steps=3))
    server = Server(Path(str(run.path)).parents[1])
    yield f"{server.url}?run={Path(str(run.path)).parent.name}/{Path(str(run.path)).name}"
    server.stop()


@pytest.mark.parametrize(
    "drawn",
    shortened(
        [
            ("input", "1 image, means of 24\u00d724", "ImageRGBA"),
            ("relu", "1 all zero", "Rect"),
            ("conv&role=bias", "12 features", "Line"),
            ("conv", "10 of 12 channels, means of 24\u00d724", "Image"),
            ("attention", "4 heads, means of 30\u00d730", "Image"),
            ("score", "4 samples", "VBar"),
            ("conv&role=weight", "out \u00d7 in 12\u00d73", "Image"),
        ],
        tried=1,
    ),
)
def test_a_preview_is_drawn_by_its_meaning(
    address: str, page: Any, drawn: tuple[str, str, str]
) -> None:
    node, label, glyph = drawn
    page.goto(f"{address}&section=inspect&step=2&node={node}")
    page.locator("article[data-step]").first.wait_for()
    page.wait_for_function("() => !!(window.Bokeh && Bokeh.documents[0].is_idle)")
    title = TITLE if node == "input" else f"{TITLE}.*step 0"
    page.wait_for_function(f"() => ({FIGURES})().some(({{title}}) => /^{title}$/.test(title))")
    found = [each for each in page.evaluate(FIGURES) if each["title"].startswith(TITLE)]
    assert len(found) == 1
    assert label in found[0]["label"]
    assert glyph in found[0]["shown"]
