"""A run with calls, named tensors, attention weights and parts opens in the dashboard."""

from __future__ import annotations

import urllib.parse
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.query import Run
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve, slots_of
from comgra_decl.viewer.model.values import values_picture
from comgra_decl.viewer.url import format_query, parse
from tests.support.traced import traced, train

NODES = {
    "all": {"select": "**", "values": True},
    "attn": {"select": "attn", "attention": {"recompute": True}},
    "probs": {"select": {"function": "torch.softmax"}, "values": True},
    "heads": {
        "select": {"annotation": "heads"},
        "values": True,
        "split": {"dim": 1, "name": "head"},
    },
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (12, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = comgra.node(F.scaled_dot_product_attention(q, k, v), "heads", role="context")
        return y.transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.attn(x), -1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("runs")
    return traced(root, NODES, lambda: train(Net(), torch.randn(4, 5, 24), steps=3))


def test_parts_are_offered_in_the_order_of_their_numbers(run: Run) -> None:
    roles = RunView(run).roles("heads")
    assert roles == ["context", *(f"context.head {i}" for i in range(12))]


@pytest.mark.parametrize(
    ("node", "role"),
    [
        pytest.param("heads", "context.head 3", marks=pytest.mark.slow),
        pytest.param("attn", "attention (recomputed)", marks=pytest.mark.slow),
        ("Net.softmax", "output"),
    ],
)
def test_every_pane_shows_it(run: Run, node: str, role: str) -> None:
    board = Dashboard(Catalogue(Path(str(run.path)).parents[1]))
    for section in board.screen.sections:
        board.change(section=section, node=node, role=role, step=1)
        assert (board.state.node, board.state.role) == (node, role)
    query = parse(urllib.parse.unquote_plus("?" + format_query(board.state)))
    assert (query["node"], query["role"]) == (node, role)


def test_values_of_recomputed_attention_are_pictures(run: Run) -> None:
    view = RunView(run)
    wanted = Selection(node="attn", role="attention (recomputed)", step=2, batch="1")
    at = resolve(view, wanted, {})
    forward, _ = slots_of(view, at)
    picture = values_picture(view, forward, at)
    values = run.slot("attn", role="attention (recomputed)").value(2, sample=1)
    assert values.shape == (12, 5, 5)
    assert not picture.missing
    np.testing.assert_allclose(values.sum(-1), 1, atol=1e-5)
