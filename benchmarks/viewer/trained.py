"""Runs to view that need a training: pictures of a probe, and attention weights of many heads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, HEADS, TOKENS, WIDTH = 12, 12, 128, 48
SAMPLES, RECORDS, BLOCKS, CLASSES = 8, 120, 12, 10


class _Heads(nn.Module):
    """One layer of attention whose weights a function computes."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qk(x).chunk(2, -1))
        weights = torch.softmax(q @ k.mT, -1)
        values = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mixed: Tensor = weights @ values
        return x + mixed.transpose(1, 2).flatten(2)


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.blocks = nn.Sequential(*(_Heads() for _ in range(LAYERS)))

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.embed(tokens)))
        return scores


def _images() -> nn.Sequential:
    convs = [
        layer
        for i in range(BLOCKS)
        for layer in (nn.Conv2d(16 if i else 1, 16, 3, padding=1), nn.ReLU())
    ]
    pool = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, CLASSES)]
    return nn.Sequential(*convs, *pool)


def write(folder: Path) -> None:
    """Record both runs, `folder/cnn` and `folder/heads`."""
    import comgra_decl

    torch.manual_seed(0)
    every = {"first": RECORDS, "every": 1}
    pictured = {
        "nodes": {
            "all": {"select": "**", "capture": ["output", "output_grad"]},
            "kernels": {"select": {"class": "Conv2d"}, "capture": ["parameter"], "values": True},
        },
        "values": {"max_elements": 4096},
        "schedule": every,
        "rules": "off",
        "probes": {"eyes": {"samples": {"count": SAMPLES, "by": "target"}, "schedule": every}},
        "pictures": {
            "cam": {"method": "grad_cam", "of": "eyes", "select": "20", "target": "top"},
            "edges": {"method": "saliency", "of": "eyes", "target": "top"},
            "paths": {"method": "integrated_gradients", "of": "eyes", "target": "top", "points": 4},
        },
    }
    model, x = _images(), torch.randn(32, 1, 16, 16)
    _train(pictured, folder / "cnn", model, x, torch.arange(32) % CLASSES, RECORDS)
    of_heads = {
        "nodes": {"softmax": {"select": {"function": "torch.softmax"}, "values": True}},
        "values": {"max_elements": HEADS * TOKENS**2},
        "samples": {"count": 1},
        "rules": "off",
    }
    tokens = torch.randint(64, (2, TOKENS))
    _train(of_heads, folder / "heads", _Language(), tokens, tokens.roll(-1, 1), 2)
    assert comgra_decl.open_run(folder / "cnn").pictures[:3] == ["cam", "edges", "paths"]


def _train(
    spec: dict[str, object], path: Path, model: nn.Module, x: Tensor, y: Tensor, steps: int
) -> None:
    import comgra_decl

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    place = {"root": path.parents[1], "group": path.parent.name, "name": path.name}
    with comgra_decl.trace(spec, **place):  # type: ignore[arg-type]
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            optimizer.step()
