# ruff: noqa: ARG005  (callbacks take the arguments of their callers)
"""A small training run, divided into parts that a bug can change, and the loop that runs it."""

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
    """Samples with their targets, and how they are divided into batches.

    Attributes:
        x: inputs, [n, ...].
        y: targets, [n, ...].
        size: samples per batch.
        shuffle: whether to shuffle each epoch; otherwise samples keep their order.
        prepare: transformation of a training batch.
        prepare_validation: transformation of the evaluation batch.
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
        """Return batch `number`, counted over all epochs."""
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
        """Return the held-out samples."""
        x, y = self.x[-self.held_back :], self.y[-self.held_back :]
        return self.prepare_validation(x, y) if self.prepare_validation else (x, y)


@dataclass
class Setup:
    """A training run, which `train` starts.

    Attributes:
        model: the model.
        data: the data.
        loss: computes the loss from outputs and targets.
        optimizer: creates an optimizer for parameters.
        steps: number of optimizer steps.
        parts: batches per optimizer step.
        clip: largest norm of all gradients, None without clipping.
        clear: whether to clear the gradients after a step.
        cast: creates the context of a forward pass.
        scale: factor for the loss, by which gradients are divided.
        scaler: creates a gradient scaler, which may skip steps.
        rate: factor for the learning rate, by step.
        handed: selects the parameters for the optimizer; None for all.
        back_to_training: whether the model returns to training mode after an evaluation.
        run: replaces the default loop.
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


def train(setup: Setup, log: Callable[[str, float], None]) -> list[float]:
    """Train and return the losses; `log` receives the validation loss every twenty steps."""
    if setup.run is not None:
        return setup.run(setup, log)
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
            log("val_loss", evaluate(setup))
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
    """Return the loss of the held-out samples."""
    setup.model.eval()
    x, y = setup.data.validation()
    with torch.no_grad(), setup.cast():
        loss = setup.loss(setup.model(x), y)
    if setup.back_to_training:
        setup.model.train()
    return float(loss)
