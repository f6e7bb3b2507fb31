"""No rule fails on a training run in which hardly any two steps are alike."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.rules import diagnose
from tests.support.shortened import shortened

SPEC = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": [
                "input",
                "output",
                "output_grad",
                "parameter",
                "parameter_grad",
                "update",
                "buffer",
            ],
            "values": True,
        }
    },
    "samples": {"count": 3},
    "histogram": {},
    "schedule": {"first": 1_000},
}


class Net(nn.Module):
    """Has a branch and an attention layer that are not always used."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.words, self.chance = nn.Embedding(12, 8), chance
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.side, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(words)
        if self.chance.random() < 0.7:
            x = x + self.attention(x, x, x)[0]
        x = x.mean(1)
        if len(x) > 1:
            x = self.norm(x)
        if self.chance.random() < 0.5:
            x = x + torch.relu(self.side(x))
        answer: torch.Tensor = self.head(x)
        return answer


def train(chance: random.Random) -> None:
    model = Net(chance)
    optimizers = [
        torch.optim.AdamW(model.parameters(), 0.01),
        torch.optim.SGD(model.head.parameters(), 10.0),
    ]
    for _ in range(30):
        optimizer = chance.choice(optimizers)
        for _ in range(chance.randrange(4)):
            size = chance.choice([16, 16, 16, 16, 9, 3, 2, 1])
            words = torch.randint(12, (size, chance.randrange(1, 7)))
            answer = model(words)
            kind = chance.random()
            if kind < 0.5:
                loss = F.cross_entropy(answer, torch.randint(4, (size,)))
            elif kind < 0.8:
                loss = F.mse_loss(answer, torch.rand(size, 4))
            else:
                loss = F.binary_cross_entropy_with_logits(answer[:, 0], torch.ones(size))
            (loss * chance.choice([1.0, 1.0, 1.0, 1e4, float("inf")])).backward()
        if chance.random() < 0.3:
            model.side.requires_grad_(not model.side.weight.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
        if chance.random() < 0.2:
            model.eval()
            with torch.no_grad():
                model(torch.randint(12, (chance.choice([1, 5]), 3)))
            model.train()


@pytest.mark.parametrize("seed", shortened(range(12), tried=1))
def test_no_rule_fails_on_an_irregular_training(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(seed)
    with comgra.trace(SPEC, root=tmp_path, group="g", name="r"):
        train(random.Random(seed))
    run = comgra.open_run(tmp_path / "g" / "r")
    assert len(run.steps) > 10
    failed = [each for each in diagnose(run).unchecked if "failed" in each.reason]
    assert failed == []
    assert [line for line in caplog.messages if "is not asked again" in line] == []
