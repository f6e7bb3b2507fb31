# ruff: noqa: ARG005  (what is called by others takes what they give)
"""A small training as parts that a bug can change, and the loop that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Tensor, Tensor]


@dataclass
class Data:
    """Samples with their targets, and how they are cut into batches.

    Attributes:
        x: what the network is given, [n, ...].
        y: what it should answer, [n, ...].
        size: samples in a batch.
        shuffle: whether to shuffle each epoch; otherwise samples keep their order.
        prepare: what is done to a batch of the training.
        prepare_validation: what is done to the batch of an evaluation.
    """

    x: Tensor
    y: Tensor
    size: int = 32
    shuffle: bool = True
    prepare: Callable[[Tensor, Tensor], Pair] | None = None
    prepare_validation: Callable[[Tensor, Tensor], Pair] | None = None
    held_back: int = 128
    seed: int = 0

    def batch(self, number: int) -> Pair:
        """Returns the batch of a number."""
        count = len(self.x) - self.held_back
        per_epoch = count // self.size
        epoch, at = divmod(number, per_epoch)
        rows = torch.arange(at * self.size, (at + 1) * self.size)
        if self.shuffle:
            order = torch.Generator().manual_seed(1000 * self.seed + epoch)
            rows = torch.randperm(count, generator=order)[rows]
        x, y = self.x[rows], self.y[rows]
        return self.prepare(x, y) if self.prepare else (x, y)

    def validation(self) -> Pair:
        """Returns what is held back."""
        x, y = self.x[-self.held_back :], self.y[-self.held_back :]
        return self.prepare_validation(x, y) if self.prepare_validation else (x, y)


@dataclass
class Setup:
    """A training: `train` runs it.

    Attributes:
        model: what is trained.
        data: what it is trained on.
        loss: of answers and targets.
        optimizer: makes one of parameters.
        steps: optimizer steps.
        parts: batches of an optimizer step.
        clip: largest norm of all gradients, None without clipping.
        clear: at which steps gradients are cleared.
        cast: what a forward pass runs in.
        scale: the loss is multiplied by this, and gradients are divided by it.
        scaler: makes what scales the loss as mixed precision does, and skips steps.
        rate: multiplies the learning rate, by step.
        after_evaluation: what is done to the model after an evaluation, beside going on.
        back_to_training: whether an evaluation switches the model back.
        run: another loop than the usual one.
    """

    model: nn.Module
    data: Data
    loss: Loss
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    steps: int = 120
    parts: int = 1
    clip: float | None = None
    clear: Callable[[int], bool] = field(default=lambda step: True)
    cast: Callable[[], AbstractContextManager[object]] = nullcontext
    scale: float = 1.0
    scaler: Callable[[], torch.amp.GradScaler] | None = None
    rate: Callable[[int], float] | None = None
    handed: Callable[[nn.Module], Iterable[nn.Parameter]] | None = None
    back_to_training: bool = True
    run: Callable[[Setup, Callable[[str, float], None]], list[float]] | None = None


def train(setup: Setup, say: Callable[[str, float], None]) -> list[float]:
    """Trains; returns the losses. `say` gets the validation loss every twenty steps."""
    if setup.run is not None:
        return setup.run(setup, say)
    model = setup.model.train()
    chosen = setup.handed(model) if setup.handed else model.parameters()
    optimizer = setup.optimizer([p for p in chosen if p.requires_grad])
    base = [group["lr"] for group in optimizer.param_groups]
    scaler = setup.scaler() if setup.scaler else torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for step in range(setup.steps):
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * (setup.rate(step) if setup.rate else 1.0)
        losses.append(_step(setup, model, optimizer, scaler, step=step))
        if step % 20 == 19:
            say("val_loss", evaluate(setup))
    return losses


def _step(
    setup: Setup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    step: int,
) -> float:
    total = 0.0
    for part in range(setup.parts):
        x, y = setup.data.batch(step * setup.parts + part)
        with setup.cast():
            loss = setup.loss(model(x), y) / setup.parts
        scaler.scale(loss * setup.scale if setup.scale != 1 else loss).backward()
        total += loss.item()
    if setup.scale != 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= setup.scale
    if setup.clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
    scaler.step(optimizer)
    scaler.update()
    if setup.clear(step):
        optimizer.zero_grad()
    return total


def evaluate(setup: Setup) -> float:
    """Returns the loss of what is held back."""
    setup.model.eval()
    x, y = setup.data.validation()
    with torch.no_grad(), setup.cast():
        loss = setup.loss(setup.model(x), y)
    if setup.back_to_training:
        setup.model.train()
    return float(loss)
