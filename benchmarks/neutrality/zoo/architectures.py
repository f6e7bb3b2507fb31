"""Nets whose shape is their point: graphs, mixtures, flows, loops of data-dependent length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.neutrality.program import Program, usual
from benchmarks.neutrality.zoo.collection import Collection

ARCHITECTURES = Collection()
_BATCH, _WIDTH = 6, 8


def _mlp(inputs: int = _WIDTH, outputs: int = _WIDTH, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, outputs))


def _squared(model: nn.Module, *shape: int) -> Program:
    draw = shape or (_BATCH, _WIDTH)
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


ARCHITECTURES["u-net"] = lambda: _squared(_UNet(), 2, 3, 16, 16)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if not self.training or float(torch.rand(())) > 0.1 * number:
                x = x + block(x)
        return x


ARCHITECTURES["stochastic-depth"] = lambda: _squared(_Residual())


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.gate = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, self.main(x).tanh(), self.gate(x).sigmoid())


ARCHITECTURES["highway"] = lambda: _squared(nn.Sequential(_Gate(), _Gate(), _Gate()))


class _Routed(nn.Module):
    """A mixture whose experts are modules; each sees only the tokens that are sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(_WIDTH, 4), nn.ModuleList(_mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


ARCHITECTURES["mixture-routed"] = lambda: _squared(_Routed(), 20, _WIDTH)


class _Stacked(nn.Module):
    """A mixture held as one 3-D parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, _WIDTH, _WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("be,ewv,bw->bv", self.router(x).softmax(-1), self.experts, x)


ARCHITECTURES["mixture-in-one-parameter"] = lambda: _squared(_Stacked())


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = _mlp(2 * _WIDTH), nn.GRUCell(_WIDTH, _WIDTH)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for _ in range(3):
            sent = self.message(torch.cat([nodes[edges[0]], nodes[edges[1]]], 1))
            nodes = self.update(torch.zeros_like(nodes).index_add(0, edges[1], sent), nodes)
        return nodes.mean(0)


@ARCHITECTURES
def graph_network() -> Program:
    """Message passing on graphs of another size in each step: there is no batch."""

    def loss(net: nn.Module) -> Tensor:
        size = int(torch.randint(5, 15, ()))
        return net(torch.randn(size, _WIDTH), torch.randint(size, (2, 30))).square().mean()

    return usual(_Graph(), loss)


class _Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 3)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        x = torch.sparse.mm(neighbours, self.first(x)).relu()
        return torch.sparse.mm(neighbours, self.second(x))


@ARCHITECTURES
def graph_convolution() -> Program:
    """Sparse neighbourhoods as an input."""

    def loss(net: nn.Module) -> Tensor:
        near = torch.sparse_coo_tensor(torch.randint(9, (2, 20)), torch.rand(20), (9, 9))
        return net(torch.randn(9, _WIDTH), near).square().mean()

    return usual(_Convolves(), loss)


class _Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = _mlp(), _mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1))


ARCHITECTURES["deep-sets"] = lambda: _squared(_Sets(), 4, 5, _WIDTH)


class _Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(_mlp(_WIDTH // 2) for _ in range(4))

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
    """Affine couplings; two results."""

    def loss(net: nn.Module) -> Tensor:
        z, volume = net(torch.randn(_BATCH, _WIDTH))
        return (z.square().sum(1) / 2 - volume).mean()

    return usual(_Coupling(), loss)


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _mlp(_WIDTH, 4), _mlp(2, _WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        code = torch.distributions.Normal(mean, F.softplus(spread)).rsample()
        return {"mean": mean, "spread": spread, "again": self.decoder(code)}


@ARCHITECTURES
def variational_autoencoder() -> Program:
    """Sampling within the net; a dict as its result."""

    def loss(net: nn.Module) -> Tensor:
        x = torch.randn(_BATCH, _WIDTH)
        out = net(x)
        return F.mse_loss(out["again"], x) + out["mean"].square().mean()

    return usual(_Variational(), loss)


class _Quantized(nn.Module):
    book: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _mlp(), _mlp()
        self.register_buffer("book", torch.randn(10, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        nearest = torch.cdist(code, self.book).argmin(1)
        if self.training:
            for number in nearest.unique():
                self.book[number].lerp_(code[nearest == number].detach().mean(0), 0.1)
        near = self.book[nearest]
        return self.decoder(code + (near - code).detach())


ARCHITECTURES["vector-quantized"] = lambda: _squared(_Quantized())


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
        self.first, self.second = nn.Linear(_WIDTH, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = _Sign.apply(self.first.weight)
        return self.second(F.linear(x, weight, self.first.bias).tanh())


ARCHITECTURES["binary-weights"] = lambda: _squared(_Binary())


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(_mlp(), nn.Dropout(0.2)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


ARCHITECTURES["checkpointed"] = lambda: _squared(_Checkpointed(False))
ARCHITECTURES["checkpointed-reentrant"] = lambda: _squared(_Checkpointed(True))


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 5, dtype=torch.cfloat) * 0.1)
        self.beside = nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :5], self.weight)
        return torch.fft.irfft(modes, n=x.shape[-1]) + self.beside(x)


ARCHITECTURES["fourier-operator"] = lambda: _squared(_Spectral(), 4, 3, 16)


class _Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = _mlp()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            one = self.rate(x)
            two = self.rate(x + one / 8)
            three = self.rate(x + two / 8)
            x = x + (one + 2 * two + 2 * three + self.rate(x + three / 4)) / 24
        return x


ARCHITECTURES["neural-ode"] = lambda: _squared(_Flow())


class _Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sin(3 * self.first(x)))


@ARCHITECTURES
def physics_informed() -> Program:
    """Second derivatives of the net in its loss."""

    def loss(net: nn.Module) -> Tensor:
        with torch.enable_grad():
            x = torch.rand(_BATCH, 2, requires_grad=True)
            (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
            return (bend[:, 0] - slope[:, 1]).square().mean()

    return usual(_Sine(), loss)


class _Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = _mlp(4, _WIDTH * 3 + 3)
        self.inner = nn.Linear(_WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.maker(torch.ones(4)).split([_WIDTH * 3, 3])
        given = {"weight": weight.view(3, _WIDTH), "bias": bias}
        return torch.func.functional_call(self.inner, given, (x,))


@ARCHITECTURES
def hypernetwork() -> Program:
    """A net that makes the weights of another."""
    model = _Hyper()
    model.inner.requires_grad_(False)
    return _squared(model)


class _Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        members = [_mlp(_WIDTH, 2) for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(members)
        names = {name.replace(".", "_"): value for name, value in stacked.items()}
        self.stacked = nn.ParameterDict({n: nn.Parameter(v.detach()) for n, v in names.items()})
        self.names = dict(zip(stacked, names, strict=True))
        self.__dict__["form"] = members[0]

    def forward(self, x: Tensor) -> Tensor:
        given = {name: self.stacked[own] for name, own in self.names.items()}

        def one(state: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.form, state, (x,))

        return torch.vmap(one)(given)


ARCHITECTURES["vmapped-ensemble"] = lambda: _squared(_Ensemble())


class _Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 3)
        self.inner = torch.jit.script(_mlp())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


ARCHITECTURES["scripted-part"] = lambda: _squared(_Scripted())


class _Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(_WIDTH, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        potential, total = x.new_zeros(len(x), 16), x.new_zeros(len(x), 3)
        for _ in range(10):
            potential = 0.9 * potential + self.into(x)
            soft = torch.sigmoid(5 * (potential - 1))
            spike = (potential > 1).float() + soft - soft.detach()
            potential = potential - spike
            total += self.out(spike)
        return total


ARCHITECTURES["spiking"] = lambda: _squared(_Spiking())


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, _WIDTH) * 0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return F.linear(F.linear(x, self.weight).tanh(), self.weight.t())


ARCHITECTURES["tied-autoencoder"] = lambda: _squared(_Tied())


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = _mlp(_WIDTH, 9)

    def forward(self, x: Tensor) -> torch.distributions.MixtureSameFamily:
        weights, means, spreads = self.body(x).chunk(3, -1)
        kinds = torch.distributions.Categorical(logits=weights)
        parts = torch.distributions.Normal(means, F.softplus(spreads) + 0.1)
        return torch.distributions.MixtureSameFamily(kinds, parts)


@ARCHITECTURES
def mixture_density() -> Program:
    """A distribution as the result of the net, which holds no tensor that can be found."""

    def loss(net: nn.Module) -> Tensor:
        return -net(torch.randn(_BATCH, _WIDTH)).log_prob(torch.randn(_BATCH)).mean()

    return usual(_Mixture(), loss)


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(300))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) / 100
        return x


ARCHITECTURES["deep-300"] = lambda: _squared(_Deep(), 2, 4)


class _Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 2, 4) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bid,oide->bioe", x.view(-1, 4, 2), self.weight)
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(3):
            total = (logits.softmax(-1)[..., None] * votes).sum(1)
            out = total / (1 + total.norm(dim=-1, keepdim=True))
            logits = logits + (votes * out[:, None]).sum(-1)
        return out


ARCHITECTURES["capsules"] = lambda: _squared(_Capsules())


class _Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.paths = nn.Linear(_WIDTH, 1), nn.ModuleList([_mlp(), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        path = self.paths[int(self.gate(x).mean() > 0)]
        return path(x) * self.gate(x).sigmoid()


ARCHITECTURES["branches"] = lambda: _squared(_Chooses())
