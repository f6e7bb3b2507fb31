"""Nets with unusual structures: graphs, mixtures, flows, loops of data-dependent length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.neutrality.program import Program, usual
from benchmarks.neutrality.zoo.collection import Collection

ARCHITECTURES = Collection()
BATCH, WIDTH = 6, 8


def mlp(inputs: int = WIDTH, outputs: int = WIDTH, width: int = 16) -> nn.Sequential:
    """Return two linear layers with an activation between them."""
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, outputs))


def squared(model: nn.Module, *shape: int) -> Program:
    """Return a training run that minimizes the outputs for random inputs."""
    draw = shape or (BATCH, WIDTH)
    return usual(model, lambda net: net(torch.randn(*draw)).square().mean())


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(16, 3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        near = self.down(x).relu_()
        far = self.up(self.deep(near).relu_())
        return self.out(torch.cat([near, far], 1))


ARCHITECTURES["u-net"] = lambda: squared(_UNet(), 2, 3, 16, 16)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if not self.training or float(torch.rand(())) > 0.1 * number:
                x = x + block(x)
        return x


ARCHITECTURES["stochastic-depth"] = lambda: squared(_Residual())


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, self.main(x).tanh(), self.gate(x).sigmoid())


ARCHITECTURES["highway"] = lambda: squared(nn.Sequential(_Gate(), _Gate(), _Gate()))


class _Routed(nn.Module):
    """A mixture whose experts are modules, which receive only the tokens routed to them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


ARCHITECTURES["mixture-routed"] = lambda: squared(_Routed(), 20, WIDTH)


class _Stacked(nn.Module):
    """A mixture stored as one 3-D parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("be,ewv,bw->bv", self.router(x).softmax(-1), self.experts, x)


ARCHITECTURES["mixture-in-one-parameter"] = lambda: squared(_Stacked())


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = mlp(2 * WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for _ in range(3):
            sent = self.message(torch.cat([nodes[edges[0]], nodes[edges[1]]], 1))
            nodes = self.update(torch.zeros_like(nodes).index_add(0, edges[1], sent), nodes)
        return nodes.mean(0)


@ARCHITECTURES
def graph_network() -> Program:
    """Message passing on graphs whose size changes from step to step, without a batch."""

    def loss(net: nn.Module) -> Tensor:
        size = int(torch.randint(5, 15, ()))
        return net(torch.randn(size, WIDTH), torch.randint(size, (2, 30))).square().mean()

    return usual(_Graph(), loss)


class _Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        x = torch.sparse.mm(neighbours, self.first(x)).relu()
        return torch.sparse.mm(neighbours, self.second(x))


@ARCHITECTURES
def graph_convolution() -> Program:
    """A sparse adjacency matrix as an input."""

    def loss(net: nn.Module) -> Tensor:
        near = torch.sparse_coo_tensor(torch.randint(9, (2, 20)), torch.rand(20), (9, 9))
        return net(torch.randn(9, WIDTH), near).square().mean()

    return usual(_Convolves(), loss)


class _Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = mlp(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1))


ARCHITECTURES["deep-sets"] = lambda: squared(_Sets(), 4, 5, WIDTH)


class _Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(WIDTH // 2) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = x.new_zeros(len(x))
        for net in self.nets:
            one, two = x.chunk(2, 1)
            scale, shift = net(one).chunk(2, 1)
            volume = volume + scale.tanh().sum(1)
            x = torch.cat([two * scale.tanh().exp() + shift, one], 1)
        return x, volume


@ARCHITECTURES
def normalizing_flow() -> Program:
    """Affine couplings with two outputs."""

    def loss(net: nn.Module) -> Tensor:
        z, volume = net(torch.randn(BATCH, WIDTH))
        return (z.square().sum(1) / 2 - volume).mean()

    return usual(_Coupling(), loss)


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 4), mlp(2, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        code = torch.distributions.Normal(mean, F.softplus(spread)).rsample()
        return {"mean": mean, "spread": spread, "again": self.decoder(code)}


@ARCHITECTURES
def variational_autoencoder() -> Program:
    """Sampling within the net, and a dict as output."""

    def loss(net: nn.Module) -> Tensor:
        x = torch.randn(BATCH, WIDTH)
        out = net(x)
        return F.mse_loss(out["again"], x) + out["mean"].square().mean()

    return usual(_Variational(), loss)


class _Quantized(nn.Module):
    book: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(), mlp()
        self.register_buffer("book", torch.randn(10, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        nearest = torch.cdist(code, self.book).argmin(1)
        if self.training:
            for number in nearest.unique():
                self.book[number].lerp_(code[nearest == number].detach().mean(0), 0.1)
        near = self.book[nearest]
        return self.decoder(code + (near - code).detach())


ARCHITECTURES["vector-quantized"] = lambda: squared(_Quantized())


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = _Sign.apply(self.first.weight)
        return self.second(F.linear(x, weight, self.first.bias).tanh())


ARCHITECTURES["binary-weights"] = lambda: squared(_Binary())


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(mlp(), nn.Dropout(0.2)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


ARCHITECTURES["checkpointed"] = lambda: squared(_Checkpointed(False))
ARCHITECTURES["checkpointed-reentrant"] = lambda: squared(_Checkpointed(True))
