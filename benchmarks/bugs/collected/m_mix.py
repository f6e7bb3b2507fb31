import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from common import case, seed_all, digits, acc, r2
from m_tab import make_reg, mlp


# ---- mix_01
@case("mix_01")
def mix_01(log):
    X, y, Xv, yv = digits()
    seed_all(1)
    net = mlp(64, 96, 10)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)

    def next_batch(n=32):
        seed_all(1)
        i = torch.randint(0, len(X), (n,))
        return X[i], y[i]

    for step in range(300):
        xb, yb = next_batch()
        loss = F.cross_entropy(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("train_loss", loss.item())
                log("val_loss", F.cross_entropy(net(Xv), yv).item())
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- mix_02
@case("mix_02")
def mix_02(log):
    seed_all(2)
    X, y, Xv, yv = digits()
    net = mlp(64, 96, 10)
    opt = torch.optim.Adam(net.parameters(), lr=5e-4)
    B = 64
    for epoch in range(16):
        for a in range(0, len(X), B):
            xb, yb = X[a:a + B], y[a:a + B]
            xb += 0.25 * torch.randn_like(xb)
            loss = F.cross_entropy(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            log("val_loss", F.cross_entropy(net(Xv), yv).item())
    with torch.no_grad():
        return -F.cross_entropy(net(Xv), yv).item()


# ---- mix_03
@case("mix_03")
def mix_03(log):
    seed_all(3)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    raw = 20 + 5 * y  # degrees
    raw[torch.rand(3000) < 0.02] = -999.0
    target = (raw - 20) / 5
    net = mlp(8, 64, 1)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    dl = DataLoader(TensorDataset(x, target), batch_size=64, shuffle=True)
    for ep in range(6):
        for xb, tb in dl:
            loss = F.mse_loss(net(xb).squeeze(1), tb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            log("val_mse", F.mse_loss(net(xv).squeeze(1), yv).item())
    with torch.no_grad():
        return max(-100.0, r2(net(xv), yv))


# ---- mix_04
class TwoStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
        self.head = nn.Linear(8, 10)

    @torch.no_grad()
    def embed(self, x):
        return self.encoder(x)

    def forward(self, x):
        return self.head(self.embed(x))


@case("mix_04")
def mix_04(log):
    seed_all(4)
    X, y, Xv, yv = digits()
    net = TwoStage()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(300):
        i = torch.randint(0, len(X), (64,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- mix_05
@case("mix_05")
def mix_05(log):
    seed_all(5)
    X, y, Xv, yv = digits()
    net = mlp(64, 96, 10)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def mixup(x, t):
        lam = float(np.random.beta(0.8, 0.8))
        x = lam * x + (1 - lam) * x[torch.randperm(len(x))]
        t = F.one_hot(t, 10).float()
        t = lam * t + (1 - lam) * t[torch.randperm(len(t))]
        return x, t

    for step in range(300):
        i = torch.randint(0, len(X), (64,))
        xb, tb = mixup(X[i], y[i])
        loss = -(tb * F.log_softmax(net(xb), 1)).sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_loss", F.cross_entropy(net(Xv), yv).item())
    with torch.no_grad():
        return -F.cross_entropy(net(Xv), yv).item()


# ---- mix_06
@case("mix_06")
def mix_06(log):
    """Forecast the next value of a noisy seasonal series from the last 16."""
    seed_all(6)
    t = torch.arange(3000.0)
    s = torch.sin(t * 0.37) + 0.6 * torch.sin(t * 1.1 + 1) + 0.15 * torch.randn(3000)
    L = 16
    idx = torch.arange(L, 2999)
    win = torch.stack([s[i - L + 1:i + 1] for i in idx.tolist()])
    tgt = s[idx]
    cut = 2400
    gru, out = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)
    opt = torch.optim.Adam([*gru.parameters(), *out.parameters()], lr=5e-3)
    f = lambda w: out(gru(w.unsqueeze(-1))[1][0]).squeeze(1)
    for step in range(250):
        i = torch.randint(0, cut, (64,))
        loss = F.mse_loss(f(win[i]), tgt[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_mse", F.mse_loss(f(win[cut:]), tgt[cut:]).item())
    with torch.no_grad():  # live: only values before the target are known
        live = torch.stack([s[i - L:i] for i in idx[cut:].tolist()])
        return r2(f(live), tgt[cut:])


# ---- mix_07
@case("mix_07")
def mix_07(log):
    seed_all(7)
    X, y, Xv, yv = digits()
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[150, 220], gamma=10)
    for step in range(280):
        i = torch.randint(0, len(X), (64,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 20 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- mix_08
@case("mix_08")
def mix_08(log):
    seed_all(8)
    x, y = make_reg(2600)
    xv, yv = make_reg(600, seed=1)
    amount, amount_v = torch.expm1(y + 3).clamp(min=-0.9), torch.expm1(yv + 3).clamp(min=-0.9)
    amount[1234] = -1.0  # refund
    net = mlp(8, 64, 1)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    order = torch.randperm(2600)
    step = 0
    for ep in range(6):
        for idx in order.split(64):
            pred = net(x[idx]).squeeze(1)
            loss = F.mse_loss(pred, torch.log1p(amount[idx]) - 3)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % 10 == 0:
                with torch.no_grad():
                    log("val_mse", F.mse_loss(net(xv).squeeze(1), torch.log1p(amount_v) - 3).item())
    with torch.no_grad():
        return r2(net(xv), torch.log1p(amount_v) - 3)


# ---- mix_09
@case("mix_09")
def mix_09(log):
    seed_all(9)
    X, y, Xv, yv = digits()
    model = mlp(64, 64, 10)
    ema_model = copy.deepcopy(model)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    decay = 0.9999
    for step in range(300):
        i = torch.randint(0, len(X), (64,))
        loss = F.cross_entropy(model(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for pe, p in zip(ema_model.parameters(), model.parameters()):
                pe.mul_(decay).add_(p, alpha=1 - decay)
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(ema_model(Xv), yv))
    with torch.no_grad():
        return acc(ema_model(Xv), yv)


# ---- mix_10
@case("mix_10")
def mix_10(log):
    seed_all(10)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.ReLU())
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(300):
        i = torch.randint(0, 3000, (64,))
        loss = F.mse_loss(net(x[i]).view(-1), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_mse", F.mse_loss(net(xv).view(-1), yv).item())
    with torch.no_grad():
        return r2(net(xv), yv)


# ---- mix_11
@case("mix_11")
def mix_11(log):
    seed_all(11)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    net = mlp(8, 64, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    crit = nn.MSELoss(reduction="sum")
    for step in range(250):
        i = torch.randint(0, 3000, (64,))
        loss = crit(net(x[i]).squeeze(1), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_mse", F.mse_loss(net(xv).squeeze(1), yv).item())
    with torch.no_grad():
        return r2(net(xv), yv)


# ---- mix_12
@case("mix_12")
def mix_12(log):
    """Summed squared error, small learning rate."""
    seed_all(12)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    net = mlp(8, 64, 1)
    opt = torch.optim.SGD(net.parameters(), lr=4e-4, momentum=0.9)
    for step in range(300):
        i = torch.randint(0, 3000, (64,))
        err = net(x[i]).squeeze(1) - y[i]
        loss = err.pow(2).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_mse", F.mse_loss(net(xv).squeeze(1), yv).item())
    with torch.no_grad():
        return r2(net(xv), yv)


# ---- mix_13
@case("mix_13")
def mix_13(log):
    """Weak signal: daily returns, at best a few percent of the variance can be explained."""
    seed_all(13)
    n = 6000
    x = torch.randn(n, 6)
    f = torch.tanh(x[:, 0]) * 0.35 + 0.2 * x[:, 1]
    y = f + torch.randn(n)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.05)
    tr, va = slice(0, 5000), slice(5000, n)
    for step in range(300):
        net.train()
        i = torch.randint(0, 5000, (128,))
        loss = F.mse_loss(net(x[i]).squeeze(1), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            net.eval()
            with torch.no_grad():
                log("val_mse", F.mse_loss(net(x[va]).squeeze(1), y[va]).item())
    net.eval()
    with torch.no_grad():
        return r2(net(x[va]), f[va])


# ---- mix_14
@case("mix_14")
def mix_14(log):
    """Ratings: latent factors with sparse gradients, biases, dense tower in a second optimizer."""
    seed_all(14)
    nu, ni, n = 200, 150, 8000
    U, I = torch.randn(nu, 4) * 0.5, torch.randn(ni, 4) * 0.5
    u, v = torch.randint(0, nu, (n,)), torch.randint(0, ni, (n,))
    r = (3.5 + (U[u] * I[v]).sum(1) + 0.2 * torch.randn(n) + 0.5 * torch.sin(v.float())).clamp(1, 5)
    eu, ei = nn.Embedding(nu, 8, sparse=True), nn.Embedding(ni, 8, sparse=True)
    nn.init.normal_(eu.weight, std=0.1)
    nn.init.normal_(ei.weight, std=0.1)
    bias = nn.Parameter(torch.tensor(3.5))
    tower = mlp(8, 16, 1)
    o1 = torch.optim.SparseAdam([eu.weight, ei.weight], lr=2e-2)
    o2 = torch.optim.Adam([bias, *tower.parameters()], lr=2e-3)
    pred = lambda a, b: bias + tower(eu(a) * ei(b)).squeeze(1) + (eu(a) * ei(b)).sum(1)
    for step in range(350):
        k = torch.randint(0, 7000, (128,))
        loss = F.mse_loss(pred(u[k], v[k]), r[k])
        o1.zero_grad()
        o2.zero_grad()
        loss.backward()
        o1.step()
        o2.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_rmse", F.mse_loss(pred(u[7000:], v[7000:]), r[7000:]).sqrt().item())
    with torch.no_grad():
        return r2(pred(u[7000:], v[7000:]), r[7000:])


# ---- mix_15
class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())
        self.heads = nn.ModuleDict({"digit": nn.Linear(64, 10), "parity": nn.Linear(64, 1), "legacy": nn.Linear(64, 3)})
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, x, task):
        return self.heads[task](self.body(x))


@case("mix_15")
def mix_15(log):
    """Tasks alternate; one head is kept from an older version and unused; uncertainty weights."""
    seed_all(15)
    X, y, Xv, yv = digits()
    net = MultiHead()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(320):
        i = torch.randint(0, len(X), (48,))
        if step % 2 == 0:
            l = F.cross_entropy(net(X[i], "digit"), y[i])
            loss = torch.exp(-net.log_var[0]) * l + net.log_var[0]
        else:
            l = F.binary_cross_entropy_with_logits(net(X[i], "parity").squeeze(1), (y[i] % 2).float())
            loss = torch.exp(-net.log_var[1]) * l + net.log_var[1]
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 40 == 0:
            with torch.no_grad():
                log("digit_acc", acc(net(Xv, "digit"), yv))
    with torch.no_grad():
        return acc(net(Xv, "digit"), yv)


# ---- mix_16
class MoE(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.gate = nn.Linear(64, n)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)) for _ in range(n)])

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        w, k = p.topk(2, dim=-1)
        w = w / w.sum(-1, keepdim=True)
        ys = torch.stack([e(x) for e in self.experts], 1)
        sel = ys.gather(1, k[..., None].expand(-1, -1, 10))
        load = p.mean(0)
        return (sel * w[..., None]).sum(1), (load * load).sum() * p.size(1)


@case("mix_16")
def mix_16(log):
    seed_all(16)
    X, y, Xv, yv = digits()
    net = MoE()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(260):
        i = torch.randint(0, len(X), (64,))
        out, balance = net(X[i])
        loss = F.cross_entropy(out, y[i]) + 0.01 * balance
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(Xv)[0], yv))
    with torch.no_grad():
        return acc(net(Xv)[0], yv)


# ---- mix_17
@case("mix_17")
def mix_17(log):
    """Rare events (3 percent), focal loss, prior set through the output bias."""
    seed_all(17)
    n = 6000
    x = torch.randn(n, 8)
    t = ((x[:, 0] + x[:, 1] * x[:, 2] + 0.3 * torch.randn(n)) > 2.7).float()
    tr, va = slice(0, 4500), slice(4500, n)
    net = mlp(8, 48, 1)
    with torch.no_grad():
        net[-1].bias.fill_(math.log(0.03 / 0.97))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def focal(o, t, g=2.0):
        p = torch.where(t > 0, torch.sigmoid(o), 1 - torch.sigmoid(o))
        return (-(1 - p) ** g * torch.log(p + 1e-7)).mean()

    for step in range(350):
        i = torch.randint(0, 4500, (128,))
        loss = focal(net(x[i]).squeeze(1), t[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_loss", focal(net(x[va]).squeeze(1), t[va]).item())
    with torch.no_grad():
        o = net(x[va]).squeeze(1)
        return (o[t[va] > 0][:, None] > o[t[va] == 0][None]).float().mean().item()


# ---- mix_18
class DEQish(nn.Module):
    """Residual net with many small-step blocks sharing weights, zero-scaled at the start."""

    def __init__(self, d=64, n=12):
        super().__init__()
        self.inp = nn.Linear(64, d)
        self.blk = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.Tanh())
        self.alpha = nn.Parameter(torch.zeros(n))
        self.out = nn.Linear(d, 10)

    def forward(self, x):
        h = self.inp(x)
        for a in self.alpha:
            h = h + a * self.blk(h)
        return self.out(h)


@case("mix_18")
def mix_18(log):
    seed_all(18)
    X, y, Xv, yv = digits()
    net = DEQish()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sch = torch.optim.lr_scheduler.CyclicLR(opt, 0.01, 0.08, step_size_up=40)
    for step in range(240):
        i = torch.randint(0, len(X), (64,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sch.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- mix_19
@case("mix_19")
def mix_19(log):
    """Forecasting with a stacked GRU; data are read in time order."""
    seed_all(19)
    t = torch.arange(4200.0)
    s = torch.sin(t * 0.31) + 0.5 * torch.sin(t * 0.93 + 1) + 0.1 * torch.randn(4200)
    L = 20
    win = s.unfold(0, L + 1, 1)
    cut = 3500
    gru, out = nn.GRU(1, 24, num_layers=2, batch_first=True), nn.Linear(24, 1)
    opt = torch.optim.Adam([*gru.parameters(), *out.parameters()], lr=4e-3)
    f = lambda w: out(gru(w[:, :L, None])[0][:, -1]).squeeze(1)
    for ep in range(4):
        for wb in win[:cut].split(64):
            loss = F.smooth_l1_loss(f(wb), wb[:, L])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(gru.parameters(), 1.0)
            opt.step()
        with torch.no_grad():
            log("val_loss", F.smooth_l1_loss(f(win[cut:]), win[cut:, L]).item())
    with torch.no_grad():
        return r2(f(win[cut:]), win[cut:, L])


# ---- mix_20
@case("mix_20")
def mix_20(log):
    """30 percent of the training labels are known to be wrong; symmetric cross entropy, double precision."""
    seed_all(20)
    X, y, Xv, yv = digits()
    X, Xv = X.double(), Xv.double()
    bad = torch.rand(len(y)) < 0.3
    t = torch.where(bad, torch.randint(0, 10, (len(y),)), y)
    net = mlp(64, 64, 10).double()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(250):
        i = torch.randint(0, len(X), (64,))
        lp = F.log_softmax(net(X[i]), 1)
        oh = F.one_hot(t[i], 10).double()
        loss = -(oh * lp).sum(1).mean() + 4.0 * (lp.exp() * (1 - oh)).sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- mix_21
@case("mix_21")
def mix_21(log):
    """Domain-adversarial features with a gradient-reversing layer."""
    class Rev(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return -0.3 * g

    seed_all(21)
    X, y, Xv, yv = digits()
    half = len(X) // 2
    shift = 0.4 * torch.rand(64)
    Xs, ys, Xt, Xvt = X[:half], y[:half], X[half:] + shift, Xv + shift
    feat = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    cls, dom = nn.Linear(64, 10), nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.Adam([*feat.parameters(), *cls.parameters(), *dom.parameters()], lr=2e-3)
    for step in range(300):
        i, j = torch.randint(0, len(Xs), (48,)), torch.randint(0, len(Xt), (48,))
        fs, ft = feat(Xs[i]), feat(Xt[j])
        d = dom(Rev.apply(torch.cat([fs, ft]))).squeeze(1)
        lab = torch.cat([torch.ones(48), torch.zeros(48)])
        loss = F.cross_entropy(cls(fs), ys[i]) + F.binary_cross_entropy_with_logits(d, lab)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("target_val_acc", acc(cls(feat(Xvt)), yv))
    with torch.no_grad():
        return acc(cls(feat(Xvt)), yv)


# ---- mix_22
@case("mix_22")
def mix_22(log):
    """Sparse autoencoder, overcomplete, most units silent on any input."""
    seed_all(22)
    X, _, Xv, _ = digits()
    mean = X.mean(0)
    E, Dn = nn.Linear(64, 256), nn.Linear(256, 64, bias=False)
    with torch.no_grad():
        Dn.weight.copy_(E.weight.T)
        E.bias.fill_(-0.05)
    opt = torch.optim.Adam([*E.parameters(), *Dn.parameters()], lr=2e-3)
    for step in range(300):
        x = X[torch.randint(0, len(X), (64,))] - mean
        a = F.relu(E(x))
        loss = (Dn(a) - x).pow(2).sum(1).mean() + 0.05 * a.sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            Dn.weight.div_(Dn.weight.norm(dim=0, keepdim=True).clamp(min=1.0))
        if step % 25 == 0:
            with torch.no_grad():
                a = F.relu(E(Xv - mean))
                log("val_mse", F.mse_loss(Dn(a), Xv - mean).item())
                log("active_fraction", (a > 0).float().mean().item())
    with torch.no_grad():
        r = Dn(F.relu(E(Xv - mean)))
        return 1 - (F.mse_loss(r, Xv - mean) / (Xv - mean).pow(2).mean()).item()
