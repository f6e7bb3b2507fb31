import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from common import case, seed_all, digits, acc


class Backbone(nn.Module):
    def __init__(self, h=64, n_out=5):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, h), nn.ReLU())
        self.fc = nn.Linear(h, n_out)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)))


_pre = {}


def pretrained(n_out=5, steps=60):
    """Backbone fitted (closed training, no autograd hooks left behind) on the digits 0-4."""
    if n_out not in _pre:
        with torch.random.fork_rng():
            torch.manual_seed(99)
            X, y, _, _ = digits()
            X, y = X[y < n_out].view(-1, 1, 8, 8), y[y < n_out]
            net = Backbone(n_out=n_out)
            ps = list(net.parameters())
            mom = [torch.zeros_like(p) for p in ps]
            for _ in range(steps):
                i = torch.randint(0, len(X), (64,))
                gs = torch.autograd.grad(F.cross_entropy(net(X[i]), y[i]), ps)
                with torch.no_grad():
                    for p, m, g in zip(ps, mom, gs):
                        m.mul_(0.9).add_(g)
                        p.sub_(0.05 * m)
            _pre[n_out] = {k: v.clone() for k, v in net.state_dict().items()}
    return {k: v.clone() for k, v in _pre[n_out].items()}


def new_task(n_train=300):
    X, y, Xv, yv = digits()
    a, b = y >= 5, yv >= 5
    X, y = X[a].view(-1, 1, 8, 8)[:n_train], y[a][:n_train] - 5
    return X, y, Xv[b].view(-1, 1, 8, 8), yv[b] - 5


# ---- ft_01
@case("ft_01")
def ft_01(log):
    seed_all(1)
    X, y, Xv, yv = new_task()
    net = Backbone()
    net.load_state_dict(pretrained())
    for p in net.parameters():
        p.requires_grad = False
    net.fc = nn.Linear(64, 5)
    net.eval()  # batch norm keeps the statistics of the pretraining
    opt = torch.optim.Adam(net.fc.parameters(), lr=5e-3)
    for step in range(200):
        i = torch.randint(0, len(X), (32,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- ft_02
@case("ft_02")
def ft_02(log):
    seed_all(2)
    X, y, Xv, yv = new_task()
    net = Backbone()
    net.load_state_dict(pretrained())
    for p in list(net.stem.parameters()) + list(net.body.parameters()):
        p.requires_grad = False
    opt = torch.optim.Adam([{"params": net.fc.parameters(), "lr": 5e-3},
                            {"params": net.body[4].parameters(), "lr": 2e-5}])
    net.body[4].requires_grad_(True)
    net.fc = nn.Linear(64, 5)
    for step in range(200):
        net.train()
        i = torch.randint(0, len(X), (32,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            net.eval()
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    net.eval()
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- ft_03
@case("ft_03")
def ft_03(log):
    """Resume a pretrained extractor saved from a wrapped model, train a head on it."""
    seed_all(3)
    X, y, Xv, yv = new_task()
    ckpt = {"module." + k: v for k, v in pretrained().items()}
    net = Backbone()
    net.load_state_dict(ckpt, strict=False)
    net.requires_grad_(False)
    net.fc = nn.Sequential(nn.Linear(64, 5))
    opt = torch.optim.SGD(net.fc.parameters(), lr=0.05, momentum=0.9)
    net.eval()
    for step in range(200):
        i = torch.randint(0, len(X), (32,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_loss", F.cross_entropy(net(Xv), yv).item())
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- ft_04
@case("ft_04")
def ft_04(log):
    """Gradual unfreezing with layer-wise learning rates."""
    seed_all(4)
    X, y, Xv, yv = new_task()
    net = Backbone()
    net.load_state_dict(pretrained())
    net.fc = nn.Linear(64, 5)
    net.stem.requires_grad_(False)
    net.body.requires_grad_(False)
    opt = torch.optim.AdamW([{"params": net.fc.parameters(), "lr": 3e-3}, {"params": net.body.parameters(), "lr": 5e-4},
                             {"params": net.stem.parameters(), "lr": 1e-4}], weight_decay=0.01)
    dl = DataLoader(TensorDataset(X, y), batch_size=32, shuffle=True)
    for ep in range(18):
        if ep == 5:
            net.body.requires_grad_(True)
        if ep == 11:
            net.stem.requires_grad_(True)
        net.train()
        net.stem.eval()
        for xb, yb in dl:
            loss = F.cross_entropy(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


def fit_teacher(X, y, seed=5, steps=150):
    """A wide MLP teacher, fitted beforehand."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        t = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        ps = list(t.parameters())
        mom = [torch.zeros_like(p) for p in ps]
        for _ in range(steps):
            i = torch.randint(0, len(X), (64,))
            gs = torch.autograd.grad(F.cross_entropy(t(X[i]), y[i]), ps)
            with torch.no_grad():
                for p, m, g in zip(ps, mom, gs):
                    m.mul_(0.9).add_(g)
                    p.sub_(0.05 * m)
    return t


# ---- ft_05
@case("ft_05")
def ft_05(log):
    seed_all(5)
    X, y, Xv, yv = digits()
    teacher = fit_teacher(X, y).eval()
    student = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    opt = torch.optim.Adam(student.parameters(), lr=4e-3)
    T = 3.0
    for step in range(300):
        i = torch.randint(0, len(X), (64,))
        with torch.no_grad():
            soft = F.softmax(teacher(X[i]) / T, 1)
        out = student(X[i])
        loss = 0.7 * T * T * F.kl_div(F.log_softmax(out / T, 1), soft, reduction="batchmean") + 0.3 * F.cross_entropy(out, y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(student(Xv), yv))
    with torch.no_grad():
        return acc(student(Xv), yv)


# ---- ft_06
@case("ft_06")
def ft_06(log):
    seed_all(6)
    X, y, Xv, yv = digits()
    teacher = fit_teacher(X, y)
    teacher.eval()
    student = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    opt = torch.optim.Adam(student.parameters(), lr=4e-3)
    kd = nn.KLDivLoss(reduction="batchmean")
    for step in range(300):
        xb = X[torch.randint(0, len(X), (64,))]
        with torch.no_grad():
            p_t = F.softmax(teacher(xb) / 2, dim=1)
        p_s = F.softmax(student(xb) / 2, dim=1)
        loss = kd(p_s, p_t) * 4
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            log("kd_loss", loss.item())
            with torch.no_grad():
                log("agreement", acc(student(Xv), teacher(Xv).argmax(1)))
    with torch.no_grad():
        return -F.kl_div(F.log_softmax(student(Xv), 1), F.softmax(teacher(Xv), 1), reduction="batchmean").item()


# ---- ft_07
@case("ft_07")
def ft_07(log):
    seed_all(7)
    X, y, Xv, yv = digits()
    teacher = fit_teacher(X, y)
    student = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    models = nn.ModuleDict({"teacher": teacher, "student": student})
    opt = torch.optim.Adam(models.parameters(), lr=4e-3)
    for step in range(300):
        x = X[torch.randint(0, len(X), (64,))]
        t, s = models["teacher"](x), models["student"](x)
        loss = F.mse_loss(s, t)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            log("distill_loss", loss.item())
            with torch.no_grad():
                log("val_acc", acc(student(Xv), yv))
    with torch.no_grad():
        return acc(student(Xv), yv)


# ---- ft_08
class Adapter(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.zeros(r, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.A.T @ self.B.T) * self.scale


@case("ft_08")
def ft_08(log):
    """Rotated digits: adapt an MLP fitted on upright ones."""
    seed_all(8)
    X, y, Xv, yv = digits()
    net = fit_teacher(X, y)
    rot = lambda x: x.view(-1, 8, 8).transpose(1, 2).reshape(-1, 64)
    X, Xv = rot(X), rot(Xv)
    net.requires_grad_(False)
    net[0], net[2] = Adapter(net[0]), Adapter(net[2])
    params = [p for p in net.parameters() if p.requires_grad]
    params.append(net[4].bias.requires_grad_(True))
    opt = torch.optim.AdamW(params, lr=5e-3, weight_decay=0.0)
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


# ---- ft_09
class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, base.in_features) / math.sqrt(base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r
        self.drop = nn.Dropout(0.05)

    def forward(self, x):
        return self.base(x) + (self.drop(x) @ self.A.T @ self.B.T) * self.scale


@case("ft_09")
def ft_09(log):
    seed_all(9)
    X, y, Xv, yv = digits()
    net = fit_teacher(X, y).requires_grad_(False)
    rot = lambda x: x.view(-1, 8, 8).transpose(1, 2).reshape(-1, 64)
    X, Xv = rot(X), rot(Xv)
    net[0], net[2] = LoRALinear(net[0]), LoRALinear(net[2])
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=5e-3)
    sch = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 250)
    for step in range(250):
        net.train()
        i = torch.randint(0, len(X), (64,))
        loss = F.cross_entropy(net(X[i]), y[i])
        loss.backward()
        opt.step()
        sch.step()
        opt.zero_grad()
        if step % 25 == 0:
            net.eval()
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    net.eval()
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- ft_10
@case("ft_10")
def ft_10(log):
    seed_all(10)
    X, y, Xv, yv = new_task(80)
    net = Backbone()
    net.load_state_dict(pretrained())
    net.fc = nn.Linear(64, 5)
    opt = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    for step in range(160):
        net.train()
        i = torch.randint(0, len(X), (16,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            net.eval()
            with torch.no_grad():
                log("val_loss", F.cross_entropy(net(Xv), yv).item())
    net.eval()
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- ft_11
@case("ft_11")
def ft_11(log):
    """Mean teacher: 60 labelled images, the others only through consistency."""
    seed_all(11)
    X, y, Xv, yv = digits()
    Xl, yl = X[:60], y[:60]
    student = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 10))
    teacher = copy.deepcopy(student)
    for p in teacher.parameters():
        p.requires_grad_(False)
    opt = torch.optim.Adam(student.parameters(), lr=3e-3)
    for step in range(300):
        student.train()
        i, j = torch.randint(0, 60, (20,)), torch.randint(0, len(X), (80,))
        sup = F.cross_entropy(student(Xl[i]), yl[i])
        u = X[j]
        with torch.no_grad():
            tgt = teacher(u + 0.1 * torch.randn_like(u)).softmax(1)
        cons = F.mse_loss(student(u + 0.1 * torch.randn_like(u)).softmax(1), tgt)
        loss = sup + min(1.0, step / 80) * 5.0 * cons
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), student.parameters()):
                a.copy_(0.97 * a + 0.03 * b)
        if step % 25 == 0:
            teacher.eval()
            with torch.no_grad():
                log("teacher_val_acc", acc(teacher(Xv), yv))
            teacher.train()
    teacher.eval()
    with torch.no_grad():
        return acc(teacher(Xv), yv)


# ---- ft_12
@case("ft_12")
def ft_12(log):
    """Fine-tune everything with small batches, new head with normalisation."""
    seed_all(12)
    X, y, Xv, yv = new_task(200)
    net = Backbone()
    net.load_state_dict(pretrained())
    net.fc = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32, momentum=0.99), nn.ReLU(), nn.Linear(32, 5))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    hist = []
    for step in range(250):
        net.train()
        i = torch.randint(0, len(X), (5,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 24:
            net.eval()
            with torch.no_grad():
                o = net(Xv)
                log("val_loss", F.cross_entropy(o, yv).item())
                hist.append(acc(o, yv))
                log("val_acc", hist[-1])
    return sum(hist[-5:]) / 5
