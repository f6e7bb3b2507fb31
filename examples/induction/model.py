"""A transformer with two layers of attention and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention, whose output is added to what it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for [batch, positions, width]."""
        read = self.norm(x)
        parts = (self.query(read), self.key(read), self.value(read))
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return output


class AttentionOnly(nn.Module):
    """Predicts the next token at each position."""

    def __init__(self, tokens: int, length: int, *, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, positions, tokens] for [batch, positions]."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
