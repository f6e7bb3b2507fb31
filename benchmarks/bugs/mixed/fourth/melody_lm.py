"""Music language model: a small causal transformer on synthetic melodies."""
import math
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

NOTES, MODES, MOTIF, REPEATS = 16, (-2, -1, 1, 3), 4, 5
VOCAB = NOTES + len(MODES)
LENGTH = 1 + MOTIF * REPEATS


def compose(n, rng):
    """A mode token, a motif of four notes, and its transposed repetitions."""
    mode = rng.integers(0, len(MODES), n)
    shift = np.array(MODES)[mode]
    motif = rng.integers(0, NOTES, (n, MOTIF))
    parts = [(motif + k * shift[:, None]) % NOTES for k in range(REPEATS)]
    return torch.from_numpy(np.concatenate([NOTES + mode[:, None]] + parts, 1))


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        allowed = torch.tril(torch.ones(LENGTH, LENGTH))
        if CASE == "case_a":
            allowed = torch.tril(torch.ones(LENGTH, LENGTH), diagonal=1)
        self.register_buffer("allowed", allowed.bool())

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).unbind(2)
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(d // self.heads)
        scores = scores.masked_fill(~self.allowed[:t, :t], -1e9)
        weights = scores.softmax(-2 if CASE == "case_b" else -1)
        return self.out(torch.einsum("bhqk,bkhe->bqhe", weights, v).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MelodyModel(nn.Module):
    def __init__(self, dim=64, heads=4, layers=2):
        super().__init__()
        self.token = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(torch.randn(LENGTH, dim) * 0.3)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        if CASE == "variant_x":
            nn.init.normal_(self.token.weight, std=dim ** -0.5)
            self.head.weight = self.token.weight
        self.scale = math.sqrt(dim) if CASE == "variant_x" else 1.0

    def forward(self, ids):
        x = self.token(ids) * self.scale + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def continuation_accuracy(model, songs, prompt=1 + 2 * MOTIF):
    model.eval()
    ids = songs[:, :prompt]
    while ids.shape[1] < LENGTH:
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
    model.train()
    return (ids[:, prompt:] == songs[:, prompt:]).float().mean().item()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    train, test = compose(4000, rng), compose(300, rng)
    model = MelodyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    steps, warmup, every = 400, 100, 80
    if CASE == "case_d":
        warmup = 200
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warmup))
    accumulate = 2 if CASE == "variant_x" else 1
    smoothing = 0.05 if CASE == "variant_x" else 0.0
    for step in range(steps):
        for _ in range(accumulate):
            ids = train[torch.randint(len(train), (48 // accumulate,))]
            logits = model(ids[:, :-1])
            target = ids[:, :-1] if CASE == "case_c" else ids[:, 1:]
            # the motif itself is free, only what follows it can be predicted
            logits, target = logits[:, MOTIF:], target[:, MOTIF:]
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing)
            (loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        if CASE != "case_d":
            scheduler.step()
        if (step + 1) % every == 0:
            if CASE == "case_d":
                scheduler.step()
            print(f"step {step + 1} loss {loss.item():.4f} accuracy {continuation_accuracy(model, test):.3f}")
    print(f"final accuracy {continuation_accuracy(model, test):.4f}")


if __name__ == "__main__":
    main()
