"""Nets with unusual computations: frequency space, function transforms, iteration."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch.nn import functional as F

from benchmarks.neutrality.program import Program, usual
from benchmarks.neutrality.zoo.architectures import ARCHITECTURES, BATCH, WIDTH, mlp, squared


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 5, dtype=torch.cfloat) * 0.1)
        self.beside = nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :5], self.weight)
        return torch.fft.irfft(modes, n=x.shape[-1]) + self.beside(x)


ARCHITECTURES["fourier-operator"] = lambda: squared(_Spectral(), 4, 3, 16)


class _Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = mlp()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            one = self.rate(x)
            two = self.rate(x + one / 8)
            three = self.rate(x + two / 8)
            x = x + (one + 2 * two + 2 * three + self.rate(x + three / 4)) / 24
        return x


ARCHITECTURES["neural-ode"] = lambda: squared(_Flow())


class _Branching(nn.Module):
    """Control flow that torch itself compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cond(x.sum() > 0, self.first, torch.cos, (x,))

        def step(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            now = torch.tanh(carried + row)
            return now, now.clone()

        _, rows = scan(step, x.new_zeros(x.shape[1]), x)
        out: Tensor = self.second(rows)
        return out


@ARCHITECTURES
def control_flow() -> Program:
    torch.compiler.reset()  # the first compilation sets attributes of parameters
    return squared(_Branching())


class _Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sin(3 * self.first(x)))


@ARCHITECTURES
def physics_informed() -> Program:
    """A loss with second derivatives of the net."""

    def loss(net: nn.Module) -> Tensor:
        with torch.enable_grad():
            x = torch.rand(BATCH, 2, requires_grad=True)
            (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
            return (bend[:, 0] - slope[:, 1]).square().mean()

    return usual(_Sine(), loss)


class _Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = mlp(4, WIDTH * 3 + 3)
        self.inner = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.maker(torch.ones(4)).split([WIDTH * 3, 3])
        given = {"weight": weight.view(3, WIDTH), "bias": bias}
        return torch.func.functional_call(self.inner, given, (x,))


@ARCHITECTURES
def hypernetwork() -> Program:
    """A net that computes the weights of another."""
    model = _Hyper()
    model.inner.requires_grad_(False)
    return squared(model)


class _Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        members = [mlp(WIDTH, 2) for _ in range(3)]
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


ARCHITECTURES["vmapped-ensemble"] = lambda: squared(_Ensemble())


class _Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.inner = torch.jit.script(mlp())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


ARCHITECTURES["scripted-part"] = lambda: squared(_Scripted())


class _Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        potential, total = x.new_zeros(len(x), 16), x.new_zeros(len(x), 3)
        for _ in range(10):
            potential = 0.9 * potential + self.into(x)
            soft = torch.sigmoid(5 * (potential - 1))
            spike = (potential > 1).float() + soft - soft.detach()
            potential = potential - spike
            total += self.out(spike)
        return total


ARCHITECTURES["spiking"] = lambda: squared(_Spiking())


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH) * 0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return F.linear(F.linear(x, self.weight).tanh(), self.weight.t())


ARCHITECTURES["tied-autoencoder"] = lambda: squared(_Tied())


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(WIDTH, 9)

    def forward(self, x: Tensor) -> torch.distributions.MixtureSameFamily:
        weights, means, spreads = self.body(x).chunk(3, -1)
        kinds = torch.distributions.Categorical(logits=weights)
        parts = torch.distributions.Normal(means, F.softplus(spreads) + 0.1)
        return torch.distributions.MixtureSameFamily(kinds, parts)


@ARCHITECTURES
def mixture_density() -> Program:
    """A net whose output is a distribution, in which tracing cannot find tensors."""

    def loss(net: nn.Module) -> Tensor:
        return -net(torch.randn(BATCH, WIDTH)).log_prob(torch.randn(BATCH)).mean()

    return usual(_Mixture(), loss)


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(300))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) / 100
        return x


ARCHITECTURES["deep-300"] = lambda: squared(_Deep(), 2, 4)


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


ARCHITECTURES["capsules"] = lambda: squared(_Capsules())


class _Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.paths = nn.Linear(WIDTH, 1), nn.ModuleList([mlp(), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        path = self.paths[int(self.gate(x).mean() > 0)]
        return path(x) * self.gate(x).sigmoid()


ARCHITECTURES["branches"] = lambda: squared(_Chooses())
