"""Training runs with several phases, or based on another network."""

from __future__ import annotations

import math
from copy import deepcopy
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

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


def _pretrained(steps: int = 80) -> nn.Sequential:
    """Return a network that knows the classes of `blobs`, trained with hand-written updates."""
    net = mlp(12, 48, 48, 4)
    for _ in range(steps):
        x, y = blobs(64)
        grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), grads, strict=True):
                p.sub_(0.1 * g)
    return net


def distillation() -> Reached:
    """A small network learns from soft answers (temperature 4) and labels."""
    teacher, student = _pretrained().eval(), mlp(12, 16, 4)
    optimizer = adam(student, 5e-3)
    for _ in range(200):
        x, y = blobs(64)
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 4, dim=1)
        answer = student(x)
        loss = 16 * F.kl_div(F.log_softmax(answer / 4, dim=1), soft, reduction="batchmean")
        update(optimizer, 0.7 * loss + 0.3 * F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.8)


def low_rank_adapters() -> Reached:
    """Frozen layers with low-rank additions, whose second factor starts at zero."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(4, base.in_features) / math.sqrt(base.in_features))
            self.b = nn.Parameter(torch.zeros(base.out_features, 4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x)
            return out + (x @ self.a.T @ self.b.T) * 2.0

    net = _pretrained()
    for index, layer in enumerate(net):
        if isinstance(layer, nn.Linear):
            net[index] = Adapted(layer)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(200):
        x, y = blobs(64)
        answer = net(x)
        update(optimizer, F.cross_entropy(answer, (y + 1) % 4))
    return Reached(accuracy(answer, (y + 1) % 4), 0.8)


def frozen_backbone() -> Reached:
    """A frozen network with BatchNorm in evaluation mode, below a new head."""
    body = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    with torch.no_grad():
        for _ in range(20):
            body(pictures(64)[0])
    body.requires_grad_(False).eval()
    head = nn.Linear(64, 4)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(200):
        x, y = pictures(32)
        answer = head(body(x))
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.8)


def gradual_unfreezing() -> Reached:
    """First the head, then one more layer every 60 steps, with smaller rates for lower layers."""
    net = _pretrained()
    net[-1] = nn.Linear(48, 3)
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    for layer in layers[:-1]:
        layer.requires_grad_(False)
    groups = [
        {"params": [*layer.parameters()], "lr": 0.01 / 3**depth}
        for depth, layer in enumerate(reversed(layers))
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    for step in range(200):
        if step in (60, 120):
            layers[-1 - step // 60].requires_grad_(True)
        x, y = blobs(64)
        answer = net(x)
        update(optimizer, F.cross_entropy(answer, y % 3))
    return Reached(accuracy(answer, y % 3), 0.8)


def maml() -> Reached:
    """Second-order gradients through one inner step on sine waves."""
    net = mlp(1, 40, 40, 1)
    optimizer = adam(net, 2e-3)
    losses = []
    for _ in range(250):
        total = torch.zeros(())
        for _ in range(4):
            height, phase = 0.5 + 2 * torch.rand(1), 3 * torch.rand(1)
            x, x2 = 10 * torch.rand(10, 1) - 5, 10 * torch.rand(10, 1) - 5
            weights: dict[str, Tensor] = dict(net.named_parameters())
            loss = F.mse_loss(functional_call(net, weights, (x,)), height * (x + phase).sin())
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            fast = {k: w - 0.02 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
            total = total + F.mse_loss(
                functional_call(net, fast, (x2,)), height * (x2 + phase).sin()
            )
        losses.append(update(optimizer, total / 4))
    return Reached(sum(losses[:10]) - sum(losses[-50:]) / 5, 1.0)


def reptile() -> Reached:
    """Inner loops of SGD on a copy; the weights then move towards the copy."""
    net = mlp(1, 32, 32, 1, act=nn.Tanh)
    losses = []
    for _ in range(40):
        copy = deepcopy(net)
        optimizer = torch.optim.SGD(copy.parameters(), lr=0.02)
        height, phase = 0.5 + 2 * torch.rand(1), 1.5 * torch.rand(1)
        for _ in range(5):
            x = 6 * torch.rand(16, 1) - 3
            loss = update(optimizer, F.mse_loss(copy(x), height * (x + phase).sin()))
        losses.append(loss)
        with torch.no_grad():
            for p, q in zip(net.parameters(), copy.parameters(), strict=True):
                p.lerp_(q, 0.3)
    return Reached(sum(losses[:5]) - sum(losses[-5:]), 0.0)


def mean_teacher() -> Reached:
    """A few labels; for the other samples, agreement with an average of past weights."""
    net = mlp(12, 48, 48, 4)
    teacher = deepcopy(net).requires_grad_(False)
    x_few, y_few = blobs(16)
    optimizer = adam(net, 3e-3)
    for step in range(200):
        x, y = blobs(64)
        with torch.no_grad():
            wanted = F.softmax(teacher(x + 0.1 * torch.randn_like(x)), dim=1)
        agree = F.mse_loss(F.softmax(net(x + 0.1 * torch.randn_like(x)), dim=1), wanted)
        ramp = math.exp(-5 * (1 - min(1.0, step / 80)) ** 2)
        update(optimizer, F.cross_entropy(net(x_few), y_few) + 5 * ramp * agree)
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), net.parameters(), strict=True):
                p.lerp_(q, 0.02)
    return Reached(accuracy(teacher(x), y), 0.7)


class _Reverse(torch.autograd.Function):
    """The identity, with the sign of the gradient reversed."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


def domain_adversarial() -> Reached:
    """Features that distinguish classes but not domains, through gradient reversal."""
    body, classes, domains = mlp(12, 48, 32), nn.Linear(32, 4), mlp(32, 32, 2)
    optimizer = adam([*body.parameters(), *classes.parameters(), *domains.parameters()], 2e-3)
    shift = torch.randn(12)
    for _ in range(200):
        x, y = blobs(48)
        x2, y2 = blobs(48)
        h, h2 = body(x), body(x2 + shift)
        which = torch.cat([torch.zeros(48, dtype=torch.long), torch.ones(48, dtype=torch.long)])
        told = domains(_Reverse.apply(torch.cat([h, h2])))  # type: ignore[no-untyped-call]
        update(optimizer, F.cross_entropy(classes(h), y) + F.cross_entropy(told, which))
    return Reached(accuracy(classes(h2), y2), 0.6)


def layer_by_layer() -> Reached:
    """Each layer learns to reconstruct its input; then all layers are trained together."""
    sizes = [12, 32, 24, 16]
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    for depth, layer in enumerate(layers):
        back = nn.Linear(sizes[depth + 1], sizes[depth])
        optimizer = adam([*layer.parameters(), *back.parameters()], 5e-3)
        for _ in range(50):
            h = blobs(64)[0]
            with torch.no_grad():
                for below in layers[:depth]:
                    h = torch.sigmoid(below(h))
            update(optimizer, F.mse_loss(back(torch.sigmoid(layer(h))), h))
    net = nn.Sequential(
        *(part for layer in layers for part in (layer, nn.Sigmoid())), nn.Linear(16, 4)
    )
    optimizer = adam(net, 1e-2)
    for _ in range(120):
        x, y = blobs(64)
        answer = net(x)
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.8)


def tasks_one_after_another() -> Reached:
    """Three alternating regressions with replay; the loss jumps at each change."""
    net = mlp(8, 48, 48, 1)
    optimizer = adam(net, 3e-3)
    teachers = [mlp(8, 16, 1, act=nn.Tanh).requires_grad_(False) for _ in range(3)]
    memory: list[tuple[Tensor, Tensor]] = []
    for task, teacher in enumerate(teachers):
        for step in range(120):
            x = torch.randn(48, 8)
            x[:, 0] += 2.0 * task
            y = 3 * teacher(x) + task
            if memory:
                old = memory[step % len(memory)]
                update(optimizer, F.mse_loss(net(x), y) + 0.5 * F.mse_loss(net(old[0]), old[1]))
            else:
                update(optimizer, F.mse_loss(net(x), y))
        memory.append((x, y))
    return Reached(explained(net(x), y), 0.6)


def new_labels_midway() -> Reached:
    """A task switch: after 150 steps, the classes are permuted, and the network relearns them."""
    net = mlp(12, 64, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(300):
        x, y = blobs(64)
        y = y if step < 150 else (y + 1) % 4
        answer = net(x)
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.8)


def soft_prompts() -> Reached:
    """A frozen transformer with trained prompt vectors and a trained head."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).requires_grad_(False)
    words = nn.Embedding(20, 32).requires_grad_(False)
    prompt, head = nn.Parameter(0.5 * torch.randn(4, 32)), nn.Linear(32, 3)
    optimizer = torch.optim.AdamW([prompt, *head.parameters()], lr=1e-2)
    for _ in range(200):
        y = torch.randint(3, (32,))
        tokens = torch.randint(3, 20, (32, 8))
        tokens[:, :4] = y[:, None]
        h = body(torch.cat([prompt.expand(32, -1, -1), words(tokens)], 1))
        answer = head(h.mean(1))
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.8)


def pseudo_labels() -> Reached:
    """FixMatch: confident predictions on weak views are the labels for strong views."""
    net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    x_few, y_few = blobs(24)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for _ in range(200):
        x, y = blobs(96)
        with torch.no_grad():
            sure, guess = F.softmax(net(x + 0.1 * torch.randn_like(x)), dim=1).max(1)
        strong = net(x + 0.7 * torch.randn_like(x))
        each = F.cross_entropy(strong, guess, reduction="none") * (sure > 0.9)
        update(optimizer, F.cross_entropy(net(x_few), y_few) + each.mean())
    return Reached(accuracy(net(x), y), 0.7)
