"""Many kinds of data, of layers and of losses."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn

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


def table_with_gaps() -> Reached:
    """Missing numbers filled by 0 beside an indicator, categories as embeddings."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(n, 4) for n in (7, 30))
            self.net = nn.Sequential(
                nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
            )

        def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
            missing = numbers.isnan()
            parts = [table(kinds[:, i]) for i, table in enumerate(self.tables)]
            full = torch.cat([numbers.nan_to_num(0.0), missing.float(), *parts], 1)
            out: Tensor = self.net(full)
            return out.squeeze(1)

    model = Table()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    weight, effect = torch.randn(8), torch.randn(30)
    for _ in range(250):
        numbers, kinds = (
            torch.randn(64, 8),
            torch.stack([torch.randint(7, (64,)), torch.randint(30, (64,))], 1),
        )
        y = numbers @ weight + 2 * effect[kinds[:, 1]]
        numbers[torch.rand(64, 8) < 0.15] = float("nan")
        answer = model(numbers, kinds)
        update(optimizer, F.mse_loss(answer, y))
    return Reached(explained(answer, y), 0.5)


def prices() -> Reached:
    """Targets around 1e4, standardized in the program; Huber loss."""
    net, weight = mlp(8, 64, 1), torch.randn(8)
    x = torch.randn(512, 8)
    y = 1e4 * (x @ weight + 3).abs()
    mean, std = y.mean(), y.std()
    optimizer = adam(net, 5e-3)
    for step in range(250):
        rows = torch.arange(64) + 64 * (step % 8)
        answer = net(x[rows])[:, 0]
        update(optimizer, F.huber_loss(answer, (y[rows] - mean) / std))
    return Reached(explained(answer * std + mean, y[rows]), 0.6)


def large_targets() -> Reached:
    """Targets in the thousands, taken as they are; the last bias starts at their mean."""
    net, weight = mlp(8, 64, 64, 1), torch.randn(8)
    with torch.no_grad():
        net[-1].bias.fill_(2000.0)  # type: ignore[operator]
    optimizer = adam(net, 1e-2)
    for _ in range(300):
        x = torch.randn(64, 8)
        y = 2000 + 300 * (x @ weight)
        answer = net(x)[:, 0]
        update(optimizer, F.l1_loss(answer, y))
    return Reached(explained(answer, y), 0.6)


def one_in_fifty() -> Reached:
    """Rare positives with a weight of 50 and a bias that starts at their log odds."""
    net, direction = mlp(10, 48, 1), F.normalize(torch.randn(10), dim=0)
    with torch.no_grad():
        net[-1].bias.fill_(-math.log(49))  # type: ignore[operator]
    optimizer = adam(net, 3e-3)
    for _ in range(300):
        y = (torch.rand(256) < 0.02).float()
        x = torch.randn(256, 10) + 3 * y[:, None] * direction
        answer = net(x)[:, 0]
        update(
            optimizer, F.binary_cross_entropy_with_logits(answer, y, pos_weight=torch.tensor(50.0))
        )
    high = ((answer > 0) == (y > 0)).float()
    return Reached(
        float(high[y == 0].mean())
        if (y == 0).all()
        else float(high[y == 1].mean() + high[y == 0].mean()) / 2,
        0.75,
    )


def focal() -> Reached:
    """Focal loss on rare classes."""
    net = mlp(12, 64, 4)
    optimizer = adam(net, 3e-3)
    for _ in range(300):
        x, y = blobs(256)
        keep = (y == 0) | (torch.rand(256) < 0.1)
        x, y = x[keep], y[keep]
        answer = net(x)
        each = F.cross_entropy(answer, y, reduction="none")
        update(optimizer, ((1 - (-each).exp()).pow(2) * each).mean())
    return Reached(accuracy(answer, y), 0.8)


class _Convolution(nn.Module):
    """A graph convolution over a dense normalized adjacency."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.linear = nn.Linear(a, b, bias=False)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        out: Tensor = adjacency @ self.linear(x)
        return out


def citation_graph() -> Reached:
    """A graph convolution network, full batch, few labels, dropout 0.5, weight decay."""
    y = torch.arange(120) % 3
    near = torch.rand(120, 120) < torch.where(y[:, None] == y[None], 0.12, 0.01)
    adjacency = (near | near.T | torch.eye(120, dtype=torch.bool)).float()
    scale = adjacency.sum(1).rsqrt()
    adjacency = scale[:, None] * adjacency * scale[None]
    x = (torch.rand(120, 40) < 0.05).float() + 0.3 * F.one_hot(y, 40)
    x = x / x.sum(1, keepdim=True).clamp(min=1)
    one, two = _Convolution(40, 16), _Convolution(16, 3)
    optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()], lr=0.01, weight_decay=5e-4)
    labelled = torch.arange(30)
    for _ in range(200):
        h = F.dropout(F.relu(one(F.dropout(x, 0.5), adjacency)), 0.5)
        answer = two(h, adjacency)
        update(optimizer, F.cross_entropy(answer[labelled], y[labelled]))
    return Reached(accuracy(two(F.relu(one(x, adjacency)), adjacency)[30:], y[30:]), 0.8)


def message_passing() -> Reached:
    """Many small graphs of different sizes in a batch; sums over edges by index_add."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.rounds = (
                nn.Linear(4, 32),
                nn.ModuleList(mlp(32, 64, 32) for _ in range(3)),
            )
            self.out = nn.Linear(32, 1)

        def forward(self, x: Tensor, edges: Tensor, graph: Tensor, count: int) -> Tensor:
            h = self.into(x)
            for layer in self.rounds:
                h = h + layer(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))
                h = F.layer_norm(h, (32,))
            total = torch.zeros(count, 32).index_add(0, graph, h)
            out: Tensor = self.out(total)
            return out.squeeze(1)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(200):
        sizes = torch.randint(4, 9, (24,)).tolist()
        graph = torch.repeat_interleave(torch.arange(24), torch.tensor(sizes))
        x = torch.randn(len(graph), 4)
        starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        edges = torch.cat(
            [a + torch.randint(b - a, (2, 2 * (b - a))) for a, b in pairwise(starts)], 1
        )
        y = torch.zeros(24).index_add(0, graph, x[:, 0].relu()) - 1.5
        answer = model(x, edges, graph, 24)
        update(optimizer, F.mse_loss(answer, y))
    return Reached(explained(answer, y), 0.6)


def experts() -> Reached:
    """Top-2 of six experts with noise and a balancing loss."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.gate = nn.Linear(12, 32), nn.Linear(32, 6, bias=False)
            self.experts = nn.ModuleList(mlp(32, 48, 32) for _ in range(6))
            self.out = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.relu(self.into(x))
            scores = self.gate(h) + 0.1 * torch.randn(len(h), 6)
            chance = scores.softmax(1)
            weight, chosen = chance.topk(2)
            weight = weight / weight.sum(1, keepdim=True)
            mixed = torch.zeros_like(h)
            for index, expert in enumerate(self.experts):
                row, rank = torch.where(chosen == index)
                if len(row):
                    mixed = mixed.index_add(0, row, weight[row, rank, None] * expert(h[row]))
            load = F.one_hot(chosen, 6).sum(1).float().mean(0) / 2
            return self.out(h + mixed), 6 * (load * chance.mean(0)).sum()

    model = Experts()
    optimizer = adam(model, 3e-3)
    for _ in range(200):
        x, y = blobs(64)
        answer, balance = model(x)
        update(optimizer, F.cross_entropy(answer, y) + 0.01 * balance)
    return Reached(accuracy(answer, y), 0.8)


def state_space() -> Reached:
    """A diagonal state space layer with learned steps, as a convolution; gated, residual."""

    class Layer(nn.Module):
        def __init__(self, size: int, states: int = 8) -> None:
            super().__init__()
            self.log_a = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(size, 1))
            self.log_step = nn.Parameter(torch.empty(size).uniform_(math.log(1e-3), math.log(1e-1)))
            self.c, self.d = (
                nn.Parameter(torch.randn(size, states) / 8),
                nn.Parameter(torch.ones(size)),
            )
            self.gate, self.norm = nn.Linear(size, 2 * size), nn.LayerNorm(size)

        def forward(self, x: Tensor) -> Tensor:
            u, length = self.norm(x), x.shape[1]
            step = self.log_step.exp()[:, None]
            decay = -self.log_a.exp() * step
            powers = torch.exp(decay[..., None] * torch.arange(length))
            kernel = torch.einsum("hn,hnl->hl", self.c * step, powers)
            spectrum = torch.fft.rfft(u.transpose(1, 2), 2 * length) * torch.fft.rfft(
                kernel, 2 * length
            )
            y = torch.fft.irfft(spectrum, 2 * length)[..., :length].transpose(1, 2) + self.d * u
            a, b = self.gate(F.gelu(y)).chunk(2, -1)
            out: Tensor = x + a * b.sigmoid()
            return out

    model = nn.Sequential(nn.Linear(1, 24), Layer(24), Layer(24), nn.Linear(24, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(200):
        x = torch.randn(24, 48, 1)
        y = x.cumsum(1) / 4
        answer = model(x)
        update(optimizer, F.mse_loss(answer, y), 1.0)
    return Reached(explained(answer, y), 0.5)


def heat_equation() -> Reached:
    """A physics-informed network: the residual of an equation, and its boundary with weight 10."""
    net = mlp(2, 32, 32, 32, 1, act=nn.Tanh)
    optimizer = adam(net, 3e-3)
    losses = []
    for _ in range(300):
        x, t = torch.rand(128, 1, requires_grad=True), torch.rand(128, 1, requires_grad=True)
        u = net(torch.cat([x, t], 1))
        ux, ut = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (uxx,) = torch.autograd.grad(ux.sum(), x, create_graph=True)
        residual = (ut - 0.05 * uxx).pow(2).mean()
        x0 = torch.rand(64, 1)
        start = (net(torch.cat([x0, torch.zeros(64, 1)], 1)) - (math.pi * x0).sin()).pow(2).mean()
        edge = torch.randint(2, (64, 1)).float()
        sides = net(torch.cat([edge, torch.rand(64, 1)], 1)).pow(2).mean()
        losses.append(update(optimizer, residual + 10 * (start + sides)))
    return Reached(losses[0] / losses[-1], 10)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).round().clamp(-8, 7) * scale

    @staticmethod
    def backward(_: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _quantized(x: Tensor) -> Tensor:
    out: Tensor = _Quantize.apply(x, x.detach().abs().max() / 7)  # type: ignore[no-untyped-call]
    return out


def quantized() -> Reached:
    """Weights and activations of four bits in the forward pass, full gradients."""

    class Quantized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(_quantized(x), _quantized(self.weight), self.bias)

    net = nn.Sequential(
        Quantized(12, 48), nn.ReLU6(), Quantized(48, 48), nn.ReLU6(), Quantized(48, 4)
    )
    optimizer = adam(net, 3e-3)
    for _ in range(250):
        x, y = blobs(64)
        answer = net(x)
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.8)


def speech() -> Reached:
    """CTC over sequences of different lengths; blanks win for a while."""
    net, head = nn.LSTM(8, 48, bidirectional=True, batch_first=True), nn.Linear(96, 6)
    optimizer = adam([*net.parameters(), *head.parameters()], 1e-2)
    code = torch.randn(6, 8)
    losses = []
    for _ in range(250):
        sizes = torch.randint(3, 6, (16,))
        labels = [torch.randint(1, 6, (int(n),)) for n in sizes]
        frames = [code[y.repeat_interleave(4)] + 0.3 * torch.randn(4 * len(y), 8) for y in labels]
        x = rnn.pad_sequence(frames, batch_first=True)
        logs = head(net(x)[0]).log_softmax(-1).transpose(0, 1)
        losses.append(update(optimizer, F.ctc_loss(logs, torch.cat(labels), 4 * sizes, sizes), 5.0))
    return Reached(-losses[-1], -1.0)


def chain_of_labels() -> Reached:
    """A conditional random field over an LSTM: learned transitions, the forward algorithm."""
    words, net, head = nn.Embedding(30, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 4)
    moves = nn.Parameter(torch.zeros(4, 4))
    optimizer = adam([*words.parameters(), *net.parameters(), *head.parameters(), moves], 1e-2)
    for _ in range(200):
        x = torch.randint(30, (24, 10))
        y = x % 4
        y[:, 1:] = torch.where(torch.rand(24, 9) < 0.3, y[:, :-1], y[:, 1:])
        score = head(net(words(x))[0])
        total = score[:, 0]
        for t in range(1, 10):
            total = torch.logsumexp(total[:, :, None] + moves[None], 1) + score[:, t]
        right = score.gather(2, y[..., None]).sum((1, 2)) + moves[y[:, :-1], y[:, 1:]].sum(1)
        update(optimizer, (torch.logsumexp(total, 1) - right).mean(), 5.0)
    return Reached(accuracy(score, y), 0.6)


def segmentation() -> Reached:
    """A small U-Net; a tenth of the pixels has no label (255); dice is added."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(4, 12), nn.ReLU()
            )
            self.deep = nn.Sequential(
                nn.MaxPool2d(2),
                nn.Conv2d(12, 24, 3, padding=1),
                nn.GroupNorm(4, 24),
                nn.ReLU(),
                nn.Upsample(scale_factor=2),
            )
            self.up = nn.Conv2d(36, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.down(x)
            out: Tensor = self.up(torch.cat([h, self.deep(h)], 1))
            return out

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
    for _ in range(150):
        center, radius = 4 + 8 * torch.rand(12, 2, 1, 1), 2 + 3 * torch.rand(12, 1, 1)
        far = (grid - center).norm(dim=1)
        y = (far < radius).long() + (far < radius / 2).long()
        x = y[:, None].float() + 0.4 * torch.randn(12, 1, 16, 16)
        given = torch.where(torch.rand(y.shape) < 0.1, 255, y)
        answer = model(x)
        chance = answer.softmax(1)
        hot = F.one_hot(y, 3).permute(0, 3, 1, 2)
        dice = 1 - (2 * (chance * hot).sum((0, 2, 3)) + 1) / ((chance + hot).sum((0, 2, 3)) + 1)
        update(optimizer, F.cross_entropy(answer, given, ignore_index=255) + dice.mean())
    return Reached(accuracy(answer.permute(0, 2, 3, 1), y), 0.85)


def packed_sequences() -> Reached:
    """A language model on documents packed into rows, with a mask of blocks and positions anew."""

    class Block(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
            self.a, self.b = nn.LayerNorm(size), nn.LayerNorm(size)
            self.net = nn.Sequential(
                nn.Linear(size, 3 * size), nn.GELU(), nn.Linear(3 * size, size)
            )

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            q, k, v = self.qkv(self.a(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
            x = x + self.out(h.transpose(1, 2).flatten(2))
            out: Tensor = x + self.net(self.b(x))
            return out

    words, places = nn.Embedding(24, 32), nn.Embedding(32, 32)
    blocks, norm = nn.ModuleList(Block(32) for _ in range(2)), nn.LayerNorm(32)
    model = nn.ModuleList([words, places, blocks, norm])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(200):
        cut = torch.randint(8, 24, (16, 1))
        document = (torch.arange(32)[None] >= cut).long()
        place = torch.where(document == 1, torch.arange(32)[None] - cut, torch.arange(32)[None])
        start = torch.randint(24, (16, 2)).gather(1, document)
        x = (start + place * (1 + start % 3)) % 24
        mask = (document[:, :, None] == document[:, None]) & (
            torch.arange(32)[:, None] >= torch.arange(32)[None]
        )
        h = words(x) + places(place)
        for block in blocks:
            h = block(h, mask)
        logits = norm(h) @ words.weight.T
        y = torch.where(document[:, 1:] == document[:, :-1], x[:, 1:], -100)
        update(
            optimizer,
            F.cross_entropy(logits[:, :-1].flatten(0, 1), y.flatten(), ignore_index=-100),
            1.0,
        )
    known = y >= 0
    return Reached(accuracy(logits[:, :-1][known], y[known]), 0.6)


def ranking() -> Reached:
    """Lists of ten documents by a listwise loss and by pairs (RankNet)."""
    net, weight = mlp(6, 32, 1), torch.randn(6)
    optimizer = adam(net, 5e-3)
    for _ in range(200):
        x = torch.randn(16, 10, 6)
        truth = x @ weight
        score = net(x)[..., 0]
        listwise = -(F.softmax(2 * truth, 1) * F.log_softmax(score, 1)).sum(1).mean()
        pairs = (truth[:, :, None] > truth[:, None]).float()
        pairwise_loss = F.binary_cross_entropy_with_logits(
            score[:, :, None] - score[:, None], pairs
        )
        update(optimizer, listwise + pairwise_loss)
    return Reached(accuracy(score, truth.argmax(1)), 0.6)


def recommender() -> Reached:
    """Matrix factorization with biases; pairs of a liked and another item (BPR)."""
    users, items = nn.Embedding(80, 8), nn.Embedding(60, 8)
    bias = nn.Embedding(60, 1)
    nn.init.normal_(users.weight, std=0.01)
    nn.init.normal_(items.weight, std=0.01)
    nn.init.zeros_(bias.weight)
    optimizer = torch.optim.Adam(
        [*users.parameters(), *items.parameters(), *bias.parameters()], lr=0.02
    )
    likes = torch.randn(80, 3) @ torch.randn(3, 60)
    losses = []
    for _ in range(300):
        u, i, j = torch.randint(80, (256,)), torch.randint(60, (256,)), torch.randint(60, (256,))
        swap = likes[u, i] < likes[u, j]
        i, j = torch.where(swap, j, i), torch.where(swap, i, j)
        gap = (users(u) * (items(i) - items(j))).sum(1) + (bias(i) - bias(j))[:, 0]
        losses.append(update(optimizer, -F.logsigmoid(gap).mean()))
    return Reached(-losses[-1], -0.45)


def mixture_density() -> Reached:
    """A mixture of five Gaussians whose likelihood becomes a density above 1."""
    net = mlp(1, 48, 15, act=nn.Tanh)
    optimizer = adam(net, 5e-3)
    losses = []
    for _ in range(300):
        y = 2 * torch.rand(128, 1) - 1
        x = y + 0.5 * (6 * y).sin() + 0.05 * torch.randn(128, 1)
        weight, mean, log_std = net(x).chunk(3, 1)
        each = -0.5 * ((y - mean) / log_std.exp()).pow(2) - log_std - 0.919
        losses.append(
            update(optimizer, -torch.logsumexp(F.log_softmax(weight, 1) + each, 1).mean(), 5.0)
        )
    return Reached(-sum(losses[-20:]) / 20, -0.3)


def uncertain() -> Reached:
    """Means and variances by the Gaussian likelihood; quantiles by the pinball loss."""
    net = mlp(4, 48, 48, 5)
    optimizer = adam(net, 3e-3)
    levels = torch.tensor([0.1, 0.5, 0.9])
    for _ in range(300):
        x = torch.randn(96, 4)
        y = x[:, 0] * 2 + (0.1 + x[:, 1].sigmoid() / 2) * torch.randn(96)
        out = net(x)
        likelihood = F.gaussian_nll_loss(out[:, 0], y, F.softplus(out[:, 1]) + 1e-4)
        gap = y[:, None] - out[:, 2:]
        update(optimizer, likelihood + torch.maximum(levels * gap, (levels - 1) * gap).mean())
    return Reached(explained(out[:, 0], y), 0.7)


def counts_and_survival() -> Reached:
    """Poisson counts, and times until an event with censoring (Cox), on a shared body."""
    body, count, risk = mlp(6, 32, 32), nn.Linear(32, 1), nn.Linear(32, 1)
    optimizer = adam([*body.parameters(), *count.parameters(), *risk.parameters()], 3e-3)
    weight = torch.randn(6) / 2
    for _ in range(200):
        x = torch.randn(96, 6)
        rate = (x @ weight).exp()
        y, time = torch.poisson(rate), -torch.rand(96).log() / rate
        event = torch.rand(96) < 0.7
        h = F.relu(body(x))
        log_rate, log_risk = count(h)[:, 0], risk(h)[:, 0]
        order = time.argsort(descending=True)
        partial = log_risk[order] - torch.logcumsumexp(log_risk[order], 0)
        update(optimizer, F.poisson_nll_loss(log_rate, y) - partial[event[order]].mean(), 1.0)
    return Reached(float(torch.corrcoef(torch.stack([log_rate, x @ weight]))[0, 1]), 0.7)


def several_tasks() -> Reached:
    """Classes, a number and a picture from one body, with learned weights of the losses."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 8, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(8, 16, 3, 2, 1),
                nn.ReLU(),
                nn.Flatten(),
            )
            self.kind, self.light, self.small = (
                nn.Linear(144, 4),
                nn.Linear(144, 1),
                nn.Linear(144, 9),
            )
            self.log_var = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.body(x)
            return self.kind(h), self.light(h).squeeze(1), self.small(h)

    model = Tasks()
    optimizer = adam(model, 2e-3)
    for _ in range(200):
        x, y = pictures(48)
        kind, light, small = model(x)
        wanted = F.avg_pool2d(x, 4).flatten(1)
        losses = torch.stack(
            [
                F.cross_entropy(kind, y),
                F.mse_loss(light, x.mean((1, 2, 3))),
                F.mse_loss(small, wanted),
            ]
        )
        update(optimizer, (losses * (-model.log_var).exp() + model.log_var).sum())
    return Reached(accuracy(kind, y), 0.85)


def implicit_picture() -> Reached:
    """Coordinates to brightness with sine activations (SIREN), full batch."""

    class Sine(nn.Module):
        def __init__(self, a: int, b: int, first: bool = False) -> None:
            super().__init__()
            self.linear = nn.Linear(a, b)
            bound = 1 / a if first else math.sqrt(6 / a) / 30
            nn.init.uniform_(self.linear.weight, -bound, bound)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(30 * self.linear(x))

    net = nn.Sequential(Sine(2, 48, first=True), Sine(48, 48), nn.Linear(48, 1))
    grid = torch.cartesian_prod(torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 24))
    y = (4 * grid[:, :1]).sin() * (5 * grid[:, 1:] + grid[:, :1]).cos()
    optimizer = adam(net, 1e-3)
    for _ in range(150):
        answer = net(grid)
        update(optimizer, F.mse_loss(answer, y))
    return Reached(explained(answer, y), 0.9)


def forecast() -> Reached:
    """Series at levels of hundreds, normalized inside the model and back; a day ahead."""

    class Forecast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(48, 64, 12)

        def forward(self, x: Tensor) -> Tensor:
            mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
            out: Tensor = self.net((x - mean) / std)
            return out * std + mean

    model = Forecast()
    optimizer = adam(model, 2e-3)
    for _ in range(250):
        time = torch.arange(60)[None] + 100 * torch.rand(48, 1)
        level = 300 + 200 * torch.rand(48, 1)
        series = level + 40 * (time * 2 * math.pi / 12).sin() + 5 * torch.randn(48, 60)
        answer = model(series[:, :48])
        update(optimizer, F.l1_loss(answer, series[:, 48:]))
    return Reached(explained(answer, series[:, 48:]), 0.8)


def translation() -> Reached:
    """Sequence to sequence with attention, teacher forcing that fades, padding."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.encoder = (
                nn.Embedding(16, 24, padding_idx=0),
                nn.GRU(24, 32, batch_first=True),
            )
            self.cell, self.out = nn.GRUCell(24 + 32, 32), nn.Linear(64, 16)

        def forward(self, x: Tensor, y: Tensor, force: float) -> Tensor:
            keys, h = self.encoder(self.words(x))
            h, word, answers = h[0], torch.ones_like(y[:, 0]), []
            for t in range(y.shape[1]):
                score = (keys @ h[:, :, None]).squeeze(2).masked_fill(x == 0, -1e9)
                context = (score.softmax(1)[:, None] @ keys).squeeze(1)
                h = self.cell(torch.cat([self.words(word), context], 1), h)
                answer = self.out(torch.cat([h, context], 1))
                answers.append(answer)
                word = y[:, t] if float(torch.rand(())) < force else answer.argmax(1)
            return torch.stack(answers, 1)

    model = Translator()
    optimizer = adam(model, 5e-3)
    for step in range(200):
        x = torch.randint(2, 16, (32, 6))
        short = torch.arange(6)[None] >= torch.randint(3, 7, (32, 1))
        x = x.masked_fill(short, 0)
        y = torch.where(short, 0, (x + 3) % 14 + 2)
        answer = model(x, y, 1 - step / 400)
        update(optimizer, F.cross_entropy(answer.flatten(0, 1), y.flatten(), ignore_index=0), 1.0)
    return Reached(accuracy(answer[~short], y[~short]), 0.5)


def sets() -> Reached:
    """Maxima and sums of sets whose size changes from batch to batch."""
    inner, outer = mlp(3, 48, 48), mlp(96, 48, 2)
    optimizer = adam([*inner.parameters(), *outer.parameters()], 3e-3)
    for _ in range(250):
        x = torch.randn(48, int(torch.randint(3, 12, (1,))), 3)
        y = torch.stack([x[..., 0].max(1).values, x[..., 1].mean(1) * 3], 1)
        h = inner(x)
        answer = outer(torch.cat([h.max(1).values, h.mean(1)], 1))
        update(optimizer, F.smooth_l1_loss(answer, y))
    return Reached(explained(answer, y), 0.7)


def learned_dynamics() -> Reached:
    """A differential equation whose right side is learned, by Runge-Kutta steps."""
    net = mlp(2, 32, 32, 2, act=nn.Tanh)
    optimizer = adam(net, 5e-3)
    truth = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    for _ in range(120):
        x = 2 * torch.randn(24, 2)
        start, loss = x, torch.zeros(())
        for t in range(1, 7):
            k1 = net(x)
            k2 = net(x + 0.05 * k1)
            x = x + 0.1 * k2
            loss = loss + F.mse_loss(x, start @ torch.linalg.matrix_exp(0.1 * t * truth).T)
        update(optimizer, loss / 6, 10.0)
    return Reached(-float(loss.detach()), -0.3)


def gates_from_zero() -> Reached:
    """Twelve residual blocks whose branches start at zero, without normalization (ReZero)."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.gain = (
                nn.Linear(32, 32),
                nn.Linear(32, 32),
                nn.Parameter(torch.zeros(1)),
            )

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.gain * self.b(F.relu(self.a(x)))
            return out

    net = nn.Sequential(nn.Linear(12, 32), *(Block() for _ in range(12)), nn.Linear(32, 4))
    nn.init.zeros_(net[-1].weight)  # type: ignore[arg-type]
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.02)
    for _ in range(200):
        x, y = blobs(64)
        answer = net(x)
        update(optimizer, F.cross_entropy(answer, y))
    return Reached(accuracy(answer, y), 0.8)
