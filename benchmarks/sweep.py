"""The cost of a sweep: `python -m benchmarks.sweep`.

Patches each head of a transformer at each position, and calls a model without hooks equally often,
with batches of the same sizes. Both are processor times of one thread, in alternating rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from benchmarks.targets import sweep_verdict

SAMPLES, WORDS = 8, 100


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return output


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


class Language(nn.Module):
    """Counts its calls in `sizes`, which all copies share: the number of sequences of each."""

    sizes: list[int] = []  # noqa: RUF012 - shared on purpose

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        self.sizes.append(len(tokens))
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def traced(model: Language, tokens: Tensor, interventions: dict[str, Any]) -> float:
    """Record one step; return the processor time in seconds."""
    spec = {
        "nodes": {"head": {"select": "head"}},
        "schedule": {"first": 1},
        "probes": {"words": {"samples": {"count": SAMPLES}, "values": False}},
        "interventions": interventions,
        "rules": "off",
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as root:
        began = time.process_time()
        with comgra.trace(spec, root=root):
            loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
        return time.process_time() - began


def plain(model: Language, sizes: Sequence[int], positions: int) -> float:
    """Call the model once for each size; return the processor time in seconds."""
    batches = {size: torch.randint(WORDS, (size, positions)) for size in set(sizes)}
    began = time.process_time()
    with torch.no_grad():
        for size in sizes:
            model(batches[size])
    return time.process_time() - began


def measured(model: Language, positions: int, *, batch: int) -> tuple[float, float, int]:
    """Return the seconds of a sweep, those of its forward passes alone, and their number."""
    tokens = torch.randint(WORDS, (SAMPLES, positions))
    sweep = {
        "of": "words", "select": "blocks.*.attn.out", "role": "input", "do": {"patch": "other"},
        "sweep": ["node", "head", "position"], "batch": batch,
    }  # fmt: skip
    without = traced(model, tokens, {})
    before = len(model.sizes)
    traced(model, tokens, {})
    usual = len(model.sizes) - before
    before = len(model.sizes)
    whole = traced(model, tokens, {"heads": sweep})
    sizes = model.sizes[before:][usual:]
    return whole - without, plain(model, sizes, positions), len(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--positions", type=int, default=32)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Language(given.width, given.heads, given.layers)
    traced(model, torch.randint(WORDS, (SAMPLES, given.positions)), {})  # imports
    ratios = []
    for _ in range(given.rounds):
        seconds, bare, count = measured(model, given.positions, batch=given.batch)
        ratios.append(seconds / bare)
        print(f"sweep {seconds:.1f} s, {count} passes alone {bare:.1f} s: {ratios[-1]:.3f}")
    places = given.layers * given.heads * given.positions
    verdict = sweep_verdict(median(ratios))
    met = "met" if verdict.met else "missed"
    print(f"{places} places, width {given.width}; {verdict.target}: {verdict.measured} ({met})")


if __name__ == "__main__":
    main()
