"""The targets of sequence models are recorded by sample, however a program cuts and passes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.traced import traced

BATCH, LENGTH, WORDS = 96, 21, 7
NODES = {"all": {"select": "**", "capture": ["output"], "values": True}}

Batches = Callable[[Tensor], tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(tokens))
        return out


def loaded(text: Tensor) -> tuple[Tensor, Tensor]:
    data = TensorDataset(text[:, :-1], text[:, 1:])
    x, y = next(iter(DataLoader(data, batch_size=len(text))))
    return x, y


BATCHES: dict[str, Batches] = {
    "slices": lambda text: (text[:, :-1], text[:, 1:]),
    "copies": lambda text: (text[:, :-1].clone(), text[:, 1:].clone()),
    "narrowed": lambda text: (text.narrow(1, 0, LENGTH - 1), text.narrow(1, 1, LENGTH - 1)),
    "indexed": lambda text: (text[torch.arange(BATCH), :-1], text[torch.arange(BATCH), 1:]),
    "windows": lambda text: (text.unfold(1, 20, 1)[:, 0], text.unfold(1, 20, 1)[:, 1]),
    "rolled": lambda text: (text[:, 1:], text.roll(-1, 1)[:, 1:]),
    "stacked": lambda text: (torch.stack([*text[:, :-1]]), torch.stack([*text[:, 1:]])),
    "loaded": loaded,
    "small integers": lambda text: (text[:, :-1].int(), text[:, 1:]),
}

LOSSES: dict[str, Loss] = {
    "flat": lambda out, y: F.cross_entropy(out.reshape(-1, WORDS), y.reshape(-1)),
    "flattened": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    "viewed": lambda out, y: F.cross_entropy(out.view(-1, WORDS), y.contiguous().view(-1)),
    "by position": lambda out, y: F.cross_entropy(out.transpose(1, 2), y),
    "module": lambda out, y: nn.CrossEntropyLoss(ignore_index=-1)(out.mT, y),
    "likelihood": lambda out, y: F.nll_loss(out.log_softmax(-1).flatten(0, 1), y.reshape(-1)),
    "gathered": lambda out, y: -out.log_softmax(-1).gather(-1, y[..., None]).mean(),
    "distribution": lambda out, y: -torch.distributions.Categorical(logits=out).log_prob(y).mean(),
    "converted": lambda out, y: F.cross_entropy(out.mT, y.long().to(out.device)),
}


def recorded(root: Path, batch_of: Batches, loss_of: Loss) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets and their recorded samples."""
    torch.manual_seed(0)
    text = torch.randint(0, WORDS, (BATCH, LENGTH))
    model, wanted = Speaker(), []

    def training() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            x, y = batch_of(text)
            wanted.append(y.clone().numpy())
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

    run = traced(root, NODES, training)
    return wanted[-1], run.slot("target", role="target").value(1)


@pytest.mark.parametrize("form", BATCHES)
def test_wherever_inputs_and_targets_come_from(form: str, tmp_path: Path) -> None:
    wanted, stored = recorded(tmp_path, BATCHES[form], LOSSES["flat"])
    np.testing.assert_array_equal(stored, wanted[: len(stored)])
    assert len(stored) == 8


@pytest.mark.parametrize("form", LOSSES)
def test_whatever_the_loss_makes_of_them(form: str, tmp_path: Path) -> None:
    wanted, stored = recorded(tmp_path, BATCHES["slices"], LOSSES[form])
    assert len(stored) == 8
    np.testing.assert_array_equal(stored.reshape(8, -1), wanted[:8])
