import torch
import torch.nn as nn
import torch.nn.functional as F

from common import case, seed_all, acc


def sbm(n=300, k=4, p_in=0.06, p_out=0.008, d=16, signal=0.5, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % k
    same = y[:, None] == y[None]
    A = torch.rand(n, n, generator=g) < torch.where(same, torch.tensor(p_in), torch.tensor(p_out))
    A = A.triu(1)
    A = (A | A.T).float()
    x = torch.randn(n, d, generator=g)
    x[:, :k] += signal * F.one_hot(y, k).float()
    perm = torch.randperm(n, generator=g)
    return x, y, A, perm


def gcn_norm(A):
    A = A + torch.eye(len(A))
    dinv = A.sum(1).rsqrt()
    return dinv[:, None] * A * dinv[None]


# ---- gr_01
class GCN1(nn.Module):
    def __init__(self, i, h, o):
        super().__init__()
        self.l1, self.l2 = nn.Linear(i, h), nn.Linear(h, o)

    def forward(self, x, A):
        x = F.dropout(x, 0.4, self.training)
        x = F.relu(A @ self.l1(x))
        x = F.dropout(x, 0.4, self.training)
        return A @ self.l2(x)


@case("gr_01")
def gr_01(log):
    seed_all(1)
    x, y, A, perm = sbm(signal=0.9, p_in=0.08)
    train, val = perm[:80], perm[80:]
    Ah = gcn_norm(A)
    model = GCN1(16, 32, 4)
    opt = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(200):
        model.train()
        opt.zero_grad()
        loss = F.cross_entropy(model(x, Ah)[train], y[train])
        loss.backward()
        opt.step()
        if epoch % 20 == 0:
            model.eval()
            with torch.no_grad():
                log("val_acc", acc(model(x, Ah)[val], y[val]))
    model.eval()
    with torch.no_grad():
        return acc(model(x, Ah)[val], y[val])


# ---- gr_02
class SumGNN(nn.Module):
    def __init__(self, i, h, o, n_layers=10):
        super().__init__()
        self.inp = nn.Linear(i, h)
        self.msgs = nn.ModuleList([nn.Linear(h, h) for _ in range(n_layers)])
        self.out = nn.Linear(h, o)

    def forward(self, x, A):
        h = F.relu(self.inp(x))
        for m in self.msgs:
            h = F.relu(A @ m(h)) + h
        return self.out(h)


@case("gr_02")
def gr_02(log):
    seed_all(2)
    x, y, A, perm = sbm(p_in=0.12, p_out=0.016, signal=0.8)
    A = A + torch.eye(len(A))
    train, val = perm[:150], perm[150:]
    net = SumGNN(16, 32, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(200):
        logits = net(x, A)
        loss = F.cross_entropy(logits[train], y[train])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if epoch % 20 == 0:
            with torch.no_grad():
                log("val_loss", F.cross_entropy(net(x, A)[val], y[val]).item())
    with torch.no_grad():
        return acc(net(x, A)[val], y[val])


# ---- gr_03
class DirConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.self_lin = nn.Linear(i, o)
        self.msg_lin = nn.Linear(i, o)

    def forward(self, x, edge_index):
        src, dst = edge_index
        msg = self.msg_lin(x)[dst]
        out = torch.zeros(len(x), msg.size(1)).index_add(0, src, msg)
        deg = torch.zeros(len(x)).index_add(0, src, torch.ones(len(src))).clamp(min=1)
        return self.self_lin(x) + out / deg[:, None]


class CiteNet(nn.Module):
    def __init__(self, i, h):
        super().__init__()
        self.c1 = DirConv(i, h)
        self.mlp = nn.Sequential(nn.ReLU(), nn.Linear(h, 1))

    def forward(self, x, ei):
        return self.mlp(self.c1(x, ei)).squeeze(-1)


@case("gr_03")
def gr_03(log):
    """Node target is driven by the mean attribute of the nodes pointing at it."""
    seed_all(3)
    n, e = 500, 3000
    x = torch.randn(n, 6)
    ei = torch.randint(0, n, (2, e))
    s = torch.zeros(n).index_add(0, ei[1], x[ei[0], 0])
    d = torch.zeros(n).index_add(0, ei[1], torch.ones(e)).clamp(min=1)
    y = 2.0 * s / d + 0.3 * x[:, 1] + 0.1 * torch.randn(n)
    net = CiteNet(6, 32)
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    tr, va = torch.arange(350), torch.arange(350, n)
    for step in range(250):
        p = net(x, ei)
        loss = F.mse_loss(p[tr], y[tr])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            log("val_mse", F.mse_loss(p[va], y[va]).item())
    with torch.no_grad():
        p = net(x, ei)[va]
        return (1 - ((p - y[va]) ** 2).mean() / y[va].var()).item()


# ---- gr_04
class PlainGCN(nn.Module):
    def __init__(self, i, h, o, depth):
        super().__init__()
        dims = [i] + [h] * depth
        self.convs = nn.ModuleList([nn.Linear(a, b) for a, b in zip(dims[:-1], dims[1:])])
        self.cls = nn.Linear(h, o)

    def forward(self, x, A):
        for c in self.convs:
            x = torch.relu(A @ c(x))
        return self.cls(x)


@case("gr_04")
def gr_04(log):
    seed_all(4)
    x, y, A, perm = sbm(signal=1.0, p_in=0.08)
    A = A + torch.eye(len(A))
    A = A / A.sum(1, keepdim=True)
    train, val = perm[:120], perm[120:]
    net = PlainGCN(16, 32, 4, depth=16)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(180):
        loss = F.cross_entropy(net(x, A)[train], y[train])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if epoch % 20 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(x, A)[val], y[val]))
    with torch.no_grad():
        return acc(net(x, A)[val], y[val])


# ---- gr_05
def make_graphs(n, seed):
    """Small graphs; the class is the number of edges joining two nodes of the same colour (low / high)."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        k = torch.randint(6, 12, (1,), generator=g).item()
        c = torch.randint(0, 2, (k,), generator=g)
        ei = torch.randint(0, k, (2, 2 * k), generator=g)
        label = int(torch.rand(1, generator=g) < 0.5)
        same = c[ei[0]] == c[ei[1]]
        keep = same if label else ~same
        keep = keep | (torch.rand(2 * k, generator=g) < 0.35)
        ei = ei[:, keep]
        out.append((F.one_hot(c, 2).float(), torch.cat([ei, ei.flip(0)], 1), label))
    return out


class GraphCls5(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.e = nn.Linear(2, h)
        self.m = nn.Sequential(nn.Linear(2 * h, h), nn.ReLU(), nn.Linear(h, h))
        self.o = nn.Sequential(nn.Linear(2 * h, h), nn.ReLU(), nn.Linear(h, 2))

    def forward(self, x, ei, batch, n_graphs):
        h = self.e(x)
        msg = self.m(torch.cat([h[ei[0]], h[ei[1]]], 1))
        agg = torch.zeros(len(x), msg.size(1)).index_add(0, ei[1], msg)
        z = torch.cat([h, torch.relu(agg)], 1)
        cnt = torch.zeros(n_graphs).index_add(0, batch, torch.ones(len(x)))
        pooled = torch.zeros(n_graphs, z.size(1)).index_add(0, batch, z) / cnt[:, None]
        return self.o(pooled)


def collate5(graphs):
    xs, eis, batch, ys = [], [], [], []
    for g, (x, ei, y) in enumerate(graphs):
        xs.append(x)
        eis.append(ei)
        batch.append(torch.full((len(x),), g))
        ys.append(y)
    return torch.cat(xs), torch.cat(eis, 1), torch.cat(batch), torch.tensor(ys)


@case("gr_05")
def gr_05(log):
    seed_all(5)
    train, val = make_graphs(600, 0), make_graphs(200, 1)
    net = GraphCls5()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    vx, vei, vb, vy = collate5(val)
    for step in range(220):
        sel = torch.randint(0, len(train), (24,)).tolist()
        x, ei, b, y = collate5([train[i] for i in sel])
        loss = F.cross_entropy(net(x, ei, b, len(y)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(vx, vei, vb, len(vy)), vy))
    with torch.no_grad():
        return acc(net(vx, vei, vb, len(vy)), vy)


# ---- gr_06
class GIN6(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.inp = nn.Linear(2, h)
        self.eps = nn.Parameter(torch.zeros(2))
        self.mlps = nn.ModuleList([
            nn.Sequential(nn.Linear(h, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Linear(h, h), nn.ReLU()) for _ in range(2)])
        self.head = nn.Linear(2 * h, 2)

    def forward(self, x, ei, batch, G):
        h = self.inp(x)
        outs = []
        for k, m in enumerate(self.mlps):
            agg = torch.zeros_like(h).index_add(0, ei[1], h[ei[0]] * (h[ei[1]]).tanh())
            h = m((1 + self.eps[k]) * h + agg)
            outs.append(torch.zeros(G, h.size(1)).index_add(0, batch, h) / 10)
        return self.head(torch.cat(outs, 1))


@case("gr_06")
def gr_06(log):
    seed_all(6)
    train, val = make_graphs(650, 2), make_graphs(200, 3)

    def collate(gs):
        off, xs, es, bs = 0, [], [], []
        for k, (x, ei, _) in enumerate(gs):
            xs.append(x)
            es.append(ei + off)
            bs += [k] * len(x)
            off += len(x)
        return torch.cat(xs), torch.cat(es, 1), torch.tensor(bs), torch.tensor([g[2] for g in gs])

    net = GIN6()
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    dl = torch.utils.data.DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate)
    vb = collate(val)
    for ep in range(9):
        net.train()
        for x, ei, b, y in dl:
            loss = F.cross_entropy(net(x, ei, b, len(y)), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            a = acc(net(vb[0], vb[1], vb[2], len(val)), vb[3])
            log("val_acc", a)
    return a


# ---- gr_07
@case("gr_07")
def gr_07(log):
    seed_all(7)
    x, y, A, perm = sbm(n=400, signal=0.7)
    Ah = gcn_norm(A)
    train, val = perm[:60], perm[60:]
    labels = torch.zeros(400, dtype=torch.long)
    labels[train] = y[train]
    train_mask = torch.zeros(400, dtype=torch.bool)
    train_mask[train] = True
    l1, l2 = nn.Linear(16, 32), nn.Linear(32, 4)
    opt = torch.optim.Adam([*l1.parameters(), *l2.parameters()], lr=0.01, weight_decay=1e-4)
    for epoch in range(200):
        out = Ah @ l2(F.relu(Ah @ l1(x)))
        loss = F.nll_loss(F.log_softmax(out, 1), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if epoch % 20 == 0:
            log("train_acc", acc(out[train_mask], y[train_mask]))
            log("val_acc", acc(out[val], y[val]))
    with torch.no_grad():
        out = Ah @ l2(F.relu(Ah @ l1(x)))
        return acc(out[val], y[val])


# ---- gr_08
@case("gr_08")
def gr_08(log):
    seed_all(8)
    x, y, A, perm = sbm(p_in=0.12, p_out=0.004)
    pos = A.triu(1).nonzero()
    pos = pos[torch.randperm(len(pos))]
    held, kept = pos[:150], pos[150:]
    At = torch.zeros_like(A)
    At[kept[:, 0], kept[:, 1]] = 1
    At = gcn_norm(At + At.T)
    emb = nn.Embedding(300, 16)
    nn.init.normal_(emb.weight, std=0.1)
    lin = nn.Linear(16, 16)
    opt = torch.optim.Adam([*emb.parameters(), *lin.parameters()], lr=0.02)

    def auc():
        with torch.no_grad():
            z = At @ lin(At @ emb.weight)
            neg = torch.randint(0, 300, (600, 2))
            neg = neg[A[neg[:, 0], neg[:, 1]] == 0]
            sp, sn = (z[held[:, 0]] * z[held[:, 1]]).sum(1), (z[neg[:, 0]] * z[neg[:, 1]]).sum(1)
            return (sp[:, None] > sn[None]).float().mean().item()

    for step in range(200):
        z = At @ lin(At @ emb.weight)
        neg = torch.randint(0, 300, (len(kept), 2))
        sp = (z[kept[:, 0]] * z[kept[:, 1]]).sum(1)
        sn = (z[neg[:, 0]] * z[neg[:, 1]]).sum(1)
        loss = -(F.logsigmoid(sp).mean() + F.logsigmoid(-sn).mean())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            log("val_auc", auc())
    return auc()
