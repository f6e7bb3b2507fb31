"""Training runs with unusual loops, schedules and optimizers."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from benchmarks.bugs.styles.common import (
    Reached,
    accuracy,
    adam,
    blobs,
    explained,
    mlp,
    pictures,
    update,
)


def _wave(x: Tensor) -> Tensor:
    return (2 * x[:, :1]).sin() + x[:, 1:2] * x[:, 2:3]


def curriculum_of_lengths() -> Reached:
    """Sums over sequences that grow from 4 to 24; the loss jumps at every change."""
    net, head = nn.GRU(1, 32, batch_first=True), nn.Linear(32, 1)
    optimizer = adam([*net.parameters(), *head.parameters()], 5e-3)
    for step in range(320):
        length = 4 * (1 + step // 54)
        x = torch.randn(32, length, 1)
        y = x.sum(1)
        answer = head(net(x)[0][:, -1])
        update(optimizer, F.mse_loss(answer, y), 1.0)
    return Reached(explained(answer, y), 0.6)


def curriculum_of_difficulty() -> Reached:
    """First easy samples without noise, then harder ones, then all."""
    net = mlp(12, 48, 4)
    optimizer = adam(net, 3e-3)
    for step in range(300):
        x, y = blobs(64)
        noise = (0.0, 0.8, 1.6)[step // 100]
        x = x * (1.5 if step < 100 else 1.0) + noise * torch.randn_like(x)
        answer = net(x)
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.6)


def one_cycle() -> Reached:
    """A rate that rises to 0.2 and falls to nothing, while momentum does the opposite."""
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 4),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=200)
    for _ in range(200):
        x, y = pictures(32)
        answer = net(x)
        update(optimizer, F.cross_entropy(answer, y))
        schedule.step()
    return Reached(accuracy(answer, y), 0.85)


def warm_restarts() -> Reached:
    """SGDR: the rate falls to nothing and jumps back to 0.3 every 60 steps."""
    net = mlp(6, 64, 64, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 60)
    for _ in range(360):
        x = torch.randn(64, 6)
        answer = net(x)
        update(optimizer, F.mse_loss(answer, _wave(x)))
        schedule.step()
    return Reached(explained(answer, _wave(x)), 0.6)


def cyclic_rate() -> Reached:
    """A triangular rate between 1e-4 and 1e-2 with period 80."""
    net = mlp(12, 48, 48, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    schedule = lr_scheduler.CyclicLR(optimizer, 1e-3, 0.1, step_size_up=40)
    for _ in range(320):
        x, y = blobs(32)
        answer = net(x)
        update(optimizer, F.cross_entropy(answer, y))
        schedule.step()
    return Reached(accuracy(answer, y), 0.8)


def plateau() -> Reached:
    """The rate falls when the validation loss stagnates; early stopping keeps the best weights."""
    net = mlp(6, 48, 48, 1)
    x, xv = torch.randn(256, 6), torch.randn(128, 6)
    y, yv = _wave(x) + 0.1 * torch.randn(256, 1), _wave(xv)
    optimizer = adam(net, 1e-2)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=3)
    best, kept = math.inf, deepcopy(net.state_dict())
    for _ in range(40):
        net.train()
        for rows in torch.randperm(256).split(32):
            update(optimizer, F.mse_loss(net(x[rows]), y[rows]))
        net.eval()
        with torch.no_grad():
            loss = float(F.mse_loss(net(xv), yv))
        schedule.step(loss)
        if loss < best:
            best, kept = loss, deepcopy(net.state_dict())
    net.load_state_dict(kept)
    return Reached(-best, -0.7)


def accumulation() -> Reached:
    """Eight micro-batches of four per step, the last one smaller."""
    net = nn.Sequential(nn.Linear(12, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    right = 0.0
    for _ in range(120):
        x, y = blobs(30)
        optimizer.zero_grad()
        for a, b in zip(x.split(4), y.split(4), strict=True):
            answer = net(a)
            (F.cross_entropy(answer, b, reduction="sum") / 30).backward()
        optimizer.step()
        right = accuracy(net(x), y)
    return Reached(right, 0.8)


def weight_averaging() -> Reached:
    """SWA with a constant high rate in the last third; then BatchNorm statistics are recomputed."""
    net = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(net)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 160)
    high = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1, anneal_epochs=10)
    for step in range(240):
        x, y = blobs(32)
        update(optimizer, F.cross_entropy(net(x), y))
        if step >= 160:
            average.update_parameters(net)
            high.step()
        else:
            cosine.step()
    with torch.no_grad():
        for _ in range(10):
            average(blobs(64)[0])
    average.eval()
    return Reached(accuracy(average(x), y), 0.8)


def half_precision() -> Reached:
    """A residual network with LayerNorm, in bfloat16 with autocast on the CPU."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.b(F.gelu(self.a(self.norm(x))))
            return out

    net = nn.Sequential(
        nn.Linear(12, 48), Block(), Block(), Block(), nn.LayerNorm(48), nn.Linear(48, 4)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(200):
        x, y = blobs(64)
        with torch.autocast("cpu", torch.bfloat16):
            answer = net(x)
            loss = F.cross_entropy(answer, y)
        update(optimizer, loss, 1.0)
    return Reached(accuracy(answer, y), 0.8)


def pure_bfloat16() -> Reached:
    """All weights and data in bfloat16, SGD with a high rate."""
    net = mlp(12, 64, 64, 4).to(torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(200):
        x, y = blobs(64)
        answer = net(x.to(torch.bfloat16))
        update(optimizer, F.cross_entropy(answer.float(), y))
    return Reached(accuracy(answer, y), 0.8)


def second_order() -> Reached:
    """L-BFGS with line search on one batch of a smooth problem."""
    net = mlp(3, 24, 24, 1, act=nn.Tanh)
    x = torch.randn(128, 3)
    y = _wave(x)
    optimizer = torch.optim.LBFGS(
        net.parameters(), lr=1.0, max_iter=8, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return float(loss)

    for _ in range(40):
        optimizer.step(closure)
    return Reached(explained(net(x), y), 0.95)


def sharpness_aware() -> Reached:
    """SAM: a step up, the gradient there, then a step down from the original point."""
    net = mlp(12, 48, 48, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(150):
        x, y = blobs(64)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
            norm = torch.stack([g.norm() for g in grads]).norm()
            for p, g in zip(net.parameters(), grads, strict=True):
                p.add_(0.05 * g / norm)
        answer = net(x)
        optimizer.zero_grad()
        F.cross_entropy(answer, y).backward()
        with torch.no_grad():
            for p, g in zip(net.parameters(), grads, strict=True):
                p.sub_(0.05 * g / norm)
        optimizer.step()
    return Reached(accuracy(answer, y), 0.8)


class _Orthogonal(torch.optim.Optimizer):
    """Momentum whose matrices are made nearly orthogonal (Muon), in five Newton-Schulz steps."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                move = momentum / (momentum.norm() + 1e-7)
                if p.ndim == 2:
                    for _ in range(5):
                        square = move @ move.T
                        move = 3.4445 * move + (-4.775 * square + 2.0315 * square @ square) @ move
                p.add_(move, alpha=-group["lr"])


def muon() -> Reached:
    """An optimizer defined by the program itself."""
    net = mlp(12, 48, 48, 4)
    optimizer = _Orthogonal(list(net.parameters()), 0.01)
    for _ in range(200):
        x, y = blobs(64)
        answer = net(x)
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.8)


def folds() -> Reached:
    """Four-fold cross-validation: four networks one after another."""
    x, y = blobs(256)
    scores = []
    for fold in range(4):
        out = torch.arange(256) % 4 == fold
        net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
        optimizer = adam(net, 1e-2)
        for _ in range(8):
            net.train()
            for rows in torch.nonzero(~out)[:, 0][torch.randperm(192)].split(24):
                update(optimizer, F.cross_entropy(net(x[rows]), y[rows]))
            net.eval()
            with torch.no_grad():
                score = accuracy(net(x[out]), y[out])
        scores.append(score)
    return Reached(sum(scores) / 4, 0.75)


def mixup() -> Reached:
    """Mixed samples, smoothed labels, dropout, a cosine schedule with warm-up."""
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(144, 96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, 4)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * s / 250))
    )
    for _ in range(250):
        x, y = pictures(48)
        share, other = float(torch.distributions.Beta(0.4, 0.4).sample()), torch.randperm(48)
        answer = net(share * x + (1 - share) * x[other])
        loss = share * F.cross_entropy(answer, y, label_smoothing=0.1) + (
            1 - share
        ) * F.cross_entropy(answer, y[other], label_smoothing=0.1)
        update(optimizer, loss)
        schedule.step()
    net.eval()
    return Reached(accuracy(net(x), y), 0.85)


def private_gradients() -> Reached:
    """Each sample's gradient is clipped, and noise is added to their sum."""
    net = mlp(12, 24, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    params = dict(net.named_parameters())

    def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net, weights, (x[None],)), y[None])

    each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
    for _ in range(150):
        x, y = blobs(64)
        grads = each({k: p.detach() for k, p in params.items()}, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        for name, p in params.items():
            g = grads[name] * (1 / norms.clamp(min=1)).view(-1, *[1] * p.ndim)
            p.grad = (g.sum(0) + 0.5 * torch.randn_like(p)) / 64
        optimizer.step()
    return Reached(accuracy(net(x), y), 0.75)


def two_optimizers() -> Reached:
    """Embeddings with Adagrad, the rest with AdamW, whose rate is 0 for the first 20 steps."""
    table, net = nn.Embedding(50, 16), mlp(32, 32, 1)
    one, two = (
        torch.optim.Adagrad(table.parameters(), lr=0.1),
        torch.optim.AdamW(net.parameters(), lr=5e-3),
    )
    schedule = lr_scheduler.LambdaLR(two, lambda s: max(0.0, min(1.0, (s - 20) / 20)))
    hidden = torch.randn(50)
    for _ in range(250):
        pair = torch.randint(50, (64, 2))
        y = (hidden[pair[:, 0]] > hidden[pair[:, 1]]).float()
        answer = net(table(pair).flatten(1))[:, 0]
        loss = F.binary_cross_entropy_with_logits(answer, y)
        one.zero_grad()
        update(two, loss, 1.0)
        one.step()
        schedule.step()
    return Reached(float(((answer > 0) == (y > 0)).float().mean()), 0.8)
