import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from common import case, seed_all, acc

WORDS = ["the", "cat", "sat", "on", "mat", "dog", "ran", "far", "bird", "sang", "loud", "moon", "rose", "over", "hill"]


def make_text(n_words, seed):
    g = torch.Generator().manual_seed(seed)
    trans = torch.rand(len(WORDS), len(WORDS), generator=torch.Generator().manual_seed(7)) ** 6
    w, out = 0, []
    for _ in range(n_words):
        w = torch.multinomial(trans[w], 1, generator=g).item()
        out.append(WORDS[w])
    s = " ".join(out)
    chars = sorted(set("".join(WORDS) + " "))
    idx = {c: i for i, c in enumerate(chars)}
    return torch.tensor([idx[c] for c in s]), len(chars)


def windows(data, T, B):
    i = torch.randint(0, len(data) - T - 1, (B,))
    x = torch.stack([data[j:j + T] for j in i])
    y = torch.stack([data[j + 1:j + T + 1] for j in i])
    return x, y


# ---- seq_01
class CharModelA(nn.Module):
    def __init__(self, vocab, d=48, T=24):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(T, d)
        layer = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, vocab)

    def forward(self, x):
        T = x.size(1)
        h = self.tok(x) + self.pos(torch.arange(T))
        h = self.enc(h)
        return self.head(h)


@case("seq_01")
def seq_01(log):
    seed_all(1)
    data, V = make_text(4000, 0)
    val, _ = make_text(600, 1)
    model = CharModelA(V)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(220):
        x, y = windows(data, 24, 16)
        loss = F.cross_entropy(model(x).reshape(-1, V), y.reshape(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                vx, vy = windows(val, 24, 32)
                log("val_loss", F.cross_entropy(model(vx).reshape(-1, V), vy.reshape(-1)).item())
    model.eval()
    with torch.no_grad():
        vx, vy = windows(val, 16, 400)
        return -F.cross_entropy(model(vx)[:, -1], vy[:, -1]).item()


# ---- seq_02
class WaveNet1(nn.Module):
    def __init__(self, n_in, hidden, n_cls):
        super().__init__()
        self.lstm = nn.LSTM(n_in, hidden)
        self.fc = nn.Linear(hidden, n_cls)

    def forward(self, x):  # x: (batch, time, channels)
        out, _ = self.lstm(x)
        return self.fc(out[:, -1])


def make_waves(n, T, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    t = torch.arange(T).float()
    ph = torch.rand(n, 1, generator=g) * 6.28
    fr = (torch.tensor([0.2, 0.45, 0.8, 1.3])[y])[:, None]
    x = torch.stack([torch.sin(fr * t + ph), torch.cos(fr * t + ph)], -1)
    return x + 0.3 * torch.randn(x.shape, generator=g), y


@case("seq_02")
def seq_02(log):
    seed_all(2)
    X, y = make_waves(1600, 24, 0)
    Xv, yv = make_waves(400, 24, 1)
    loader = DataLoader(TensorDataset(X, y), batch_size=32, shuffle=True)
    net = WaveNet1(2, 48, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(5):
        net.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = criterion(net(xb), yb)
            loss.backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- seq_03
class PackedGRU(nn.Module):
    def __init__(self, vocab, d, h, n):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.gru = nn.GRU(d, h, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(2 * h, n)

    def forward(self, x, lengths):
        p = pack_padded_sequence(self.emb(x), lengths, batch_first=True, enforce_sorted=False)
        _, h = self.gru(p)
        return self.out(self.drop(torch.cat([h[0], h[1]], -1)))


def make_docs(n, seed, vocab=30, n_cls=3, lo=4, hi=25):
    g = torch.Generator().manual_seed(seed)
    seqs, ys = [], []
    for _ in range(n):
        L = torch.randint(lo, hi, (1,), generator=g).item()
        c = torch.randint(0, n_cls, (1,), generator=g).item()
        s = torch.randint(1, vocab, (L,), generator=g)
        m = torch.rand(L, generator=g) < 0.35
        s[m] = torch.randint(1 + 5 * c, 6 + 5 * c, (int(m.sum()),), generator=g)
        seqs.append(s)
        ys.append(c)
    return seqs, torch.tensor(ys)


@case("seq_03")
def seq_03(log):
    seed_all(3)
    seqs, y = make_docs(1200, 0)
    vs, vy = make_docs(300, 1)
    vl = torch.tensor([len(s) for s in vs])
    vx = pad_sequence(vs, batch_first=True)
    m = PackedGRU(30, 24, 24, 3)
    opt = torch.optim.Adam(m.parameters(), 3e-3)
    step = 0
    for ep in range(6):
        m.train()
        order = torch.randperm(len(seqs))
        for i in range(0, len(seqs), 36):
            idx = order[i:i + 36]
            b = [seqs[j] for j in idx]
            x = pad_sequence(b, batch_first=True)
            loss = F.cross_entropy(m(x, torch.tensor([len(s) for s in b])), y[idx])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            opt.step()
            step += 1
        m.eval()
        with torch.no_grad():
            o = m(vx, vl)
            log("val_loss", F.cross_entropy(o, vy).item())
            log("val_acc", acc(o, vy))
    return acc(o, vy)


# ---- seq_04
class TailRNN(nn.Module):
    def __init__(self, vocab=30, d=24, h=32, n=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.rnn = nn.RNN(d, h, batch_first=True)
        self.out = nn.Linear(h, n)

    def forward(self, x, lengths):
        hs, _ = self.rnn(self.emb(x))
        last = hs[:, -1]
        return self.out(last)


@case("seq_04")
def seq_04(log):
    seed_all(4)
    seqs, y = make_docs(1500, 3, lo=4, hi=12)
    vs, vy = make_docs(300, 4, lo=4, hi=12)
    T = 40  # fixed width of the serving graph

    def collate(items):
        x = torch.zeros(len(items), T, dtype=torch.long)
        for r, s in enumerate(items):
            x[r, :len(s)] = s
        return x, torch.tensor([len(s) for s in items])

    vx, vl = collate(vs)
    model = TailRNN()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(250):
        idx = torch.randint(0, len(seqs), (32,))
        x, l = collate([seqs[i] for i in idx.tolist()])
        logits = model(x, l)
        loss = F.cross_entropy(logits, y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(model(vx, vl), vy))
    with torch.no_grad():
        return acc(model(vx, vl), vy)


# ---- seq_05
class ClsEncoder(nn.Module):
    def __init__(self, vocab=30, d=32, n=3, T=25):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        nn.init.normal_(self.cls, std=0.02)
        self.pos = nn.Parameter(torch.randn(1, T + 1, d) * 0.02)
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.out = nn.Linear(d, n)

    def forward(self, x):
        h = torch.cat([self.cls.expand(len(x), -1, -1), self.tok(x)], 1)
        h = h + self.pos[:, :h.size(1)]
        mask = torch.cat([torch.zeros(len(x), 1), x], 1) != 0
        a, _ = self.attn(self.n1(h), self.n1(h), self.n1(h), key_padding_mask=mask)
        h = h + a
        h = h + self.ff(self.n2(h))
        return self.out(h[:, 0])


@case("seq_05")
def seq_05(log):
    seed_all(5)
    seqs, y = make_docs(1500, 5)
    vs, vy = make_docs(300, 6)
    X, vx = pad_sequence(seqs, batch_first=True), pad_sequence(vs, batch_first=True)
    net = ClsEncoder()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(250):
        i = torch.randint(0, len(X), (48,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 25 == 24:
            net.eval()
            with torch.no_grad():
                log("val_loss", F.cross_entropy(net(vx), vy).item())
            net.train()
    net.eval()
    with torch.no_grad():
        return acc(net(vx), vy)


# ---- seq_06
class Block6(nn.Module):
    def __init__(self, d, heads, T):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 3 * d), nn.GELU(), nn.Linear(3 * d, d))
        self.heads = heads
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.mlp[2].weight)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class TinyGPT6(nn.Module):
    def __init__(self, V, d=48, T=24):
        super().__init__()
        self.wte = nn.Embedding(V, d)
        self.wpe = nn.Embedding(T, d)
        self.blocks = nn.ModuleList([Block6(d, 4, T) for _ in range(2)])
        self.lnf = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, V, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.05)
        nn.init.normal_(self.wpe.weight, std=0.05)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for b in self.blocks:
            x = b(x)
        logits = self.lm_head(self.lnf(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


@case("seq_06")
def seq_06(log):
    seed_all(6)
    data, V = make_text(4000, 2)
    val, _ = make_text(600, 3)
    model = TinyGPT6(V)
    decay = [p for p in model.parameters() if p.dim() > 1]
    nodecay = [p for p in model.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}],
                            lr=4e-3, betas=(0.9, 0.95))
    total, warm = 240, 24
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: (s + 1) / warm if s < warm else 0.5 * (1 + math.cos(math.pi * (s - warm) / (total - warm))) * 0.95 + 0.05)
    for it in range(total):
        x, y = windows(data, 24, 20)
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if it % 30 == 0:
            model.eval()
            with torch.no_grad():
                vx, vy = windows(val, 24, 32)
                log("val_loss", model(vx, vy)[1].item())
            model.train()
    with torch.no_grad():
        vx, vy = windows(val, 16, 400)
        return -F.cross_entropy(model(vx)[0][:, -1], vy[:, -1]).item()


# ---- seq_07
class Seq2SeqG(nn.Module):
    def __init__(self, V, d=32, h=64):
        super().__init__()
        self.src = nn.Embedding(V, d)
        self.tgt = nn.Embedding(V, d)
        self.enc = nn.GRU(d, h, batch_first=True)
        self.dec = nn.GRU(d, h, batch_first=True)
        self.out = nn.Linear(h, V)

    def forward(self, src, dec_in):
        _, h = self.enc(self.src(src))
        o, _ = self.dec(self.tgt(dec_in), h)
        return self.out(o)

    @torch.no_grad()
    def greedy(self, src, n, bos):
        _, h = self.enc(self.src(src))
        t = torch.full((len(src), 1), bos)
        outs = []
        for _ in range(n):
            o, h = self.dec(self.tgt(t), h)
            t = self.out(o).argmax(-1)
            outs.append(t)
        return torch.cat(outs, 1)


BOS = 12


def make_rev(n, L=4):
    src = torch.randint(0, 12, (n, L))
    tgt = torch.cat([torch.full((n, 1), BOS), src.flip(1)], 1)
    return src, tgt


@case("seq_07")
def seq_07(log):
    seed_all(7)
    vs, vt = make_rev(300)
    model = Seq2SeqG(13)
    opt = torch.optim.Adam(model.parameters(), lr=6e-3)
    ce = nn.CrossEntropyLoss()
    for step in range(350):
        src, tgt = make_rev(64)
        dec_in, labels = tgt[:, 1:], tgt[:, 1:]
        logits = model(src, dec_in)
        loss = ce(logits.transpose(1, 2), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 49:
            with torch.no_grad():
                d_in, lab = vt[:, 1:], vt[:, 1:]
                log("val_loss", ce(model(vs, d_in).transpose(1, 2), lab).item())
    pred = model.greedy(vs, 4, BOS)
    return (pred == vt[:, 1:]).float().mean().item()


# ---- seq_08
class FirstSymbol(nn.Module):
    def __init__(self, V=8, h=48):
        super().__init__()
        self.emb = nn.Embedding(V, 16)
        self.cell = nn.GRUCell(16, h)
        self.head = nn.Linear(h, V)
        self.h = h

    def forward(self, x):
        h = torch.zeros(x.size(0), self.h)
        e = self.emb(x)
        for t in range(x.size(1)):
            h = self.cell(e[:, t], h.detach())
        return self.head(h)


@case("seq_08")
def seq_08(log):
    seed_all(8)
    model = FirstSymbol()
    opt = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    vx = torch.randint(0, 8, (300, 12))
    for step in range(300):
        x = torch.randint(0, 8, (64, 12))
        loss = F.cross_entropy(model(x), x[:, 0])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(model(vx), vx[:, 0]))
    with torch.no_grad():
        return acc(model(vx), vx[:, 0])


# ---- seq_09
class ReluRNN(nn.Module):
    def __init__(self, d_in, h, n):
        super().__init__()
        self.W = nn.Parameter(torch.randn(d_in, h) / math.sqrt(d_in))
        self.U = nn.Parameter(torch.randn(h, h))
        self.b = nn.Parameter(torch.zeros(h))
        self.V = nn.Linear(h, n)

    def forward(self, x):
        h = x.new_zeros(x.size(0), self.U.size(0))
        for t in range(x.size(1)):
            h = torch.relu(x[:, t] @ self.W + h @ self.U + self.b)
        return self.V(h)


@case("seq_09")
def seq_09(log):
    seed_all(9)
    X, y = make_waves(1500, 20, 5)
    Xv, yv = make_waves(300, 20, 6)
    net = ReluRNN(2, 48, 4)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(250):
        i = torch.randint(0, len(X), (40,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- seq_10
@case("seq_10")
def seq_10(log):
    seed_all(10)
    data, V = make_text(5000, 8)
    val, _ = make_text(400, 9)
    B, T = 16, 20
    n = (len(data) - 1) // B
    X, Y = data[:n * B].view(B, n), data[1:n * B + 1].view(B, n)
    emb, rnn, dec = nn.Embedding(V, 32), nn.LSTM(32, 64, batch_first=True), nn.Linear(64, V)
    params = [*emb.parameters(), *rnn.parameters(), *dec.parameters()]
    opt = torch.optim.Adam(params, lr=4e-3)
    state, pos = None, 0
    for step in range(260):
        if pos + T > n:
            state, pos = None, 0
        x, y = X[:, pos:pos + T], Y[:, pos:pos + T]
        pos += T
        if state is not None:
            state = tuple(s.detach() for s in state)
        o, state = rnn(emb(x), state)
        loss = F.cross_entropy(dec(o).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
        if step % 40 == 0:
            with torch.no_grad():
                o, _ = rnn(emb(val[None, :400]))
                log("val_bpc", F.cross_entropy(dec(o)[0], val[1:401]).item() / math.log(2))
    with torch.no_grad():
        o, _ = rnn(emb(val[None, :1000]))
        return -F.cross_entropy(dec(o)[0], val[1:1001]).item()


# ---- seq_11
class PosEnc(nn.Module):
    def __init__(self, d, max_len=100):
        super().__init__()
        pos = torch.arange(max_len).unsqueeze(1)
        div = torch.exp(torch.arange(0, d, 2) * (-math.log(100.0) / d))
        pe = torch.zeros(max_len, 1, d)
        pe[:, 0, 0::2] = torch.sin(pos * div)
        pe[:, 0, 1::2] = torch.cos(pos * div)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[:x.size(0)]


class OrderNet(nn.Module):
    def __init__(self, V=20, d=32):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.pe = PosEnc(d)
        layer = nn.TransformerEncoderLayer(d, 4, 64, 0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2)
        self.fc = nn.Linear(d, 2)

    def forward(self, x):
        return self.fc(self.enc(self.pe(self.emb(x))).mean(1))


def make_order(n, T=10):
    x = torch.randint(2, 20, (n, T))
    p = torch.stack([torch.randperm(T)[:2] for _ in range(n)])
    x[torch.arange(n), p[:, 0]] = 0
    x[torch.arange(n), p[:, 1]] = 1
    return x, (p[:, 0] < p[:, 1]).long()


@case("seq_11")
def seq_11(log):
    seed_all(11)
    X, y = make_order(3000)
    Xv, yv = make_order(80)
    model = OrderNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(250):
        i = torch.randint(0, len(X), (32,))
        loss = nn.functional.cross_entropy(model(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            model.eval()
            with torch.no_grad():
                log("val_loss", F.cross_entropy(model(Xv), yv).item())
            model.train()
    model.eval()
    with torch.no_grad():
        return acc(model(Xv), yv)


# ---- seq_12
class AttnSeq2Seq(nn.Module):
    def __init__(self, V, d=32, h=48):
        super().__init__()
        self.emb = nn.Embedding(V, d, padding_idx=0)
        self.enc = nn.GRU(d, h, batch_first=True)
        self.dec = nn.GRU(d, h, batch_first=True)
        self.out = nn.Linear(2 * h, V)

    def forward(self, src, dec_in):
        m, hn = self.enc(self.emb(src))
        q, _ = self.dec(self.emb(dec_in), hn)
        s = q @ m.transpose(1, 2) / m.size(-1) ** 0.5
        s = s.masked_fill((src == 0)[:, None], -1e9)
        return self.out(torch.cat([q, s.softmax(-1) @ m], -1))


@case("seq_12")
def seq_12(log):
    seed_all(12)
    V, bos = 12, 11

    def batch(n):
        L = torch.randint(3, 7, (n,))
        src = torch.randint(1, 11, (n, 6))
        src = src * (torch.arange(6)[None] < L[:, None])
        tgt = torch.where(src > 0, (src % 10) + 1, torch.zeros_like(src))
        dec = torch.cat([torch.full((n, 1), bos), tgt[:, :-1]], 1)
        return src, dec, tgt

    model = AttnSeq2Seq(V)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    crit = nn.CrossEntropyLoss(ignore_index=0)
    vs, vd, vt = batch(200)
    for step in range(280):
        s, d, t = batch(48)
        loss = crit(model(s, d).view(-1, V), t.view(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 40 == 0:
            with torch.no_grad():
                log("val_loss", crit(model(vs, vd).view(-1, V), vt.view(-1)).item())
    with torch.no_grad():
        p = model(vs, vd).argmax(-1)
        return (p == vt)[vt > 0].float().mean().item()


# ---- seq_13
class SelfAttn13(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.heads = heads

    def forward(self, x):
        B, T, C = x.shape
        shape = (B, T, self.heads, C // self.heads)
        q, k, v = self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(shape)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.reshape(B, T, C))


class Tagger13(nn.Module):
    def __init__(self, V=16, d=32, T=12):
        super().__init__()
        self.emb, self.pos = nn.Embedding(V, d), nn.Embedding(T, d)
        self.a1, self.a2 = SelfAttn13(d, 4), SelfAttn13(d, 4)
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, d))
        self.fc = nn.Linear(d, V)

    def forward(self, x):
        h = self.emb(x) + self.pos.weight
        h = h + self.a1(self.n1(h))
        h = h + self.ff(self.n2(h))
        h = h + self.a2(self.n3(h))
        return self.fc(h)


@case("seq_13")
def seq_13(log):
    """Every position has to output the token of the mirrored position."""
    seed_all(13)
    net = Tagger13()
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
    vx = torch.randint(0, 16, (200, 12))
    for step in range(280):
        x = torch.randint(0, 16, (48, 12))
        loss = F.cross_entropy(net(x).flatten(0, 1), x.flip(1).flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_loss", F.cross_entropy(net(vx).flatten(0, 1), vx.flip(1).flatten()).item())
    with torch.no_grad():
        return acc(net(vx), vx.flip(1))


# ---- seq_14
@case("seq_14")
def seq_14(log):
    seed_all(14)
    X, y = make_order(1600)
    Xv, yv = make_order(300)
    d = 32
    emb, pos = nn.Embedding(20, d), nn.Embedding(10, d)
    enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 4, 64, 0.1, batch_first=True), 2)
    fc = nn.Linear(d, 2)
    net = nn.ModuleList([emb, pos, enc, fc])

    def forward(x):
        return fc(enc(emb(x) + pos.weight).mean(1))

    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    warmup_steps = 50 * 6
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / warmup_steps))
    loader = DataLoader(TensorDataset(X, y), batch_size=32, shuffle=True)
    for epoch in range(6):
        net.train()
        for xb, yb in loader:
            loss = F.cross_entropy(forward(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        scheduler.step()
        net.eval()
        with torch.no_grad():
            log("val_loss", F.cross_entropy(forward(Xv), yv).item())
    with torch.no_grad():
        return acc(forward(Xv), yv)


# ---- seq_15
class TagLSTM(nn.Module):
    def __init__(self, V, n_tags):
        super().__init__()
        self.emb = nn.Embedding(V, 24)
        self.lstm = nn.LSTM(24, 32, bidirectional=True)
        self.fc = nn.Linear(64, n_tags)

    def forward(self, x):  # (batch, time)
        e = self.emb(x).transpose(0, 1)
        out, _ = self.lstm(e)
        return self.fc(out)


@case("seq_15")
def seq_15(log):
    seed_all(15)
    V, n_tags = 40, 5
    table = torch.randint(0, n_tags, (V,))

    def batch(n):
        x = torch.randint(0, V, (n, 14))
        prev = torch.cat([torch.zeros(n, 1, dtype=torch.long), x[:, :-1]], 1)
        return x, (table[x] + (prev % 2)) % n_tags

    vx, vy = batch(100)
    model = TagLSTM(V, n_tags)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(260):
        x, y = batch(32)
        scores = model(x)
        loss = F.cross_entropy(scores.reshape(-1, n_tags), y.reshape(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_loss", F.cross_entropy(model(vx).reshape(-1, n_tags), vy.reshape(-1)).item())
    with torch.no_grad():
        return acc(model(vx).transpose(0, 1), vy)
