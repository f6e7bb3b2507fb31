"""Trainings written after the others had been used to mend rules."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

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


def attacked() -> Reached:
    """Adversarial training: two steps of projected gradients on the inputs."""
    net = mlp(12, 64, 64, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(150):
        x, y = blobs(64)
        worse = x + 0.1 * torch.randn_like(x)
        for _ in range(2):
            worse.requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(net(worse), y), worse)
            worse = (worse + 0.15 * slope.sign()).detach()
            worse = x + (worse - x).clamp(-0.3, 0.3)
        answer = net(worse)
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(net(x), y), 0.8)


def one_class() -> Reached:
    """Deep SVDD: all normal samples are pulled to a center; there are no biases."""
    net = nn.Sequential(nn.Linear(12, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    normal = torch.randn(4, 12)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-4)
    with torch.no_grad():
        center = net(torch.randn(256, 4) @ normal).mean(0)
        center[center.abs() < 0.1] = 0.1
    for _ in range(200):
        x = torch.randn(64, 4) @ normal
        update(optimizer, (net(x) - center).pow(2).sum(1).mean())
    near = (net(torch.randn(256, 4) @ normal) - center).norm(dim=1)
    far = (net(2 * torch.randn(256, 12)) - center).norm(dim=1)
    return Reached(float(far.median() / near.median()), 1.5)


def knowledge_graph() -> Reached:
    """TransE with a margin and normalized embeddings."""
    things, relations = nn.Embedding(60, 16), nn.Embedding(3, 16)
    optimizer = torch.optim.Adagrad([*things.parameters(), *relations.parameters()], lr=0.1)
    losses = []
    for _ in range(300):
        with torch.no_grad():
            things.weight.copy_(F.normalize(things.weight, dim=1))
        head, kind, wrong = (
            torch.randint(60, (128,)),
            torch.randint(3, (128,)),
            torch.randint(60, (128,)),
        )
        tail = (head + torch.tensor([1, 7, 20])[kind]) % 60
        start = things(head) + relations(kind)
        good, bad = (start - things(tail)).norm(dim=1), (start - things(wrong)).norm(dim=1)
        losses.append(update(optimizer, F.relu(0.5 + good - bad).mean()))
    return Reached(losses[0] - losses[-1], 0.2)


def click_rates() -> Reached:
    """A factorization machine beside a network, on categories with rare clicks."""
    table, first, net = nn.Embedding(200, 8), nn.Embedding(200, 1), mlp(40, 32, 1)
    nn.init.normal_(table.weight, std=0.01)
    nn.init.zeros_(first.weight)
    optimizer = adam([*table.parameters(), *first.parameters(), *net.parameters()], 5e-3)
    effect = torch.randn(200)
    losses = []
    for _ in range(300):
        x = torch.randint(40, (256, 5)) + 40 * torch.arange(5)
        y = torch.bernoulli(torch.sigmoid(effect[x].sum(1) - 2))
        v = table(x)
        pairs = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
        logit = first(x).sum((1, 2)) + pairs + net(v.flatten(1))[:, 0]
        losses.append(update(optimizer, F.binary_cross_entropy_with_logits(logit, y)))
    return Reached(losses[0] - sum(losses[-20:]) / 20, 0.15)


def carried_state() -> Reached:
    """A GRU over one long series, its state carried from step to step without gradients."""
    net, head = nn.GRU(2, 32, batch_first=True), nn.Linear(32, 2)
    optimizer = adam([*net.parameters(), *head.parameters()], 5e-3)
    state = torch.zeros(1, 16, 32)
    phase = 6 * torch.rand(16, 1)
    for step in range(250):
        time = 0.3 * (8 * step + torch.arange(9)) + phase
        series = torch.stack([time.sin(), (1.7 * time).cos()], 2) + 0.05 * torch.randn(16, 9, 2)
        out, state = net(series[:, :-1], state.detach())
        answer = head(out)
        update(optimizer, F.mse_loss(answer, series[:, 1:]), 1.0)
    return Reached(explained(answer, series[:, 1:]), 0.8)


def pruned() -> Reached:
    """Half of the weights are pruned after 100 steps, another quarter after 180."""
    net = mlp(12, 64, 64, 4)
    optimizer = adam(net, 3e-3)
    for step in range(260):
        if step in (100, 180):
            for layer in net:
                if isinstance(layer, nn.Linear):
                    prune.l1_unstructured(layer, "weight", amount=0.5)
            optimizer = adam(net, 3e-3)
        x, y = blobs(64)
        answer = net(x)
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.8)


def growing_network() -> Reached:
    """A residual block more every 70 steps, added to the optimizer; each starts as identity."""
    blocks = nn.ModuleList()
    into, out = nn.Linear(12, 32), nn.Linear(32, 4)
    optimizer = torch.optim.AdamW([*into.parameters(), *out.parameters()], lr=3e-3)
    for step in range(280):
        if step % 70 == 69:
            block = mlp(32, 64, 32)
            nn.init.zeros_(block[-1].weight)  # type: ignore[arg-type]
            blocks.append(block)
            optimizer.add_param_group({"params": [*block.parameters()]})
        x, y = blobs(64)
        h = into(x)
        for each in blocks:
            h = h + each(h)
        answer = out(F.relu(h))
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.8)


def checkpointed() -> Reached:
    """Activations computed again in the backward pass; dropout, stochastic depth."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48)
            )

        def forward(self, x: Tensor) -> Tensor:
            keep = (torch.rand(len(x), 1) < 0.9).float() / 0.9 if self.training else 1.0
            out: Tensor = x + keep * self.net(x)
            return out

    into, blocks, out = (
        nn.Linear(12, 48),
        nn.ModuleList(Block() for _ in range(4)),
        nn.Linear(48, 4),
    )
    model = nn.ModuleList([into, blocks, out])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(200):
        x, y = blobs(64)
        h = into(x)
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=False)
        answer = out(h)
        update(optimizer, F.cross_entropy(answer, y), 1.0)
    return Reached(accuracy(answer, y), 0.8)


def dilated() -> Reached:
    """A WaveNet: gated dilated causal convolutions, quantized values, skips."""

    class Layer(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.dilation = dilation
            self.both, self.mix = nn.Conv1d(16, 32, 2, dilation=dilation), nn.Conv1d(16, 32, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = self.both(F.pad(x, (self.dilation, 0))).chunk(2, 1)
            more, skip = self.mix(a.tanh() * b.sigmoid()).chunk(2, 1)
            return x + more, skip

    words, layers = nn.Embedding(32, 16), nn.ModuleList(Layer(2**i) for i in range(4))
    out = nn.Sequential(nn.ReLU(), nn.Conv1d(16, 32, 1))
    model = nn.ModuleList([words, layers, out])
    optimizer = adam(model, 5e-3)
    for _ in range(200):
        time = 0.4 * torch.arange(33)[None] + 6 * torch.rand(16, 1)
        level = ((time.sin() + 1) * 15.5).round().long()
        h, total = words(level[:, :-1]).transpose(1, 2), torch.zeros(16, 16, 32)
        for layer in layers:
            h, skip = layer(h)
            total = total + skip
        logits = out(total)
        update(optimizer, F.cross_entropy(logits, level[:, 1:]))
    return Reached(accuracy(logits.transpose(1, 2), level[:, 1:]), 0.3)


def cycle_consistent() -> Reached:
    """Two generators and two judges between two distributions, with a cycle loss of weight 10."""
    there, back = mlp(2, 32, 32, 2), mlp(2, 32, 32, 2)
    judges = nn.ModuleList([mlp(2, 32, 32, 1, act=lambda: nn.LeakyReLU(0.2)) for _ in range(2)])
    one = torch.optim.Adam([*there.parameters(), *back.parameters()], lr=1e-3, betas=(0.5, 0.999))
    two = torch.optim.Adam(judges.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for _ in range(200):
        a, b = torch.randn(64, 2), 0.5 * torch.randn(64, 2) + 2
        fake_b, fake_a = there(a), back(b)
        cycle = F.l1_loss(back(fake_b), a) + F.l1_loss(there(fake_a), b)
        game = (judges[1](fake_b) - 1).pow(2).mean() + (judges[0](fake_a) - 1).pow(2).mean()
        update(one, game + 10 * cycle)
        loss = torch.zeros(())
        for judge, real, fake in ((judges[0], a, fake_a), (judges[1], b, fake_b)):
            loss = loss + (judge(real) - 1).pow(2).mean() + judge(fake.detach()).pow(2).mean()
        update(two, loss / 2)
    return Reached(-float((fake_b.mean(0) - 2).abs().mean()), -0.8)


def offline_decisions() -> Reached:
    """A decision transformer: returns, states and actions as one sequence."""

    class Decisions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.returns, self.states, self.actions = (
                nn.Linear(1, 32),
                nn.Linear(2, 32),
                nn.Embedding(2, 32),
            )
            self.places = nn.Embedding(10, 32)
            layer = nn.TransformerEncoderLayer(
                32, 4, 64, dropout=0.1, batch_first=True, norm_first=True
            )
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(32, 2)

        def forward(self, r: Tensor, s: Tensor, a: Tensor) -> Tensor:
            place = self.places(torch.arange(s.shape[1]))
            rows = torch.stack(
                [self.returns(r) + place, self.states(s) + place, self.actions(a) + place], 2
            )
            mask = nn.Transformer.generate_square_subsequent_mask(rows.shape[1] * 3)
            out: Tensor = self.out(
                self.body(rows.flatten(1, 2), mask=mask, is_causal=True)[:, 1::3]
            )
            return out

    model = Decisions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    for _ in range(200):
        s = torch.randn(32, 10, 2)
        good = torch.rand(32, 10) < 0.8
        best = (s.sum(2) > 0).long()
        a = torch.where(good, best, 1 - best)
        r = (a == best).float().flip(1).cumsum(1).flip(1)[..., None] / 10
        logits = model(r, s, a)
        update(optimizer, F.cross_entropy(logits.flatten(0, 1), a.flatten()), 0.5)
    return Reached(accuracy(logits, best), 0.7)


def clustered() -> Reached:
    """Deep embedded clustering: an autoencoder first, then soft assignments are sharpened."""
    encoder, decoder = mlp(12, 32, 4), mlp(4, 32, 12)
    optimizer = adam([*encoder.parameters(), *decoder.parameters()], 5e-3)
    for _ in range(120):
        x, y = blobs(128)
        update(optimizer, F.mse_loss(decoder(encoder(x)), x))
    x, y = blobs(256)
    with torch.no_grad():
        z = encoder(x)
    centers = nn.Parameter(
        torch.stack([z[y == k].mean(0) for k in range(4)]) + 0.3 * torch.randn(4, 4)
    )
    second = torch.optim.SGD([*encoder.parameters(), centers], lr=0.05, momentum=0.9)
    for _ in range(100):
        x, y = blobs(256)
        soft = 1 / (1 + torch.cdist(encoder(x), centers).pow(2))
        soft = soft / soft.sum(1, keepdim=True)
        sharp = soft.detach().pow(2) / soft.detach().sum(0)
        sharp = sharp / sharp.sum(1, keepdim=True)
        update(second, F.kl_div(soft.log(), sharp, reduction="batchmean"))
    return Reached(accuracy(soft, y), 0.6)


def equilibrium() -> Reached:
    """An implicit layer: thirty iterations to a fixed point, gradients through the last one."""
    into, inner, out = nn.Linear(12, 32), nn.Linear(32, 32), nn.Linear(32, 4)
    nn.init.normal_(inner.weight, std=0.05)
    model = nn.ModuleList([into, inner, out])
    optimizer = adam(model, 3e-3)
    for _ in range(150):
        x, y = blobs(64)
        drive = into(x)
        z = torch.zeros_like(drive)
        with torch.no_grad():
            for _ in range(10):
                z = torch.tanh(inner(z) + drive)
        answer = out(torch.tanh(inner(z) + drive))
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.8)


def hypernetwork() -> Reached:
    """A network that makes the weights of another one for each task."""
    maker = mlp(2, 64, 49)
    optimizer = adam(maker, 2e-3)
    losses = []
    for _ in range(300):
        task = torch.rand(8, 2)
        weights = maker(task)
        x = 4 * torch.rand(8, 32, 1) - 2
        y = 2 * task[:, None, :1] * (x + 2 * task[:, None, 1:]).sin()
        a, b, c = weights[:, :16], weights[:, 16:32], weights[:, 32:48]
        h = torch.tanh(x * a[:, None] + b[:, None])
        answer = (h * c[:, None]).sum(2, keepdim=True) + weights[:, None, 48:]
        losses.append(update(optimizer, F.mse_loss(answer, y)))
    return Reached(explained(answer, y), 0.6)


def many_labels() -> Reached:
    """Twenty labels that are rarely given, with asymmetric focusing."""
    net, weight = mlp(16, 64, 20), torch.randn(16, 20)
    optimizer = adam(net, 3e-3)
    for _ in range(250):
        x = torch.randn(96, 16)
        y = ((x @ weight) / 4 > 1.4).float()
        logit = net(x)
        p = logit.sigmoid()
        each = -y * F.logsigmoid(logit) - (1 - y) * p.pow(2) * F.logsigmoid(-logit)
        update(optimizer, each.sum(1).mean())
    right = ((logit > 0) == (y > 0)).float()
    return Reached(float(right[y > 0].mean()), 0.6)


def bags() -> Reached:
    """Multiple instances: attention pools bags of different sizes, one label per bag."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.v, self.u = mlp(12, 32, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.score, self.out = nn.Linear(16, 1), nn.Linear(16, 1)

        def forward(self, x: Tensor, there: Tensor) -> Tensor:
            h = self.body(x)
            score = self.score(self.v(h).tanh() * self.u(h).sigmoid())[..., 0]
            weight = score.masked_fill(~there, -1e9).softmax(1)
            out: Tensor = self.out((weight[..., None] * h).sum(1))
            return out.squeeze(1)

    model, sign = Bags(), F.normalize(torch.randn(12), dim=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        there = torch.arange(10)[None] < torch.randint(4, 11, (32, 1))
        y = torch.randint(2, (32,)).float()
        x = torch.randn(32, 10, 12)
        x[:, 0] += 4 * y[:, None] * sign
        answer = model(x * there[..., None], there)
        update(optimizer, F.binary_cross_entropy_with_logits(answer, y))
    return Reached(float(((answer > 0) == (y > 0)).float().mean()), 0.8)


def denoised() -> Reached:
    """Pictures without noise: GroupNorm, strided convolutions, skips, a Charbonnier loss."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
            self.middle = nn.Sequential(
                nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1)
            )
            self.up, self.out = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(16, 1, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            a = F.silu(self.a(x))
            b = self.b(a)
            out: Tensor = x - self.out(a + F.silu(self.up(b + self.middle(b))))
            return out

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    clean = F.interpolate(torch.rand(6, 1, 4, 4), size=(16, 16), mode="bilinear")
    for _ in range(150):
        y = clean[torch.randint(6, (16,))]
        x = y + 0.3 * torch.randn_like(y)
        answer = model(x)
        update(optimizer, ((answer - y).pow(2) + 1e-6).sqrt().mean())
    return Reached(explained(answer, y), 0.7)


def temperature_afterwards() -> Reached:
    """Training with early stopping, then one number is fitted by L-BFGS on held-out data."""
    net = mlp(12, 96, 96, 4)
    x, y = blobs(256)
    held, labels = blobs(256)
    optimizer = adam(net, 5e-3)
    best, kept = math.inf, deepcopy(net.state_dict())
    for _ in range(12):
        for rows in torch.randperm(256).split(32):
            update(optimizer, F.cross_entropy(net(x[rows]), y[rows]))
        with torch.no_grad():
            loss = float(F.cross_entropy(net(held), labels))
        if loss < best:
            best, kept = loss, deepcopy(net.state_dict())
    net.load_state_dict(kept)
    log_temperature = nn.Parameter(torch.zeros(1))
    with torch.no_grad():
        logits = net(held)
    second = torch.optim.LBFGS([log_temperature], lr=0.1, max_iter=30)

    def closure() -> float:
        second.zero_grad()
        loss = F.cross_entropy(logits / log_temperature.exp(), labels)
        loss.backward()
        return float(loss)

    second.step(closure)
    return Reached(accuracy(logits, labels), 0.8)


def noisy_labels() -> Reached:
    """A third of the labels is wrong; two networks choose small losses for each other."""
    nets = [mlp(12, 64, 4), mlp(12, 64, 4)]
    optimizers = [adam(net, 3e-3) for net in nets]
    for step in range(200):
        x, truth = blobs(96)
        y = torch.where(torch.rand(96) < 0.33, torch.randint(4, (96,)), truth)
        answers = [net(x) for net in nets]
        keep = int(96 * (1 - 0.3 * min(1.0, step / 60)))
        easy = [F.cross_entropy(a.detach(), y, reduction="none").argsort()[:keep] for a in answers]
        for index in range(2):
            rows = easy[1 - index]
            update(optimizers[index], F.cross_entropy(answers[index][rows], y[rows]))
    return Reached(accuracy(answers[0], truth), 0.75)


def patches() -> Reached:
    """A small vision transformer with a class token, cut-out and a cosine schedule."""

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.token = nn.Conv2d(1, 32, 3, 3), nn.Parameter(torch.zeros(1, 1, 32))
            self.place = nn.Parameter(0.02 * torch.randn(1, 17, 32))
            layer = nn.TransformerEncoderLayer(
                32, 4, 64, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
            )
            self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.patch(x).flatten(2).transpose(1, 2)
            h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.place
            out: Tensor = self.head(self.norm(self.body(h)[:, 0]))
            return out

    model = Vision()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _ in range(200):
        x, y = pictures(32)
        x[:, :, 3:6, 3:6] = 0
        answer = model(x)
        update(optimizer, F.cross_entropy(answer, y, label_smoothing=0.1), 1.0)
        schedule.step()
    return Reached(accuracy(answer, y), 0.85)
