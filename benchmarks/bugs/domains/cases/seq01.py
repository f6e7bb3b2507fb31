"""Reverse-and-increment translation with a GRU encoder/decoder and additive attention."""
import random
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

PAD, BOS, EOS = 0, 1, 2


@dataclass
class Config:
    vocab: int = 20
    emb: int = 32
    hid: int = 48
    batch: int = 40
    steps: int = 180
    lr: float = 5e-3
    min_len: int = 4
    max_len: int = 9
    seed: int = 7


def make_pair(cfg, rng):
    n = rng.randint(cfg.min_len, cfg.max_len)
    src = [rng.randint(3, cfg.vocab - 1) for _ in range(n)]
    tgt = [3 + (t - 3 + 1) % (cfg.vocab - 3) for t in reversed(src)]
    return src, tgt + [EOS]


def collate(pairs):
    sl = max(len(s) for s, _ in pairs)
    tl = max(len(t) for _, t in pairs)
    src = torch.full((len(pairs), sl), PAD)
    tin = torch.full((len(pairs), tl), PAD)
    tout = torch.full((len(pairs), tl), PAD)
    for i, (s, t) in enumerate(pairs):
        src[i, :len(s)] = torch.tensor(s)
        tout[i, :len(t)] = torch.tensor(t)
        tin[i, 0] = BOS
        tin[i, 1:len(t)] = torch.tensor(t[:-1])
    return src, tin, tout


class Encoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.emb, padding_idx=PAD)
        self.rnn = nn.GRU(cfg.emb, cfg.hid, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * cfg.hid, cfg.hid)

    def forward(self, src):
        lengths = (src != PAD).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(src), lengths, batch_first=True, enforce_sorted=False)
        out, h = self.rnn(packed)
        out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=src.size(1))
        h = torch.tanh(self.bridge(torch.cat([h[0], h[1]], -1)))
        return out, h


class Attention(nn.Module):
    def __init__(self, hid):
        super().__init__()
        self.q = nn.Linear(hid, hid, bias=False)
        self.k = nn.Linear(2 * hid, hid, bias=False)
        self.v = nn.Linear(hid, 1, bias=False)

    def forward(self, query, memory, mask):
        e = self.v(torch.tanh(self.q(query).unsqueeze(1) + self.k(memory))).squeeze(-1)
        e = e.masked_fill(mask, -1e9)
        w = F.softmax(e, dim=-1)
        return torch.bmm(w.unsqueeze(1), memory).squeeze(1)


class Decoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.emb, padding_idx=PAD)
        self.cell = nn.GRUCell(cfg.emb + 2 * cfg.hid, cfg.hid)
        self.attn = Attention(cfg.hid)
        self.out = nn.Linear(3 * cfg.hid, cfg.vocab)

    def step(self, tok, h, memory, mask):
        ctx = self.attn(h, memory, mask)
        h = self.cell(torch.cat([self.embed(tok), ctx], -1), h)
        return self.out(torch.cat([h, ctx], -1)), h


class Seq2Seq(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.encoder = Encoder(cfg)
        self.decoder = Decoder(cfg)

    def forward(self, src, tin):
        memory, h = self.encoder(src)
        mask = src != PAD
        logits = []
        for t in range(tin.size(1)):
            o, h = self.decoder.step(tin[:, t], h, memory, mask)
            logits.append(o)
        return torch.stack(logits, 1)

    @torch.no_grad()
    def greedy(self, src, max_len):
        memory, h = self.encoder(src)
        mask = src != PAD
        tok = torch.full((src.size(0),), BOS)
        outs = []
        for _ in range(max_len):
            o, h = self.decoder.step(tok, h, memory, mask)
            tok = o.argmax(-1)
            outs.append(tok)
        return torch.stack(outs, 1)


def main():
    cfg = Config()
    torch.manual_seed(cfg.seed)
    rng = random.Random(cfg.seed)
    model = Seq2Seq(cfg)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for step in range(cfg.steps):
        src, tin, tout = collate([make_pair(cfg, rng) for _ in range(cfg.batch)])
        logits = model(src, tin)
        loss = F.cross_entropy(logits.flatten(0, 1), tout.flatten(), ignore_index=PAD)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 60 == 0:
            print(step, round(loss.item(), 4))
    model.eval()
    src, _, tout = collate([make_pair(cfg, random.Random(999 + i)) for i in range(200)])
    pred = model.greedy(src, tout.size(1))
    keep = tout != PAD
    return (pred[keep] == tout[keep]).float().mean().item()


if __name__ == "__main__":
    print(main())
