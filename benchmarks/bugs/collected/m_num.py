import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import case, seed_all, digits, acc, r2
from m_tab import make_reg, mlp


# ---- num_01
@case("num_01")
def num_01(log):
    """Manual loss scaling as for half precision."""
    seed_all(1)
    X, y, Xv, yv = digits()
    net = mlp(64, 64, 10)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scale = 1024.0
    for step in range(300):
        i = torch.randint(0, len(X), (64,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        (loss * scale).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for p in net.parameters():
            p.grad.div_(scale)
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_loss", F.cross_entropy(net(Xv), yv).item())
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- num_02
def cross_entropy_manual(logits, target):
    p = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    return -torch.log(p[torch.arange(len(target)), target]).mean()


@case("num_02")
def num_02(log):
    seed_all(2)
    X, y, Xv, yv = digits()
    X, Xv = X * 255, Xv * 255
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    for m in net:
        if isinstance(m, nn.Linear):
            nn.init.kaiming_normal_(m.weight)
            nn.init.zeros_(m.bias)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(200):
        i = torch.randint(0, len(X), (64,))
        loss = cross_entropy_manual(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- num_03
@case("num_03")
def num_03(log):
    seed_all(3)
    x, y = make_reg(3000)
    xv, yv = make_reg(600, seed=1)
    flag = (torch.rand(3000, 1) < 0.02).float()
    flag_v = (torch.rand(600, 1) < 0.02).float()
    x, xv = torch.cat([x, flag], 1), torch.cat([xv, flag_v], 1)

    def standardize(b):
        return (b - b.mean(0)) / b.std(0)

    net = mlp(9, 64, 1)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(300):
        i = torch.randint(0, 3000, (128,))
        loss = F.mse_loss(net(standardize(x[i]))[:, 0], y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_r2", r2(net(standardize(xv)), yv))
    with torch.no_grad():
        return r2(net(standardize(xv)), yv)


# ---- num_04
@case("num_04")
def num_04(log):
    """Dynamic loss scaling by hand; gradients pass through half precision."""
    seed_all(4)
    X, y, Xv, yv = digits()
    net = mlp(64, 64, 10)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scale, good = 2.0 ** 18, 0
    for step in range(320):
        i = torch.randint(0, len(X), (64,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        (loss * scale).backward()
        grads = [p.grad.half() for p in net.parameters()]
        if all(torch.isfinite(g).all() for g in grads):
            for p, g in zip(net.parameters(), grads):
                p.grad = g.float() / scale
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            good += 1
            if good % 100 == 0:
                scale *= 2
        else:
            scale /= 2
        if step % 25 == 0:
            with torch.no_grad():
                log("val_loss", F.cross_entropy(net(Xv), yv).item())
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- num_05
@case("num_05")
def num_05(log):
    seed_all(5)
    X, y, Xv, yv = digits()
    net = mlp(64, 64, 10).to(torch.bfloat16)
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    X, Xv = X.bfloat16(), Xv.bfloat16()
    for step in range(400):
        i = torch.randint(0, len(X), (32,))
        loss = F.cross_entropy(net(X[i]).float(), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_loss", F.cross_entropy(net(Xv).float(), yv).item())
    with torch.no_grad():
        return -F.cross_entropy(net(Xv).float(), yv).item()


# ---- num_06
class CountNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = mlp(8, 48, 1)

    def forward(self, x):
        return self.f(x).squeeze(-1)


@case("num_06")
def num_06(log):
    seed_all(6)
    x, s = make_reg(3000)
    xv, sv = make_reg(600, seed=1)
    k, kv = torch.poisson(torch.exp(0.8 * s + 0.5)), torch.poisson(torch.exp(0.8 * sv + 0.5))
    net = CountNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    crit = nn.PoissonNLLLoss(log_input=True)
    for step in range(300):
        i = torch.randint(0, 3000, (64,))
        loss = crit(net(x[i]), k[i])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_nll", crit(net(xv), kv).item())
    with torch.no_grad():
        return -crit(net(xv), kv).item()


# ---- num_07
@case("num_07")
def num_07(log):
    seed_all(7)
    n, T = 1500, 30
    x = torch.cumsum(0.5 * torch.randn(n, T, 1), 1) * 3
    y = x[:, -8:].mean((1, 2)) * 8
    rnn, head = nn.RNN(1, 64, nonlinearity="relu", batch_first=True), nn.Linear(64, 1)
    nn.init.orthogonal_(rnn.weight_hh_l0)
    params = list(rnn.parameters()) + list(head.parameters())
    opt = torch.optim.SGD(params, lr=0.01)
    tr, va = slice(0, 1200), slice(1200, n)
    for step in range(250):
        i = torch.randint(0, 1200, (32,))
        pred = head(rnn(x[i])[0][:, -1]).squeeze(1)
        loss = F.mse_loss(pred, y[i])
        opt.zero_grad()
        nn.utils.clip_grad_norm_(params, 1.0)
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_mse", F.mse_loss(head(rnn(x[va])[0][:, -1]).squeeze(1), y[va]).item())
    with torch.no_grad():
        return r2(head(rnn(x[va])[0][:, -1]), y[va])


# ---- num_08
@case("num_08")
def num_08(log):
    seed_all(8)
    X, y, Xv, yv = digits()
    net = mlp(64, 96, 10)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(300):
        i = torch.randint(0, len(X), (64,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.5)
        opt.step()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.97)
        if step % 25 == 0:
            with torch.no_grad():
                log("val_loss", F.cross_entropy(net(Xv), yv).item())
    with torch.no_grad():
        return -F.cross_entropy(net(Xv), yv).item()


# ---- num_09
class Norm9(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        m, v = x.mean(0, keepdim=True), x.var(0, keepdim=True, unbiased=False)
        return (x - m) / (v + 1e-5).sqrt() * self.g + self.b


@case("num_09")
def num_09(log):
    """MLP with a hand-written normalisation layer, evaluated one row at a time as in the service."""
    seed_all(9)
    X, y, Xv, yv = digits()
    net = nn.Sequential(nn.Linear(64, 64), Norm9(64), nn.ReLU(), nn.Linear(64, 64), Norm9(64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def evaluate():
        net.eval()
        with torch.no_grad():
            o = torch.cat([net(r[None]) for r in Xv[:150]])
        net.train()
        return acc(o, yv[:150])

    for step in range(250):
        i = torch.randint(0, len(X), (64,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            log("val_acc", evaluate())
    return evaluate()


# ---- num_10
@case("num_10")
def num_10(log):
    seed_all(10)
    X, y, Xv, yv = digits()
    net = mlp(64, 64, 10)
    opt = torch.optim.Adam(net.parameters(), lr=0.3)
    for step in range(250):
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


# ---- num_11
@case("num_11")
def num_11(log):
    """Multi-task: classification and a regression target in raw units."""
    seed_all(11)
    X, y, Xv, yv = digits()
    ink = lambda x: (x.sum(1) * 16.0) ** 1.5
    body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    cls, reg = nn.Linear(16, 10), nn.Linear(16, 1)
    opt = torch.optim.Adam([*body.parameters(), *cls.parameters(), *reg.parameters()], lr=2e-3)
    for step in range(300):
        i = torch.randint(0, len(X), (64,))
        h = body(X[i])
        loss_c = F.cross_entropy(cls(h), y[i])
        loss_r = F.mse_loss(reg(h).squeeze(1), ink(X[i]))
        loss = loss_c + loss_r
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(cls(body(Xv)), yv))
    with torch.no_grad():
        return acc(cls(body(Xv)), yv)
