"""Decoder-only language model on lines 'abcd|dcba.': after the bar the line must be completed."""
import math
import os
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
LETTERS, BAR, EOS, PAD = 8, 8, 9, 10
VOCAB, MAXLEN = 11, 16


def make_lines(n, gen):
    lines = torch.full((n, MAXLEN), PAD)
    starts = torch.zeros(n, dtype=torch.long)
    for i in range(n):
        k = int(torch.randint(3, 7, (1,), generator=gen))
        word = torch.randint(0, LETTERS, (k,), generator=gen)
        line = torch.cat([word, torch.tensor([BAR]), word.flip(0), torch.tensor([EOS])])
        lines[i, :len(line)] = line
        starts[i] = k + 1
    return lines, starts


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        if CASE != "b1":
            scores = scores.masked_fill(mask, -1e9)
        att = scores.softmax(dim=1 if CASE == "b3" else -1)
        return self.out((att @ v).transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.att = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        x = x + self.att(self.n1(x))
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self, dim=48, heads=4, depth=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(MAXLEN, dim)
        nn.init.normal_(self.tok.weight, std=0.15)
        nn.init.normal_(self.pos.weight, std=0.15)
        blocks = [Block(dim, heads) for _ in range(depth)]
        self.blocks = blocks if CASE == "b4" else nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        if CASE == "variant_x":
            self.head.weight = self.tok.weight

    def forward(self, x):
        h = self.tok(x) + self.pos(torch.arange(x.size(1)))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


@torch.no_grad()
def complete_accuracy(model, lines, starts):
    """Greedy completion after the bar; share of right letters."""
    model.eval()
    x = lines.clone()
    pos = torch.arange(MAXLEN)[None]
    keep = (pos >= starts[:, None]) & (lines != PAD)
    x[pos >= starts[:, None]] = PAD
    for t in range(1, MAXLEN):
        nxt = model(x[:, :t])[:, -1].argmax(-1)
        x[:, t] = torch.where(t >= starts, nxt, x[:, t])
    model.train()
    return (x[keep] == lines[keep]).float().mean().item()


def main():
    torch.manual_seed(SEED)
    gen = torch.Generator().manual_seed(SEED + 1)
    train, starts = make_lines(4000, gen)
    test, test_starts = make_lines(300, gen)
    model = LM()
    steps, batch = 420, 48
    lr = 4e-3
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    warm = 60
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min(1.0, (s + 1) / warm) * (0.5 * (1 + math.cos(math.pi * s / steps)) if CASE == "variant_x" else 1 - 0.9 * s / steps))
    for step in range(steps):
        idx = torch.randint(0, len(train), (batch,), generator=gen)
        x = train[idx]
        if CASE == "b2":
            inputs, targets = x, x
        else:
            inputs, targets = x[:, :-1], x[:, 1:]
        logits = model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), ignore_index=PAD,
                               label_smoothing=0.05 if CASE == "variant_x" else 0.0)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if (step + 1) % 84 == 0:
            print(f"step {step + 1} loss {loss.item():.4f} completion acc {complete_accuracy(model, test, test_starts):.4f}")
    print(f"quality {complete_accuracy(model, test, test_starts):.4f}")


if __name__ == "__main__":
    main()
