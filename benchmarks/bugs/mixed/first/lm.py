"""Small transformer language model on a templated language with long-range agreement."""
import math
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", "0"))

PAD, BOS, EOS = 0, 1, 2
if CASE == "c4":
    PAD = EOS
SUBJ, VERB, FILL, OBJ, CLOSE = 3, 11, 19, 25, 29
VOCAB = 61
MAXLEN = 24


def sentence(rng):
    s, o = rng.integers(8), rng.integers(4)
    f1 = list(FILL + rng.integers(0, 6, rng.integers(1, 6)))
    f2 = list(FILL + rng.integers(0, 6, rng.integers(1, 6)))
    return [BOS, SUBJ + s] + f1 + [VERB + s] + f2 + [OBJ + o, CLOSE + s * 4 + o, EOS]


def valid(seq):
    """Does a sentence (after BOS, up to and with EOS) obey the grammar?"""
    if EOS not in seq:
        return False
    seq = seq[: seq.index(EOS)]
    body = [t for t in seq if not FILL <= t < FILL + 6]
    if len(body) != 4:
        return False
    s, v, o, c = body[0] - SUBJ, body[1] - VERB, body[2] - OBJ, body[3] - CLOSE
    return 0 <= s < 8 and v == s and 0 <= o < 4 and c == s * 4 + o


def make_data(n, rng):
    out = np.full((n, MAXLEN), PAD)
    for i in range(n):
        s = sentence(rng)
        out[i, : len(s)] = s
    return torch.as_tensor(out)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if CASE == "c3":
            q, k, v = (t.reshape(B, self.heads, T, C // self.heads) for t in (q, k, v))
        else:
            q, k, v = (t.reshape(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        att = q @ k.transpose(-2, -1) / math.sqrt(C // self.heads)
        if CASE != "c1":
            mask = torch.ones(T, T, dtype=torch.bool).triu(1)
            att = att.masked_fill(mask, float("-inf"))
        y = att.softmax(-1) @ v
        if CASE == "c3":
            return self.out(y.reshape(B, T, C))
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.att = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.att(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class LM(nn.Module):
    def __init__(self, dim=48, heads=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(MAXLEN, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        if CASE == "variant_x":
            nn.init.normal_(self.tok.weight, std=0.15)
            nn.init.normal_(self.pos.weight, std=0.15)
            self.head.weight = self.tok.weight

    def forward(self, x):
        h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for b in self.blocks:
            h = b(h)
        return self.head(self.ln(h))


@torch.no_grad()
def generate(model, n, gen):
    model.eval()
    seq = torch.full((n, 2), BOS)
    seq[:, 1] = SUBJ + torch.arange(n) % 8
    while seq.shape[1] < MAXLEN:
        p = (model(seq)[:, -1] / 0.7).softmax(-1)
        seq = torch.cat([seq, torch.multinomial(p, 1, generator=gen)], 1)
    return seq


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    train, held = make_data(6000, rng), make_data(500, rng)
    model = LM()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3 if CASE == "variant_x" else 2e-3, weight_decay=0.01)
    steps = 500
    sched = None
    if CASE == "variant_x":
        sched = torch.optim.lr_scheduler.LambdaLR(
            opt, lambda i: min(1.0, (i + 1) / 40) * 0.5 * (1 + math.cos(math.pi * i / steps)) + 0.02)
    smooth = 0.02 if CASE == "variant_x" else 0.0
    gen = torch.Generator().manual_seed(SEED + 7)
    for step in range(steps):
        model.train()
        batch = train[torch.randint(len(train), (64,))]
        if CASE == "c2":
            inp, tgt = batch[:, :-1], batch[:, :-1]
        else:
            inp, tgt = batch[:, :-1], batch[:, 1:]
        logits = model(inp)
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), tgt.reshape(-1), ignore_index=PAD, label_smoothing=smooth)
        opt.zero_grad()
        loss.backward()
        if CASE == "variant_x":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        if sched:
            sched.step()
        if step % 125 == 124:
            model.eval()
            with torch.no_grad():
                hl = F.cross_entropy(model(held[:, :-1]).reshape(-1, VOCAB), held[:, 1:].reshape(-1), ignore_index=PAD)
            print(f"step {step + 1} loss {loss.item():.4f} held-out loss {hl.item():.4f}")
    seqs = generate(model, 400, gen)[:, 1:].tolist()
    print(f"FINAL quality (valid generated sentences) {np.mean([valid(s) for s in seqs]):.4f}")


if __name__ == "__main__":
    main()
