"""An empty card of the Pictures section names the lines of the spec that fill it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional as F

import comgra_decl
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.pictures import PicturesPane

CARD = re.compile(
    r'<div class="card empty"><h3>([^<]*)</h3><p>(.*?)</p>(?:<p>[^<]*</p><pre>([^<]*)<)?'
)
GIVEN = {"input": torch.randn(4, 1, 6, 6).tolist()}


class Net(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.act = nn.ReLU()
        self.head = nn.Linear(48, outputs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return self.head(self.act(self.conv(input)).flatten(1))


def trained(root: Path, spec: dict[str, Any], *, outputs: int = 3) -> RunView:
    torch.manual_seed(0)
    net = Net(outputs)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    compare: Callable[..., torch.Tensor] = F.mse_loss if outputs == 1 else F.cross_entropy
    targets = torch.randn(9, 1) if outputs == 1 else torch.arange(9) % 3
    with comgra_decl.trace({"rules": "off", **spec}, root=root) as session:
        for _ in range(3):
            optimizer.zero_grad()
            compare(net(torch.randn(9, 1, 6, 6)), targets).backward()
            optimizer.step()
    assert session.path is not None
    return RunView(comgra_decl.open_run(session.path))


def page(view: RunView, node: str = "head") -> str:
    pane = PicturesPane(lambda **_: None)
    at = replace(resolve(view, Selection(), {}), step=0, node=node)
    pane.refresh(Shown(view, at, colour="kind", scale="linear", expanded=None, follow=False))
    return pane.view.html


def empty(html: str) -> dict[str, tuple[str, str]]:
    """Return why each empty card is empty, and the lines that it names, by title."""
    return {title: (why, unescape(lines)) for title, why, lines in CARD.findall(html)}


def filled(html: str, title: str) -> bool:
    return f"<h3>{title}" in html and title not in empty(html)


ALL = {"all": {"select": "**"}}
PREDICTIONS = {"confusion matrix", "reliability"}
LAYERS = {
    "similarity of layers (CKA, unbiased)",
    "similarity of steps (CKA, unbiased): head",
    "linear probe of each layer",
    "dead units: head",
    "cloud: head",
}
FEW: dict[str, Any] = {
    "nodes": {"all": {"select": "head"}},
    "probes": {"eyes": {"samples": {"count": 2}, "values": False}},
}


@pytest.mark.parametrize(
    ("spec", "titles"),
    [
        pytest.param(FEW, PREDICTIONS | LAYERS, id="no values"),
        pytest.param(
            {"nodes": ALL, "probes": {"eyes": {"batch": GIVEN}}},
            PREDICTIONS | {"linear probe of each layer"},
            id="no labels",
        ),
    ],
)
def test_the_lines_of_an_empty_card_fill_it(
    spec: dict[str, Any], titles: set[str], tmp_path: Path, subtests: Any
) -> None:
    before = empty(page(trained(tmp_path, spec)))
    assert titles <= {*before}
    pages: dict[str, str] = {}
    for title in titles:
        lines = before[title][1]
        assert 1 < len(lines.splitlines()) <= 3
        if lines not in pages:
            pages[lines] = page(trained(tmp_path, merged(spec, yaml.safe_load(lines))))
        with subtests.test(title):
            assert filled(pages[lines], title), lines


@pytest.mark.parametrize(
    "title", ["gradient flow", "weight spectrum: conv", "Grad-CAM of the loss: conv"]
)
def test_the_lines_of_an_empty_card_of_training_fill_it(title: str, tmp_path: Path) -> None:
    spec = {"nodes": {"all": {"select": "**", "capture": ["output"]}}, "stats": ["mean"]}
    _, lines = empty(page(trained(tmp_path, spec), "conv"))[title]
    assert 1 < len(lines.splitlines()) <= 3
    assert filled(page(trained(tmp_path, merged(spec, yaml.safe_load(lines))), "conv"), title)


@pytest.mark.parametrize(
    "title", ["filters: conv", "weight spectrum: conv", "Grad-CAM of the loss: conv"]
)
def test_the_lines_of_an_empty_card_make_room_for_large_tensors(title: str, tmp_path: Path) -> None:
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["output"]}},
        "values": {"max_elements": 2},
    }
    _, lines = empty(page(trained(tmp_path, spec), "conv"))[title]
    assert len(lines.splitlines()) <= 3
    assert filled(page(trained(tmp_path, merged(spec, yaml.safe_load(lines))), "conv"), title)


def test_a_card_that_suits_no_such_node_names_one_that_it_suits(tmp_path: Path) -> None:
    cards = empty(page(trained(tmp_path, {"nodes": ALL}), "act"))
    assert "select one that does, such as conv." in cards["weight spectrum"][0]
    cards = empty(page(trained(tmp_path, {"nodes": ALL}), "head"))
    assert "such as conv." in cards["Grad-CAM of the loss"][0]
    assert not cards["Grad-CAM of the loss"][1]


def test_a_card_that_no_spec_can_fill_says_why(tmp_path: Path) -> None:
    spec = {"nodes": ALL, "probes": {"eyes": {"samples": {"count": 4}}}}
    cards = empty(page(trained(tmp_path, spec, outputs=1)))
    why, lines = cards["confusion matrix"]
    assert "no classes" in why
    assert lines == ""
    assert "labels" in cards["linear probe of each layer"][1]


def merged(spec: Any, lines: Any) -> Any:
    """Return a spec with further lines, as a person would add them."""
    if not isinstance(spec, dict) or not isinstance(lines, dict):
        return lines
    return {**spec, **{key: merged(spec.get(key), value) for key, value in lines.items()}}
