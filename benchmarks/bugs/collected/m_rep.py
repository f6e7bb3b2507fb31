import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import case, seed_all, digits, acc


def aug(x, p=0.25, s=0.15):
    keep = (torch.rand_like(x) > p).float()
    return x * keep + s * torch.randn_like(x)


def enc_net(o=32, h=96):
    return nn.Sequential(nn.Linear(64, h), nn.ReLU(), nn.Linear(h, o))


def knn(f, X, y, Xv, yv, k=1):
    with torch.no_grad():
        a, b = F.normalize(f(X), dim=1), F.normalize(f(Xv), dim=1)
        return acc_knn((b @ a.T), y, yv)


def acc_knn(sim, y, yv):
    if not torch.isfinite(sim).all():
        return 0.0
    return (y[sim.argmax(1)] == yv).float().mean().item()


def probe(f, X, y, Xv, yv):
    """closed-form ridge classifier on frozen features"""
    with torch.no_grad():
        a, b = f(X), f(Xv)
        if not torch.isfinite(a).all():
            return 0.0
        a, b = torch.cat([a, torch.ones(len(a), 1)], 1), torch.cat([b, torch.ones(len(b), 1)], 1)
        W = torch.linalg.solve(a.T @ a + 0.01 * torch.eye(a.size(1)), a.T @ F.one_hot(y, 10).float())
        return acc(b @ W, yv)


def ntxent(za, zb, tau):
    z = F.normalize(torch.cat([za, zb]), dim=1)
    n = len(za)
    s = z @ z.T / tau
    s = s.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(s, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


# ---- rep_01
@case("rep_01")
def rep_01(log):
    seed_all(1)
    X, y, Xv, yv = digits()
    f = enc_net()
    g = nn.Sequential(nn.ReLU(), nn.Linear(32, 16))
    opt = torch.optim.AdamW([*f.parameters(), *g.parameters()], lr=2e-3, weight_decay=1e-4)
    for step in range(250):
        x = X[torch.randint(0, len(X), (128,))]
        loss = ntxent(g(f(aug(x))), g(f(aug(x))), 0.2)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            log("knn_acc", knn(f, X, y, Xv, yv))
    return knn(f, X, y, Xv, yv)


# ---- rep_02
@case("rep_02")
def rep_02(log):
    seed_all(2)
    X, y, Xv, yv = digits()
    f = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 32))
    h = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))
    opt = torch.optim.SGD([*f.parameters(), *h.parameters()], lr=0.1, momentum=0.9, weight_decay=5e-4)

    def D(p, z):
        return -F.cosine_similarity(p, z, dim=1).mean()

    def score():
        f.eval()
        with torch.no_grad():
            a, b = F.normalize(f(X), dim=1), F.normalize(f(aug(Xv)), dim=1)
        f.train()
        return acc_knn(b @ a.T, y, yv)

    for step in range(300):
        x = X[torch.randint(0, len(X), (128,))]
        z1, z2 = f(aug(x)), f(aug(x))
        loss = 0.5 * D(h(z1), z2) + 0.5 * D(h(z2), z1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            log("knn_acc", score())
    return score()


# ---- rep_03
@case("rep_03")
def rep_03(log):
    """Two 'modalities': left and right half of a digit, CLIP style."""
    seed_all(3)
    X, y, Xv, yv = digits()
    halves = lambda x: (x.view(-1, 8, 8)[:, :, :4].reshape(-1, 32), x.view(-1, 8, 8)[:, :, 4:].reshape(-1, 32))
    fa = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 24))
    fb = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 24))
    opt = torch.optim.Adam(list(fa.parameters()) + list(fb.parameters()), lr=2e-3)
    temperature = 0.07

    def recall():
        with torch.no_grad():
            a, b = halves(Xv[:200])
            s = F.normalize(fa(a), dim=1) @ F.normalize(fb(b), dim=1).T
            return (s.topk(5, 1).indices == torch.arange(200)[:, None]).any(1).float().mean().item()

    for step in range(300):
        a, b = halves(X[torch.randint(0, len(X), (96,))])
        za, zb = F.normalize(fa(a), dim=1), F.normalize(fb(b), dim=1)
        logits = za @ zb.T * temperature
        target = torch.arange(96)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            log("recall@5", recall())
    return recall()


def pairs(X, y, n):
    i, j = torch.randint(0, len(X), (n,)), torch.randint(0, len(X), (n,))
    for k in range(n // 2):  # half of the pairs from the same class
        c = (y == y[i[k]]).nonzero()[:, 0]
        j[k] = c[torch.randint(0, len(c), (1,))]
    return X[i], X[j], (y[i] == y[j]).float()


# ---- rep_04
class ContrastiveLoss(nn.Module):
    def __init__(self, margin=1.5):
        super().__init__()
        self.margin = margin

    def forward(self, a, b, label):
        d = F.pairwise_distance(a, b)
        return (0.5 * (1 - label) * d.pow(2) + 0.5 * label * F.relu(self.margin - d).pow(2)).mean()


@case("rep_04")
def rep_04(log):
    seed_all(4)
    X, y, Xv, yv = digits()
    net = enc_net(8, 64)
    crit = ContrastiveLoss()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(220):
        a, b, same = pairs(X, y, 48)
        loss = crit(net(a), net(b), same)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_loss", crit(*(lambda p, q, s: (net(p), net(q), s))(*pairs(Xv, yv, 100))).item())
    with torch.no_grad():
        a, b, same = pairs(Xv, yv, 600)
        d = (net(a) - net(b)).norm(dim=1)
        return (d[same > 0][:, None] < d[same == 0][None]).float().mean().item()


# ---- rep_05
@case("rep_05")
def rep_05(log):
    seed_all(5)
    X, y, Xv, yv = digits()
    net = enc_net(16, 96)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(250):
        i = torch.randint(0, len(X), (80,))
        z = F.normalize(net(X[i]), dim=1)
        d = (2 - 2 * z @ z.T).clamp(min=1e-6).sqrt()
        same = y[i][:, None] == y[i][None]
        hard_pos = (d * same).max(1).values
        hard_neg = (d + 10.0 * same).min(1).values
        loss = F.relu(hard_pos - hard_neg + 0.2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            log("knn_acc", knn(net, X, y, Xv, yv))
    return knn(net, X, y, Xv, yv)


# ---- rep_06
@case("rep_06")
def rep_06(log):
    seed_all(6)
    X, _, Xv, _ = digits()
    ae = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 12), nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 64))
    opt = torch.optim.Adam(ae.parameters(), lr=3e-3)
    sch = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=2)
    for ep in range(14):
        for xb in X[torch.randperm(len(X))].split(64):
            loss = F.mse_loss(ae(xb + 0.2 * torch.randn_like(xb)), xb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            v = F.mse_loss(ae(Xv), Xv).item()
        sch.step(v)
        log("val_mse", v)
    return 1 - v / ((Xv - Xv.mean(0)) ** 2).mean().item()


# ---- rep_07
class AE7(nn.Module):
    def __init__(self, d=64, z=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, z))
        self.decoder = nn.Sequential(nn.Linear(z, 64), nn.ReLU(), nn.Linear(64, d), nn.Sigmoid())

    def forward(self, x):
        return self.decoder(self.encoder(x))


@case("rep_07")
def rep_07(log):
    seed_all(7)
    X, _, Xv, _ = digits()
    mu, sd = X.mean(0), X.std(0).clamp(min=0.05)
    X, Xv = (X - mu) / sd, (Xv - mu) / sd
    ae = AE7()
    opt = torch.optim.Adam(ae.parameters(), lr=3e-3)
    for step in range(300):
        x = X[torch.randint(0, len(X), (64,))]
        loss = F.mse_loss(ae(x), x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_mse", F.mse_loss(ae(Xv), Xv).item())
    with torch.no_grad():
        return 1 - (F.mse_loss(ae(Xv), Xv) / Xv.var()).item()


# ---- rep_08
class Augment:
    def __init__(self, seed):
        self.seed = seed

    def __call__(self, x):
        g = torch.Generator().manual_seed(self.seed)
        keep = (torch.rand(x.shape, generator=g) > 0.3).float()
        return x * keep + 0.15 * torch.randn(x.shape, generator=g)


@case("rep_08")
def rep_08(log):
    seed_all(8)
    X, y, Xv, yv = digits()
    f, proj = enc_net(), nn.Linear(32, 16)
    opt = torch.optim.Adam([*f.parameters(), *proj.parameters()], lr=2e-3)
    augment = Augment(0)

    def aligned():
        with torch.no_grad():
            a, b = aug(Xv), aug(Xv)
            s = F.normalize(f(a), dim=1) @ F.normalize(f(b), dim=1).T
            return (s.argmax(1) == torch.arange(len(Xv))).float().mean().item()

    for step in range(250):
        x = X[torch.randint(0, len(X), (128,))]
        v1, v2 = augment(x), augment(x)
        loss = ntxent(proj(f(v1)), proj(f(v2)), 0.2)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            log("instance_acc", aligned())
    return aligned()


# ---- rep_09
@case("rep_09")
def rep_09(log):
    seed_all(9)
    X, y, Xv, yv = digits()

    def branch():
        return nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 32), nn.BatchNorm1d(32))

    online = branch()
    target = copy.deepcopy(online)
    target.requires_grad_(False)
    pred = nn.Sequential(nn.Linear(32, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 32))
    opt = torch.optim.Adam([*online.parameters(), *pred.parameters()], lr=2e-3)
    for step in range(200):
        x = X[torch.randint(0, len(X), (128,))]
        a, b = aug(x), aug(x)
        with torch.no_grad():
            ta, tb = target(a), target(b)
        loss = 2 - F.cosine_similarity(pred(online(a)), tb).mean() - F.cosine_similarity(pred(online(b)), ta).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for p, q in zip(online.parameters(), target.parameters()):
                q.mul_(0.98).add_(p, alpha=0.02)
        if step % 50 == 0:
            online.eval()
            log("probe_acc", probe(online, X, y, Xv, yv))
            online.train()
    online.eval()
    return probe(online, X, y, Xv, yv)


# ---- rep_10
@case("rep_10")
def rep_10(log):
    seed_all(10)
    X, y, Xv, yv = digits()
    net = enc_net(16, 64)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(220):
        i = torch.randint(0, len(X), (64,))
        z = net(X[i])
        sq = ((z[:, None] - z[None]) ** 2).sum(-1)
        d = torch.sqrt(sq)
        same = (y[i][:, None] == y[i][None]).float()
        loss = (same * d.pow(2) + (1 - same) * F.relu(2.0 - d).pow(2)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            log("knn_acc", knn(net, X, y, Xv, yv))
    return knn(net, X, y, Xv, yv)


# ---- rep_11
@case("rep_11")
def rep_11(log):
    """Triplets prepared by a sampler: anchor, positive, negative."""
    seed_all(11)
    X, y, Xv, yv = digits()
    net = enc_net(16, 96)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    triplet = nn.TripletMarginLoss(margin=0.5)
    by_class = [(y == c).nonzero()[:, 0] for c in range(10)]

    def draw(n):
        a = torch.randint(0, len(X), (n,))
        p = torch.stack([by_class[c][torch.randint(0, len(by_class[c]), ())] for c in y[a].tolist()])
        q = a[torch.randperm(n)]
        return X[a], X[q], X[p]

    for step in range(200):
        anchor, pos, neg = draw(48)
        loss = triplet(net(anchor), net(pos), net(neg))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            log("knn_acc", knn(net, X, y, Xv, yv))
    return knn(net, X, y, Xv, yv)
