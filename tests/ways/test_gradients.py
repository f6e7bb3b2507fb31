"""What happens between backward and the optimizer step, and repeated forward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.support.shortened import combined
from tests.ways.models import Net, batches
from tests.ways.proof import Outcome, Told, known, outcome, prove


def test_accumulated_gradients() -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for number, (x, y) in enumerate(batches(9)):
            output = model(x)
            told("head", output, iteration=number % 3)
            told.gradient("head", output, iteration=number % 3)
            loss = F.cross_entropy(output, y) / 3
            loss.backward()
            losses.append(loss.item())
            if number % 3 == 2:
                told.parameters(model)
                optimizer.step()
                optimizer.zero_grad()
                told.end()
        return outcome(losses, model, optimizers=[optimizer])

    prove(training)


CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "foreach norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "value": lambda p: nn.utils.clip_grad_value_(p, 0.01),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_gradients_before_and_after_clipping(clip: str) -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x, y in batches(4):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            told.parameters(model, "grad:raw")
            before = model.head.weight.grad.clone()  # type: ignore[union-attr]
            CLIPS[clip](model.parameters())
            assert not torch.equal(before, model.head.weight.grad)  # type: ignore[arg-type]
            told.parameters(model)
            optimizer.step()
            told.end()
            losses.append(loss.item())
        return outcome(losses, model)

    prove(training)


class Deep(nn.Module):
    """Blocks with random numbers, run through a checkpoint or not; one of them is called twice."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(torch.tanh(self.twice(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in (*self.blocks, self.inner, self.inner):
            if self.mode == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return self.head(x)


def deep(told: Told, mode: str, batch_count: int = 1) -> Outcome:
    model = Deep(mode)
    names = ["stem", *(f"blocks.{b}.{i}" for b in range(3) for i in range(3)), "twice"]
    # with a rate of 0, because checkpoints add gradients in another order and round differently
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    losses = []
    for _ in range(3):
        if mode == "plain":
            told.modules(model, *names)
        optimizer.zero_grad()
        for x, y in batches(batch_count):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
        told.parameters(model, "forward")
        optimizer.step()
        told.end()
    return outcome(losses, model, optimizers=[optimizer])


@pytest.mark.parametrize(
    ("mode", "batch_count"), combined(["reentrant", "without reentry"], [1, 2], rounds=1)
)
def test_a_recomputed_forward_pass_is_none_and_its_gradients_are_recorded(
    mode: str, batch_count: int
) -> None:
    """The record with checkpoints equals what the model without checkpoints sees."""
    traced = prove(
        lambda told: deep(told, mode, batch_count),
        truth=lambda told: deep(told, "plain", batch_count),
    )
    assert not [
        name for name in known(traced) if name.startswith(f"blocks.0.0 output {batch_count}")
    ]


def test_checkpointed_sequences() -> None:
    def training(told: Told, *, checkpointed: bool = True) -> Outcome:
        model = nn.Sequential(
            nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x, y in batches(3):
            if checkpointed:
                output = checkpoint_sequential(model, 2, x, use_reentrant=False)
            else:
                hidden = model[0](x)
                told("0", hidden)
                told.gradient("0", hidden)
                output = model[1:](hidden)
            loss = F.cross_entropy(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.end()
            losses.append(loss.item())
        return outcome(losses, model)

    prove(training, truth=lambda told: training(told, checkpointed=False))


def test_hooks_of_the_programs_own() -> None:
    """Our hooks run after them: the record contains what the program continues with."""

    def training(told: Told) -> Outcome:
        model = Net()
        model.stem.register_forward_hook(lambda _m, _a, out: out * 2)
        model.head.register_forward_pre_hook(lambda _m, args: (args[0] + 1,))

        def halve(_m: nn.Module, grads: Any, _o: Any) -> Any:
            return (grads[0] * 0.5,)

        model.head.register_full_backward_hook(halve)
        model.norm.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        losses = []
        for x, y in batches(4):
            output = model(x)
            told("head", output)
            told("Net", output)
            loss = F.cross_entropy(output, y)
            optimizer.zero_grad()
            loss.backward()
            told.parameters(model)
            optimizer.step()
            told.end()
            losses.append(loss.item())
        return outcome(losses, model)

    prove(training)
