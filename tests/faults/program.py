"""A short training run that uses everything that tracing attaches to."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import comgra_decl as comgra
from tests.ways.proof import FULL, Outcome, Told, outcome

SPEC = {
    **FULL,
    "nodes": {
        **FULL["nodes"],
        "calls": {"select": {"function": "torch.tanh"}, "capture": ["output", "output_grad"]},
        "named": {"select": {"annotation": "*"}, "capture": ["output", "output_grad"]},
    },
    "schedule": {"first": 3, "every": 2, "eval": {"every": 1}},
}


class Model(nn.Module):
    """Layers, some of which run again in backward, and one of which is native in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = comgra.node(self.drop(self.norm(self.stem(x))), "middle")
        for reentrant in (True, False) if self.training else ():
            x = checkpoint(self.again, x, use_reentrant=reentrant)
        return self.head(x.clone().mul_(0.5))


def training(_: Told, steps: int = 3) -> Outcome:
    """Trains with a gradient scaler, clipping, accumulation, evaluation and annotations."""
    model = Model()
    model.extra = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        for _part in range(2):
            loss = F.cross_entropy(model(torch.randn(4, 6)), torch.randint(3, (4,)))
            scaler.scale(loss * (float("inf") if number == 1 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        comgra.kpi("loss of this", loss)
        comgra.note("a step")
        losses.append(loss.item())
        if number % 2:
            comgra.tag("late")
            model.eval()
            with torch.no_grad():
                losses.append(model(torch.randn(4, 6)).sum().item())
            model.train()
    return outcome(losses, model, optimizers=[optimizer])
