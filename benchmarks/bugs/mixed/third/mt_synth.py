"""Translation between two synthetic languages with a small encoder-decoder of own attention layers."""
import math
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
PAD, BOS, EOS = 0, 1, 2
N_NOUN, N_ADJ, N_VERB = 20, 10, 10
VOCAB = 3 + N_NOUN + N_ADJ + N_VERB


def phrase(rng):
    n = 3 + rng.integers(N_NOUN)
    if rng.random() < 0.5:
        return [3 + N_NOUN + rng.integers(N_ADJ), n]
    return [n]


def make_pair(rng, lex):
    """Source: subject verb object, adjective before noun; target: subject object verb, noun before adjective."""
    s, o = phrase(rng), phrase(rng)
    v = [3 + N_NOUN + N_ADJ + rng.integers(N_VERB)]
    src = s + v + o
    tgt = s[::-1] + o[::-1] + v
    if rng.random() < 0.4:
        o2 = phrase(rng)
        src, tgt = src + o2, s[::-1] + o2[::-1] + o[::-1] + v
    return src, [int(lex[w]) for w in tgt]


def to_batch(pairs):
    src = torch.full((len(pairs), 8), PAD)
    tgt = torch.full((len(pairs), 9), PAD)
    for i, (a, b) in enumerate(pairs):
        src[i, :len(a)] = torch.tensor(a)
        tgt[i, :len(b) + 2] = torch.tensor([BOS] + b + [EOS])
    return src, tgt


class Attention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, z):
        return z.view(z.shape[0], z.shape[1], self.heads, -1)

    def forward(self, x, mem, allowed):
        q, k, v = self.split(self.q(x)), self.split(self.k(mem)), self.split(self.v(mem))
        score = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        score = score.masked_fill(~allowed[:, None], -1e9)
        att = score.softmax(dim=2 if CASE == "b3" else 3)
        return self.o(torch.einsum("bhij,bjhd->bihd", att, v).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, cross):
        super().__init__()
        self.self_att = Attention(dim)
        self.cross_att = Attention(dim) if cross else None
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x, allowed, mem=None, mem_allowed=None):
        z = self.norms[0](x)
        x = x + self.self_att(z, z, allowed)
        if self.cross_att is not None:
            x = x + self.cross_att(self.norms[1](x), mem, mem_allowed)
        return x + self.ff(self.norms[2](x))


class Translator(nn.Module):
    def __init__(self, dim=48, layers=2):
        super().__init__()
        self.src_emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.tgt_emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.pos = nn.Parameter(torch.randn(16, dim) * 0.3)
        self.enc = nn.ModuleList(Block(dim, False) for _ in range(layers))
        self.dec = nn.ModuleList(Block(dim, True) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, VOCAB, bias=False)
        if CASE == "variant_x":
            nn.init.normal_(self.tgt_emb.weight, std=0.3)
            self.out.weight = self.tgt_emb.weight

    def encode(self, src):
        ok = (src != PAD)[:, None, :].expand(-1, src.shape[1], -1)
        x = self.src_emb(src) + self.pos[:src.shape[1]]
        for blk in self.enc:
            x = blk(x, ok)
        return x

    def decode(self, mem, src, tgt):
        t = tgt.shape[1]
        ok = torch.ones(t, t, dtype=torch.bool)
        if CASE != "b2":
            ok = ok.tril()
        ok = ok[None].expand(len(tgt), -1, -1)
        mem_ok = (src != PAD)[:, None, :].expand(-1, t, -1)
        x = self.tgt_emb(tgt) + self.pos[:t]
        for blk in self.dec:
            x = blk(x, ok, mem, mem_ok)
        return self.out(self.norm(x))

    def forward(self, src, tgt):
        return self.decode(self.encode(src), src, tgt)


@torch.no_grad()
def exact_match(model, src, tgt):
    model.eval()
    mem = model.encode(src)
    out = torch.full((len(src), 1), BOS)
    for _ in range(tgt.shape[1] - 1):
        out = torch.cat([out, model.decode(mem, src, out)[:, -1].argmax(-1, keepdim=True)], 1)
    model.train()
    real = tgt != PAD
    return ((out == tgt) | ~real).all(1).float().mean().item()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    lex = np.arange(VOCAB)
    lex[3:] = 3 + rng.permutation(VOCAB - 3)
    train_src, train_tgt = to_batch([make_pair(rng, lex) for _ in range(6000)])
    val_src, val_tgt = to_batch([make_pair(rng, lex) for _ in range(200)])
    model = Translator()
    steps, per_epoch = 450, 125
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.7)
    smooth = 0.1 if CASE == "variant_x" else 0.0
    for step in range(steps):
        pick = torch.from_numpy(rng.integers(len(train_src), size=48))
        src, tgt = train_src[pick], train_tgt[pick]
        inp, gold = tgt[:, :-1], tgt[:, 1:]
        if CASE == "b1":
            inp = tgt[:, 1:]
        loss = F.cross_entropy(model(src, inp).flatten(0, 1), gold.flatten(), ignore_index=PAD,
                               label_smoothing=smooth)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        if CASE == "variant_x":
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
        opt.step()
        if CASE == "b4" or step % per_epoch == per_epoch - 1:
            sched.step()
        if step % 150 == 149:
            print("step %d  loss %.3f  exact match %.3f" % (step + 1, loss.item(), exact_match(model, val_src, val_tgt)))
    print("final held-out exact match %.4f" % exact_match(model, val_src, val_tgt))


if __name__ == "__main__":
    main()
