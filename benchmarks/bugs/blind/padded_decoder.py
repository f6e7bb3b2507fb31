"""A decoder-only transformer on padded token sequences in which two tokens decide the next."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CASES = (
    "healthy",
    "no_causal_mask",
    "padding_mask_inverted",
    "wrong_ignore_index",
    "attention_over_queries",
    "variant_warmup_groups",
)
TOKENS, PAD, LONGEST = 8, 8, 24
STEPS, BATCH, SIZE, HEADS = 250, 32, 48, 4


def make_batch(table: Tensor, count: int) -> Tensor:
    """Write sequences of different lengths, padded on the right."""
    seq = torch.randint(0, TOKENS, (count, LONGEST))
    for t in range(2, LONGEST):
        noise = torch.rand(count) < 0.05
        seq[:, t] = torch.where(noise, seq[:, t], table[seq[:, t - 1], seq[:, t - 2]])
    lengths = torch.randint(6, LONGEST + 1, (count, 1))
    return seq.masked_fill(torch.arange(LONGEST) >= lengths, PAD)


class Attention(nn.Module):
    """Self-attention with several heads; `blocked` is True where no key may be read."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.softmax = nn.Softmax(dim=-2 if case == "attention_over_queries" else -1)
        self.qkv = nn.Linear(SIZE, 3 * SIZE)
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, blocked: Tensor) -> Tensor:
        count, length, _ = x.shape
        parts = self.qkv(x).view(count, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        scores = query @ key.transpose(-1, -2) / math.sqrt(SIZE // HEADS)
        weights = self.softmax(scores.masked_fill(blocked[:, None], -1e9))
        return self.out((weights @ value).transpose(1, 2).reshape(count, length, SIZE))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.attention = Attention(case)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))

    def forward(self, x: Tensor, blocked: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), blocked)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Token and position embeddings, two blocks, and the logits of the next token."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.tokens = nn.Embedding(TOKENS + 1, SIZE, padding_idx=PAD)
        self.positions = nn.Embedding(LONGEST, SIZE)
        self.blocks = nn.ModuleList(Block(case) for _ in range(2))
        self.norm = nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, TOKENS + 1)

    def forward(self, seq: Tensor) -> Tensor:
        length = seq.shape[1]
        x = self.tokens(seq) + self.positions(torch.arange(length))
        padding = (seq == PAD)[:, None, :]
        if self.case == "padding_mask_inverted":
            padding = ~padding
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        blocked = (
            padding | future if self.case != "no_causal_mask" else padding.expand(-1, length, -1)
        )
        for block in self.blocks:
            x = block(x, blocked)
        return self.head(self.norm(x))


@torch.no_grad()
def accuracy(model: Decoder, table: Tensor) -> float:
    """Predict the last token of prefixes, as in generation: nothing later is visible."""
    model.eval()
    seq, right, count = make_batch(table, 200), 0, 0
    for length in range(3, LONGEST):
        rows = seq[seq[:, length] != PAD]
        right += int((model(rows[:, :length])[:, -1].argmax(-1) == rows[:, length]).sum())
        count += len(rows)
    return right / count


def main(case: str) -> None:
    torch.manual_seed(0)
    table = torch.randint(0, TOKENS, (TOKENS, TOKENS))
    model = Decoder(case)
    groups: list[dict[str, object]] = [{"params": list(model.parameters())}]
    if case == "variant_warmup_groups":
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.0)
    warm = case == "variant_warmup_groups"
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 40) * (1 - 0.9 * s / STEPS) if warm else 1.0
    )
    ignored = 0 if case == "wrong_ignore_index" else PAD
    for step in range(STEPS):
        seq = make_batch(table, BATCH)
        logits = model(seq[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), seq[:, 1:].flatten(), ignore_index=ignored)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    print(f"quality (accuracy of the next token): {accuracy(model, table):.3f}")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "healthy"
    assert chosen in CASES, CASES
    main(chosen)
