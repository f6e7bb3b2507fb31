"""A small GPT without shortcuts: embeddings, blocks of attention and MLP, a linear head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head causal self-attention.

    Uses an explicit softmax instead of a fused kernel, so that the weights can be recorded.
    """

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.weights = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)
        self.project = nn.Linear(width, width, bias=False)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(t: Tensor) -> Tensor:  # [batch, length, width] -> [batch, heads, length, size]
            return t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = self.weights(scores.masked_fill(future, float("-inf")))
        mixed = self.dropout(weights) @ v
        out: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """Two linear layers with a hidden width of four times the input."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.contract(F.gelu(self.expand(x))))
        return out


class Block(nn.Module):
    """Attention and MLP, each normalized before and added to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """Predicts the next character at every position; embedding and head share their weights."""

    def __init__(
        self, symbols: int, *, context: int, layers: int, heads: int, width: int, dropout: float
    ):
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        self.head.weight = self.symbol.weight
        self.context = context
        self.apply(initialise)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map symbols [batch, length] to logits [batch, length, number of symbols]."""
        positions = torch.arange(symbols.shape[1], device=symbols.device)
        x = self.symbol(symbols) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, symbols: Tensor, count: int) -> Tensor:
        """Extend symbols [batch, length] by `count` sampled ones."""
        for _ in range(count):
            logits = self(symbols[:, -self.context :])[:, -1]
            drawn = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
            symbols = torch.cat([symbols, drawn], dim=1)
        return symbols


def initialise(module: nn.Module) -> None:
    """Initialize weights from a narrow normal distribution, as in GPT-2."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
