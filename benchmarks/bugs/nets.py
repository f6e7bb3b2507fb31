# mypy: disable-error-code="arg-type, assignment, index, misc, operator, union-attr"
# mypy: no-warn-unused-ignores
# ruff: noqa: ARG005, RUF005  (callbacks take the arguments of their callers)
"""The networks to train: small, and each in several architectures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class Plain(nn.Module):
    """Linear layers `layers.k` with activation functions `acts.k` between them, then `head`."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        act: Callable[[], nn.Module] = nn.ReLU,
        norm: Callable[[int], nn.Module] = lambda size: nn.Identity(),
        drop: float = 0.0,
        last: nn.Module | None = None,
    ) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(sizes[:-1]))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.norms = nn.ModuleList(norm(b) for _, b in pairs)
        self.acts = nn.ModuleList(act() for _ in pairs)
        self.drop = nn.Dropout(drop) if drop else nn.Identity()
        self.head = nn.Linear(sizes[-2], sizes[-1])
        self.last = nn.Identity() if last is None else last

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer, norm, act in zip(self.layers, self.norms, self.acts, strict=True):
            x = act(norm(layer(x)))
        answer: Tensor = self.last(self.head(self.drop(x)))
        return answer


class Images(nn.Module):
    """Convolutions `convs.k`, each followed by a norm, an activation and a pooling."""

    def __init__(
        self,
        channels: Sequence[int],
        classes: int,
        *,
        norm: Callable[[int], nn.Module] = lambda size: nn.Identity(),
        act: Callable[[], nn.Module] = nn.ReLU,
        stride: int = 1,
    ) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(channels))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, stride, 1) for a, b in pairs)
        self.norms = nn.ModuleList(norm(b) for _, b in pairs)
        self.acts = nn.ModuleList(act() for _ in pairs)
        self.pool = nn.MaxPool2d(2) if stride == 1 else nn.Identity()
        self.head = nn.Linear(channels[-1], classes)
        self.last = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm, act in zip(self.convs, self.norms, self.acts, strict=True):
            x = self.pool(act(norm(conv(x))))
        answer: Tensor = self.last(self.head(x.mean((2, 3))))
        return answer


class Recurrent(nn.Module):
    """A cell called once per position; `head` reads the final hidden state."""

    def __init__(self, inputs: int, size: int, outputs: int, cell: str = "tanh") -> None:
        super().__init__()
        self.size = size
        self.cell: nn.Module
        if cell == "gru":
            self.cell = nn.GRUCell(inputs, size)
        elif cell == "lstm":
            self.cell = nn.LSTMCell(inputs, size)
        else:
            self.cell = nn.RNNCell(inputs, size, nonlinearity=cell)
        self.head = nn.Linear(size, outputs)

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor | tuple[Tensor, Tensor] = x.new_zeros(len(x), self.size)
        if isinstance(self.cell, nn.LSTMCell):
            state = (state, torch.zeros_like(state))
        for token in x.unbind(1):
            state = self.cell(token, state)
        answer: Tensor = self.head(state[0] if isinstance(state, tuple) else state)
        return answer


class Attention(nn.Module):
    """Self-attention with one projection; `weights` outputs the probabilities."""

    def __init__(self, size: int, heads: int, *, causal: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.heads, self.causal, self.scale = heads, causal, scale
        self.mix = nn.Linear(size, 3 * size)
        self.weights: nn.Module = nn.Softmax(-1)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        n, t, size = x.shape
        parts = self.mix(x).view(n, t, 3, self.heads, size // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-1, -2) * (self.scale / math.sqrt(q.shape[-1]))
        if self.causal:
            mask = torch.ones(t, t, dtype=torch.bool).triu(1)
            logits = logits.masked_fill(mask, -1e9)
        joined = (self.weights(logits) @ v).transpose(1, 2).reshape(n, t, size)
        answer: Tensor = self.out(joined)
        return answer


class Block(nn.Module):
    """A transformer block with the norms before its two branches."""

    def __init__(self, size: int, heads: int, *, causal: bool, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attn = Attention(size, heads, causal=causal)
        self.mlp = nn.Sequential(
            nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size), nn.Dropout(drop)
        )
        self.share = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        answer: Tensor = x + self.share * self.mlp(self.norm2(x))
        return answer


class Transformer(nn.Module):
    """Map tokens to one output per sequence, or, with `causal`, one per token."""

    def __init__(
        self,
        tokens: int,
        length: int,
        *,
        size: int = 32,
        depth: int = 2,
        classes: int = 4,
        causal: bool = False,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.tokens = nn.Embedding(tokens, size)
        self.positions = nn.Embedding(length, size)
        blocks = [Block(size, 2, causal=causal, drop=drop) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        answer: Tensor = self.head(h).transpose(1, 2) if self.causal else self.head(h.mean(1))
        return answer


class Residual(nn.Module):
    """Residual blocks `blocks.k` of two layers; `branch` computes what a block adds."""

    def __init__(self, inputs: int, size: int, depth: int, outputs: int, *, conv: bool) -> None:
        super().__init__()
        self.stem: nn.Module
        self.stem = nn.Conv2d(inputs, size, 3, 1, 1) if conv else nn.Linear(inputs, size)
        self.blocks = nn.ModuleList(ResidualBlock(size, conv=conv) for _ in range(depth))
        self.head = nn.Linear(size, outputs)
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        answer: Tensor = self.head(x.mean((2, 3)) if self.conv else x)
        return answer


class ResidualBlock(nn.Module):
    """Add the output of `branch` to the input."""

    def __init__(self, size: int, *, conv: bool) -> None:
        super().__init__()
        parts: list[nn.Module] = (
            [nn.Conv2d(size, size, 3, 1, 1, bias=False), nn.BatchNorm2d(size), nn.ReLU()]
            + [nn.Conv2d(size, size, 3, 1, 1)]
            if conv
            else [nn.LayerNorm(size), nn.Linear(size, size), nn.GELU(), nn.Linear(size, size)]
        )
        self.branch = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = x + self.branch(x)
        return answer


class Autoencoder(nn.Module):
    """An `encoder` to a few numbers (`code`) and a `decoder` back."""

    def __init__(
        self, size: int, hidden: int, code: int, act: Callable[[], nn.Module] = nn.ReLU
    ) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, hidden), act())
        self.code = nn.Linear(hidden, code)
        self.decoder = nn.Sequential(nn.Linear(code, hidden), act(), nn.Linear(hidden, size))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        answer: Tensor = self.decoder(self.code(self.encoder(x.flatten(1))))
        return answer.view(shape)
