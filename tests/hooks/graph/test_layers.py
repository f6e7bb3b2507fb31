"""Torch layers with parameters, states, masks and running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.hooks.graph.drawing import OUTPUTS, PARAMETERS, arrows, train

BUFFERS = {"nodes": {"all": {"select": "**", "capture": ["output", "buffer"]}}}


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.layer = layer(3, 3, batch_first=True)
        self.c = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        states, last = self.layer(self.a(x)[:, None])
        return self.c(states) + (last if isinstance(last, torch.Tensor) else last[1])


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 3)
        self.c = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        state = torch.zeros(4, 3)
        for _ in range(2):
            state = self.cell(x, state)
        return self.c(state)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.rnn = nn.RNN(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        lengths = torch.tensor([2, 2, 1])
        hidden = self.a(x)[:2, None].expand(2, 3, 3)
        packed = nn.utils.rnn.pack_padded_sequence(hidden, lengths)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0])
        return states


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(3, 3)
        self.k = nn.Linear(3, 3)
        self.v = nn.Linear(3, 3)
        self.attn = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        x = x[None]
        return self.attn(self.q(x), self.k(x), self.v(x))[0]


class Fused(Attention):
    def __init__(self) -> None:
        super().__init__()
        del self.attn
        self.c = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        q, k, v = self.q(x)[None], self.k(x)[None], self.v(x)[None]
        return self.c(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(self.a(x)[None])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.e.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.e(x.argmax(1)))


class BareWeights(nn.Module):
    """Parameters used without a module of their own, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.scale + self.frozen


class Normalised(nn.Module):
    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.c = nn.Linear(3, 3)
        self.frozen = frozen

    def forward(self, x: torch.Tensor) -> Any:
        if self.frozen:
            self.norm.eval()
        return self.c(self.norm(self.a(x)))


class ReadsStatistics(Normalised):
    """The value that training writes to a running mean is used right away."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.norm(self.a(x))
        return self.c(hidden.detach() * 0 + self.norm.running_mean)


class Positions(nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(4, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x + self.table)


class Counter(Positions):
    """A buffer that the forward pass itself updates."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.a(x)
        self.table.mul_(0.9).add_(hidden.detach())
        return hidden + self.table


class Reparametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3, bias=False))

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x)


class Structured(nn.Module):
    """Tensors in dictionaries, tuples and lists."""

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return {"sum": x + y, "pair": (x * 2, [y * 3])}

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.inner = self.Inner()

    def forward(self, x: torch.Tensor) -> Any:
        out = self.inner(self.a(x), self.b(x))
        return out["sum"] + out["pair"][1][0]


class Twice(nn.Module):
    """One tensor under two names, as models return their last hidden state."""

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            doubled = x * 2
            return doubled, [doubled]

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.inner = self.Inner()

    def forward(self, x: torch.Tensor) -> Any:
        first, others = self.inner(self.a(x))
        return first + others[0]


class Experts(nn.Module):
    """A router chooses the expert for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(3, 2)
        self.experts = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: torch.Tensor) -> Any:
        weights, chosen = self.router(x).softmax(1).max(1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


CASES: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "LSTM": (
        Recurrent(nn.LSTM),
        OUTPUTS,
        """input -> a => layer[0] => c => Recurrent => loss, a => layer[1][0], a => layer[1][1]
        layer[1][1] => Recurrent""",
    ),
    "GRU": (
        Recurrent(nn.GRU),
        OUTPUTS,
        "input -> a => layer[0] => c => Recurrent => loss, a => layer[1] => Recurrent",
    ),
    "recurrent cell": (
        Cell(),
        OUTPUTS,
        "input -> cell => cell:1 => c => Cell => loss, input -> cell:1",
    ),
    "packed sequence": (
        Packed(),
        OUTPUTS,
        """input -> a => rnn[0].data => Packed => loss, a => rnn[1]
        rnn[0].batch_sizes -> Packed""",
    ),
    "multi-head attention": (
        Attention(),
        OUTPUTS,
        """input -> q => attn[0] => Attention => loss, input -> k => attn[0]
        input -> v => attn[0], q => attn[1], k => attn[1], v => attn[1]""",
    ),
    "fused attention": (
        Fused(),
        OUTPUTS,
        "input -> q => c => Fused => loss, input -> k => c, input -> v => c",
    ),
    "encoder layer": (
        Encoder(),
        OUTPUTS,
        """input -> a => layer.self_attn[0] => layer.dropout1 => layer.norm1, a => layer.norm1
        layer.norm1 => layer.linear1 => layer.dropout => layer.linear2 => layer.dropout2
        layer.dropout2 => layer.norm2 => layer => Encoder => loss, layer.norm1 => layer.norm2""",
    ),
    "tied weights are one node": (
        Tied(),
        PARAMETERS,
        "input -> e => head => Tied => loss, e.weight => e, e.weight => head",
    ),
    "weights without a module": (
        BareWeights(),
        PARAMETERS,
        """input -> BareWeights => loss, BareWeights.scale => BareWeights
        BareWeights.frozen -> BareWeights""",
    ),
    "batch statistics": (
        Normalised(),
        BUFFERS,
        "input -> a => norm => c => Normalised => loss",
    ),
    "running statistics": (
        Normalised(frozen=True),
        BUFFERS,
        """input -> a => norm => c => Normalised => loss
        norm.running_mean -> norm, norm.running_var -> norm""",
    ),
    "statistics just written": (
        ReadsStatistics(),
        BUFFERS,
        """input -> a => norm -> c => ReadsStatistics => loss
        norm.running_mean -> c, a -> c""",
    ),
    "a constant buffer": (
        Positions(),
        BUFFERS,
        "input -> a => Positions => loss, Positions.table -> a",
    ),
    "a buffer that changes": (
        Counter(),
        BUFFERS,
        "input -> a => Counter => loss, Counter.table -> Counter",
    ),
    "a weight made of others": (
        Reparametrised(),
        PARAMETERS,
        """input -> a => Reparametrised => loss
        a.parametrizations.weight.original0 => a.parametrizations.weight.0
        a.parametrizations.weight.original1 => a.parametrizations.weight.0
        a.parametrizations.weight.0 => a.parametrizations.weight => a""",
    ),
    "structured outputs": (
        Structured(),
        OUTPUTS,
        """input -> a => inner.sum => Structured => loss, input -> b => inner.sum
        a => inner.pair[0], b => inner.pair[1][0] => Structured""",
    ),
    "one tensor in two roles": (
        Twice(),
        OUTPUTS,
        "input -> a => inner[0] => Twice => loss, a => inner[1][0] => Twice",
    ),
    "experts": (
        Experts(),
        OUTPUTS,
        """input -> router => Experts => loss, input -> experts.0 => Experts
        input -> experts.1 => Experts, router -> experts.0, router -> experts.1""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_edges(case: str) -> None:
    model, spec, expected = CASES[case]
    assert train(model, spec) == arrows(expected)
