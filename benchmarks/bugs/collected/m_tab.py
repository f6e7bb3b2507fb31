import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from common import case, seed_all, acc, r2


def make_reg(n, d=8, noise=0.2, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    y = torch.sin(1.5 * x[:, 0]) + x[:, 1] * x[:, 2] * 0.7 + 0.8 * x[:, 3] + noise * torch.randn(n, generator=g)
    return x, y


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


# ---- tab_01
@case("tab_01")
def tab_01(log):
    seed_all(1)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    net = mlp(8, 64, 1)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    loss_fn = lambda p, t: ((p - t) ** 2).mean()
    for step in range(300):
        i = torch.randint(0, 3000, (64,))
        loss = loss_fn(net(x[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_r2", r2(net(xv), yv))
    with torch.no_grad():
        return r2(net(xv), yv)


# ---- tab_02
@case("tab_02")
def tab_02(log):
    seed_all(2)
    x, y = make_reg(2400)
    xv, yv = make_reg(600, seed=1)
    price, price_v = 240_000 + 60_000 * y, 240_000 + 60_000 * yv
    dl = DataLoader(TensorDataset(x, price), batch_size=64, shuffle=True)
    net = mlp(8, 64, 1)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    crit = nn.MSELoss()
    for epoch in range(8):
        for xb, yb in dl:
            opt.zero_grad()
            loss = crit(net(xb).squeeze(-1), yb)
            loss.backward()
            opt.step()
        with torch.no_grad():
            log("val_rmse", crit(net(xv).squeeze(-1), price_v).sqrt().item())
    with torch.no_grad():
        return r2(net(xv), price_v)


# ---- tab_03
@case("tab_03")
def tab_03(log):
    seed_all(3)
    x, y = make_reg(2500)
    xv, yv = make_reg(600, seed=1)
    price, price_v = 240_000 + 60_000 * y, 240_000 + 60_000 * yv
    mu, sd = price.mean(), price.std()
    dl = DataLoader(TensorDataset(x, price), batch_size=64, shuffle=True)
    net = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.02)
    sch = torch.optim.lr_scheduler.OneCycleLR(opt, 8e-3, total_steps=8 * len(dl))
    for epoch in range(8):
        net.train()
        for xb, yb in dl:
            opt.zero_grad()
            loss = F.smooth_l1_loss(net(xb).squeeze(-1), (yb - mu) / sd)
            loss.backward()
            opt.step()
            sch.step()
        net.eval()
        with torch.no_grad():
            log("val_rmse_usd", ((net(xv).squeeze(-1) * sd + mu - price_v) ** 2).mean().sqrt().item())
    with torch.no_grad():
        return r2(net(xv).squeeze(-1) * sd + mu, price_v)


# ---- tab_04
@case("tab_04")
def tab_04(log):
    seed_all(4)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    x, y = x.numpy(), y.numpy()
    np.random.shuffle(x)
    np.random.shuffle(y)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    net = mlp(8, 64, 1)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    step = 0
    for epoch in range(6):
        for i in range(0, len(x), 64):
            pred = net(x[i:i + 64])[:, 0]
            loss = F.mse_loss(pred, y[i:i + 64])
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        with torch.no_grad():
            log("val_mse", F.mse_loss(net(xv)[:, 0], yv).item())
    with torch.no_grad():
        return r2(net(xv), yv)


# ---- tab_05
@case("tab_05")
def tab_05(log):
    seed_all(5)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    scale = torch.ones(8)
    scale[5] = 40_000.0
    offset = torch.zeros(8)
    offset[5] = 1_600_000.0  # account creation time, minutes
    x, xv = x * scale + offset, xv * scale + offset
    net = mlp(8, 64, 1)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
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
        return max(-100.0, r2(net(xv), yv))


# ---- tab_06
class Scorer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.out = nn.Linear(48, 1)

    def forward(self, x):
        return torch.sigmoid(self.out(self.body(x))).squeeze(1)


@case("tab_06")
def tab_06(log):
    seed_all(6)
    x, y = make_reg(3000, noise=0.1)
    xv, yv = make_reg(800, noise=0.1, seed=1)
    t, tv = (y > 1.0).float(), (yv > 1.0).float()
    model = Scorer(8)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()
    for step in range(300):
        i = torch.randint(0, 3000, (64,))
        loss = criterion(model(x[i]), t[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            model.eval()
            with torch.no_grad():
                log("val_loss", criterion(model(xv), tv).item())
            model.train()
    with torch.no_grad():
        p = model(xv)
        f1 = 2 * ((p > 0.5) & (tv > 0)).sum() / ((p > 0.5).sum() + tv.sum())
        return f1.item() - F.binary_cross_entropy(p.clamp(1e-4, 1 - 1e-4), tv).item()


# ---- tab_07
class TabNet7(nn.Module):
    def __init__(self, cards, n_num):
        super().__init__()
        self.embs = nn.ModuleList([nn.Embedding(c, min(8, c)) for c in cards])
        self.bn = nn.BatchNorm1d(n_num)
        d = sum(min(8, c) for c in cards) + n_num
        self.net = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))

    def forward(self, cat, num):
        e = [m(cat[:, i]) for i, m in enumerate(self.embs)]
        return self.net(torch.cat(e + [self.bn(num)], 1)).squeeze(1)


@case("tab_07")
def tab_07(log):
    seed_all(7)
    n = 4000
    cards = [5, 60, 300]
    cat = torch.stack([torch.randint(0, c, (n,)) for c in cards], 1)
    num = torch.randn(n, 4) * torch.tensor([1.0, 30.0, 0.1, 5.0])
    eff = [torch.randn(c) for c in cards]
    s = eff[0][cat[:, 0]] + eff[1][cat[:, 1]] * 1.5 + num[:, 0] + num[:, 1] / 30 - 4.6
    y = (s + 0.5 * torch.randn(n) > 0).float()
    tr, va = slice(0, 3200), slice(3200, n)
    pos_weight = (1 - y[tr]).sum() / y[tr].sum()
    model = TabNet7(cards, 4)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3, weight_decay=1e-5)
    crit = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
    dl = DataLoader(TensorDataset(cat[tr], num[tr], y[tr]), batch_size=96, shuffle=True)
    for ep in range(7):
        model.train()
        for c, z, t in dl:
            loss = crit(model(c, z), t)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            o = model(cat[va], num[va])
            p, q = o[y[va] > 0], o[y[va] == 0]
            auc = (p[:, None] > q[None]).float().mean().item()
            log("val_auc", auc)
    return auc


# ---- tab_08
@case("tab_08")
def tab_08(log):
    seed_all(8)
    C = 40
    cent = torch.randn(C, 16)
    y, yv = torch.randint(0, C, (4000,)), torch.randint(0, C, (800,))
    x, xv = cent[y] + 0.5 * torch.randn(4000, 16), cent[yv] + 0.5 * torch.randn(800, 16)
    net = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, C), nn.Softmax(dim=1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    crit = nn.CrossEntropyLoss()
    for step in range(350):
        i = torch.randint(0, 4000, (64,))
        loss = crit(net(x[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_loss", crit(net(xv), yv).item())
                log("val_acc", acc(net(xv), yv))
    with torch.no_grad():
        return acc(net(xv), yv)


# ---- tab_09
@case("tab_09")
def tab_09(log):
    seed_all(9)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    net = mlp(8, 64, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    dl = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    for epoch in range(6):
        opt.zero_grad()
        for xb, yb in dl:
            loss = F.mse_loss(net(xb).squeeze(1), yb)
            loss.backward()
            opt.step()
        with torch.no_grad():
            log("val_mse", F.mse_loss(net(xv).squeeze(1), yv).item())
    with torch.no_grad():
        return max(-100.0, r2(net(xv), yv))


# ---- tab_10
@case("tab_10")
def tab_10(log):
    seed_all(10)
    x, y = make_reg(1000)
    xv, yv = make_reg(600, seed=1)
    net = mlp(8, 48, 1)
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    accum = 4
    dl = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)  # 63 batches, the last one has 8 rows
    for epoch in range(12):
        opt.zero_grad()
        for k, (xb, yb) in enumerate(dl):
            loss = ((net(xb).squeeze(1) - yb) ** 2).mean() / accum
            loss.backward()
            if (k + 1) % accum == 0 or k + 1 == len(dl):
                opt.step()
                opt.zero_grad()
        with torch.no_grad():
            log("val_mse", F.mse_loss(net(xv).squeeze(1), yv).item())
    with torch.no_grad():
        return r2(net(xv), yv)


# ---- tab_11
@case("tab_11")
def tab_11(log):
    seed_all(11)
    n, card = 3000, 1500
    x, y = make_reg(n, noise=0.6, seed=3)
    zipcode = np.random.randint(0, card, n)
    y_np = y.numpy()
    tr, va = np.arange(0, 2400), np.arange(2400, n)
    prior = y_np[tr].mean()
    sums, cnts = np.zeros(card), np.zeros(card)
    np.add.at(sums, zipcode[tr], y_np[tr])
    np.add.at(cnts, zipcode[tr], 1)
    enc_va = np.where(cnts > 0, sums / np.maximum(cnts, 1), prior)[zipcode[va]]
    enc_tr = (sums / np.maximum(cnts, 1))[zipcode[tr]]
    te = torch.tensor(np.concatenate([enc_tr, enc_va]), dtype=torch.float32)
    feats = torch.cat([x, te[:, None]], 1)
    net = mlp(9, 48, 1)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(300):
        i = torch.randint(0, 2400, (64,))
        loss = F.mse_loss(net(feats[i])[:, 0], y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("train_mse", F.mse_loss(net(feats[:2400])[:, 0], y[:2400]).item())
                log("val_mse", F.mse_loss(net(feats[2400:])[:, 0], y[2400:]).item())
    with torch.no_grad():
        return r2(net(feats[2400:]), y[2400:])


# ---- tab_12
@case("tab_12")
def tab_12(log):
    seed_all(12)
    x, y = make_reg(500, seed=5)
    xv, yv = make_reg(400, seed=6)
    t, tv = (y > 0).float(), (yv > 0).float()
    w = torch.zeros(8, requires_grad=True)
    b = torch.zeros(1, requires_grad=True)
    opt = torch.optim.SGD([w, b], lr=0.5)
    for step in range(200):  # full batch
        def closure():
            opt.zero_grad()
            loss = F.binary_cross_entropy_with_logits(x @ w + b, t) + 1e-3 * (w ** 2).sum()
            loss.backward()
            return loss
        loss = opt.step(closure)
        if step % 25 == 0:
            with torch.no_grad():
                log("val_logloss", F.binary_cross_entropy_with_logits(xv @ w + b, tv).item())
    with torch.no_grad():
        return (((xv @ w + b) > 0).float() == tv).float().mean().item()


# ---- tab_13
@case("tab_13")
def tab_13(log):
    seed_all(13)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    net = mlp(8, 64, 1)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    l2 = 0.1
    for step in range(300):
        i = torch.randint(0, 3000, (64,))
        mse = F.mse_loss(net(x[i]).squeeze(-1), y[i])
        reg = sum(p.pow(2).sum() for p in net.parameters())
        loss = mse + l2 * reg
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_mse", F.mse_loss(net(xv).squeeze(-1), yv).item())
    with torch.no_grad():
        return r2(net(xv), yv)


# ---- tab_14
@case("tab_14")
def tab_14(log):
    seed_all(14)
    n = 4000
    cent = torch.tensor([[0.0, 0.0], [1.6, 0.5], [-0.6, 1.7]])
    y = torch.multinomial(torch.tensor([0.86, 0.1, 0.04]), n, replacement=True)
    x = cent[y].repeat(1, 3) + 1.0 * torch.randn(n, 6)
    xt, yt, xv, yv = x[:3000], y[:3000], x[3000:], y[3000:]
    counts = torch.bincount(yt, minlength=3).float()
    weight = counts / counts.sum() * 3
    net = mlp(6, 48, 3)
    crit = nn.CrossEntropyLoss(weight=weight)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def bal():
        with torch.no_grad():
            p = net(xv).argmax(1)
            return sum((p[yv == c] == c).float().mean().item() for c in range(3)) / 3

    for step in range(300):
        i = torch.randint(0, 3000, (64,))
        loss = crit(net(xt[i]), yt[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            log("val_balanced_acc", bal())
    return bal()


# ---- tab_15
@case("tab_15")
def tab_15(log):
    seed_all(15)
    n = 3000
    names = ["shop_%03d" % k for k in range(50)]
    effect = torch.randn(50)
    shop = np.random.randint(0, 50, n)
    x = torch.randn(n, 3)
    y = effect[shop] * 1.5 + 0.5 * x[:, 0] + 0.3 * torch.randn(n)
    rows = [names[s] for s in shop]

    def factorize(values):
        table = {}
        return torch.tensor([table.setdefault(v, len(table)) for v in values]), table

    tr_id, table = factorize(rows[:2400])
    va_id, _ = factorize(rows[2400:])
    emb = nn.Embedding(len(table), 8)
    head = mlp(11, 32, 1)
    opt = torch.optim.Adam(list(emb.parameters()) + list(head.parameters()), lr=6e-3)
    for step in range(300):
        i = torch.randint(0, 2400, (64,))
        pred = head(torch.cat([emb(tr_id[i]), x[i]], 1)).squeeze(1)
        loss = F.mse_loss(pred, y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                p = head(torch.cat([emb(va_id), x[2400:]], 1)).squeeze(1)
                log("train_loss", loss.item())
                log("val_mse", F.mse_loss(p, y[2400:]).item())
    with torch.no_grad():
        return r2(head(torch.cat([emb(va_id), x[2400:]], 1)), y[2400:])


# ---- tab_16
class GaussNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.mu, self.ls = nn.Linear(48, 1), nn.Linear(48, 1)
        nn.init.zeros_(self.ls.weight)

    def forward(self, x):
        h = self.b(x)
        return self.mu(h), self.ls(h).clamp(-7, 3)


@case("tab_16")
def tab_16(log):
    seed_all(16)
    x = torch.rand(2000, 1) * 4 - 2
    y = 0.1 * torch.sin(2 * x) + (0.01 + 0.02 * (x > 0)) * torch.randn(2000, 1)
    net = GaussNet()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)

    def nll(m, ls, t):
        return (ls + 0.5 * ((t - m) / ls.exp()) ** 2).mean()

    for step in range(300):
        i = torch.randint(0, 1600, (64,))
        loss = nll(*net(x[i]), y[i])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_nll", nll(*net(x[1600:]), y[1600:]).item())
    with torch.no_grad():
        return -nll(*net(x[1600:]), y[1600:]).item()


# ---- tab_17
@case("tab_17")
def tab_17(log):
    seed_all(17)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    x, xv = 50 + 15 * x, 50 + 15 * xv
    net = mlp(8, 32, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(250):
        i = torch.randint(0, 3000, (64,))
        loss = F.l1_loss(net(x[i])[:, 0], y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_mae", F.l1_loss(net(xv)[:, 0], yv).item())
    with torch.no_grad():
        return max(-100.0, r2(net(xv), yv))


# ---- tab_18
class DeepTab(nn.Module):
    def __init__(self, d, width=32, depth=8, act=nn.Sigmoid):
        super().__init__()
        layers = [nn.Linear(d, width), act()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), act()]
        self.f = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x):
        return self.f(x).squeeze(-1)


@case("tab_18")
def tab_18(log):
    seed_all(18)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    net = DeepTab(8)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(350):
        i = torch.randint(0, 3000, (64,))
        loss = F.mse_loss(net(x[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_mse", F.mse_loss(net(xv), yv).item())
    with torch.no_grad():
        return r2(net(xv), yv)


# ---- tab_19
class QuantileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = mlp(8, 48, 3)

    def forward(self, x):
        return self.f(x)


@case("tab_19")
def tab_19(log):
    seed_all(19)
    x, y = make_reg(2500, noise=0.8)
    xv, yv = make_reg(600, noise=0.8, seed=1)
    taus = torch.tensor([0.1, 0.5, 0.9])

    def pinball(q, t):
        e = t[:, None] - q
        return torch.maximum(taus * e, (taus - 1) * e).mean()

    net = QuantileNet()
    opt = torch.optim.NAdam(net.parameters(), lr=3e-3)
    for step in range(300):
        i = torch.randint(0, 2500, (50 if step % 2 else 20,))
        loss = pinball(net(x[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 30 == 0:
            with torch.no_grad():
                log("val_pinball", pinball(net(xv), yv).item())
    with torch.no_grad():
        q = net(xv)
        cover = ((yv > q[:, 0]) & (yv < q[:, 2])).float().mean().item()
        log("coverage", cover)
        return r2(q[:, 1], yv)
