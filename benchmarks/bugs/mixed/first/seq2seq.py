"""GRU encoder-decoder with attention: reverse a sequence and map each symbol by a fixed table."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", "0"))

PAD, BOS, EOS = 0, 1, 2
NSYM, VOCAB, MAXL = 16, 19, 9


def make_data(n, rng, table):
    src = np.zeros((n, MAXL), dtype=np.int64)
    tgt = np.zeros((n, MAXL + 2), dtype=np.int64)
    for i in range(n):
        L = rng.integers(3, MAXL + 1)
        s = rng.integers(0, NSYM, L)
        src[i, :L] = s + 3
        tgt[i, : L + 2] = [BOS] + list(table[s[::-1]] + 3) + [EOS]
    return torch.as_tensor(src), torch.as_tensor(tgt)


class Encoder(nn.Module):
    def __init__(self, dim, hid):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        if CASE == "c4":
            self.rnn = nn.GRU(dim, hid, bidirectional=True)
        else:
            self.rnn = nn.GRU(dim, hid, bidirectional=True, batch_first=True)
        self.proj = nn.Linear(2 * hid, hid)

    def forward(self, src):
        out, _ = self.rnn(self.emb(src))
        out = self.proj(out)
        valid = (src != PAD).unsqueeze(-1).float()
        summary = (out * valid).sum(1) / valid.sum(1)
        return out, torch.tanh(summary)


class Decoder(nn.Module):
    def __init__(self, dim, hid):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.cell = nn.GRUCell(dim + hid, hid)
        self.query = nn.Linear(hid, hid)
        self.out = nn.Linear(2 * hid, VOCAB)

    def attend(self, h, enc, mask):
        score = torch.einsum("bh,bth->bt", self.query(h), enc) / enc.shape[-1] ** 0.5
        if CASE == "c2":
            score = score.masked_fill(mask, -1e9)
        else:
            score = score.masked_fill(~mask, -1e9)
        if CASE == "c1":
            w = score.softmax(dim=0)
        else:
            w = score.softmax(dim=1)
        return torch.einsum("bt,bth->bh", w, enc)

    def forward(self, tok, h, ctx, enc, mask):
        h = self.cell(torch.cat([self.emb(tok), ctx], -1), h)
        ctx = self.attend(h, enc, mask)
        return self.out(torch.cat([h, ctx], -1)), h, ctx


class Seq2Seq(nn.Module):
    def __init__(self, dim=32, hid=64):
        super().__init__()
        self.encoder = Encoder(dim, hid)
        self.decoder = Decoder(dim, hid)

    def forward(self, src, tgt, mix=0.0):
        enc, h = self.encoder(src)
        mask = src != PAD
        ctx = torch.zeros_like(h)
        logits = []
        tok = tgt[:, 0]
        for t in range(tgt.shape[1] - 1):
            if CASE == "c3":
                tok = tgt[:, t + 1]
            else:
                tok = tgt[:, t] if t == 0 or torch.rand(()) >= mix else logits[-1].argmax(-1)
            o, h, ctx = self.decoder(tok, h, ctx, enc, mask)
            logits.append(o)
        return torch.stack(logits, 1)

    @torch.no_grad()
    def translate(self, src, steps):
        enc, h = self.encoder(src)
        mask = src != PAD
        ctx = torch.zeros_like(h)
        tok = torch.full((len(src),), BOS)
        out = []
        for _ in range(steps):
            o, h, ctx = self.decoder(tok, h, ctx, enc, mask)
            tok = o.argmax(-1)
            out.append(tok)
        return torch.stack(out, 1)


def quality(model, src, tgt):
    model.eval()
    out = torch.cat([model.translate(s, tgt.shape[1] - 1) for s in src.split(50)])
    gold = tgt[:, 1:]
    valid = gold != PAD
    return ((out == gold) & valid).sum().item() / valid.sum().item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    table = np.random.default_rng(5).permutation(NSYM)
    src, tgt = make_data(8000, rng, table)
    vsrc, vtgt = make_data(500, rng, table)
    model = Seq2Seq()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    accum = 2 if CASE == "variant_x" else 1
    steps = 600
    for step in range(steps):
        model.train()
        opt.zero_grad()
        for _ in range(accum):
            idx = torch.randint(len(src), (64 // accum,))
            mix = 0.25 * step / steps if CASE == "variant_x" else 0.0
            logits = model(src[idx], tgt[idx], mix)
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), tgt[idx][:, 1:].reshape(-1), ignore_index=PAD)
            (loss / accum).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 150 == 149:
            print(f"step {step + 1} loss {loss.item():.4f} held-out token acc {quality(model, vsrc, vtgt):.4f}")
    print(f"FINAL quality (held-out token accuracy, free running) {quality(model, vsrc, vtgt):.4f}")


if __name__ == "__main__":
    main()
