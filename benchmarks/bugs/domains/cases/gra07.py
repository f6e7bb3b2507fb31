"""Link prediction: GraphSAGE encoder, dot-product decoder, sampled negatives."""
import yaml
import torch
import torch.nn as nn
import torch.nn.functional as F

CONFIG = """
model: {dim: 32, hidden: 48}
optim: {lr: 0.01, weight_decay: 0.5}
train: {steps: 200, seed: 6}
"""


def latent_graph(n=300, seed=0):
    g = torch.Generator().manual_seed(seed)
    pos = torch.rand(n, 2, generator=g)
    d = torch.cdist(pos, pos)
    prob = torch.exp(-(d / 0.09) ** 2)
    a = torch.triu(torch.rand(n, n, generator=g) < prob, 1)
    edges = a.nonzero()
    edges = edges[torch.randperm(len(edges), generator=g)]
    feats = torch.cat([torch.sin(6 * pos), torch.cos(6 * pos)], 1)
    feats = torch.cat([feats, torch.randn(n, 8, generator=g)], 1) + 0.3 * torch.randn(n, 12, generator=g)
    cut = int(0.85 * len(edges))
    return feats, edges[:cut], edges[cut:]


class SAGE(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.self_lin = nn.Linear(d_in, d_out)
        self.nbr_lin = nn.Linear(d_in, d_out, bias=False)

    def forward(self, x, ei, deg):
        agg = torch.zeros_like(x).index_add(0, ei[1], x[ei[0]]) / deg[:, None]
        return self.self_lin(x) + self.nbr_lin(agg)


class Encoder(nn.Module):
    def __init__(self, d_in, hidden, dim):
        super().__init__()
        self.l1 = SAGE(d_in, hidden)
        self.l2 = SAGE(hidden, dim)

    def forward(self, x, ei, deg):
        return self.l2(F.relu(self.l1(x, ei, deg)), ei, deg)


def auc(pos, neg):
    return (pos[:, None] > neg[None]).float().mean().item() + 0.5 * (pos[:, None] == neg[None]).float().mean().item()


def main():
    cfg = yaml.safe_load(CONFIG)
    torch.manual_seed(cfg["train"]["seed"])
    x, train_e, test_e = latent_graph()
    n = len(x)
    ei = torch.cat([train_e, train_e.flip(1)]).T
    deg = torch.bincount(ei[1], minlength=n).clamp(min=1).float()
    net = Encoder(x.size(1), cfg["model"]["hidden"], cfg["model"]["dim"])
    opt = torch.optim.Adam(net.parameters(), **cfg["optim"])
    for step in range(cfg["train"]["steps"]):
        z = net(x, ei, deg)
        neg = torch.randint(n, train_e.shape)
        s_pos = (z[train_e[:, 0]] * z[train_e[:, 1]]).sum(-1)
        s_neg = (z[neg[:, 0]] * z[neg[:, 1]]).sum(-1)
        loss = F.softplus(-s_pos).mean() + F.softplus(s_neg).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"{step} loss {loss.item():.4f}")
    net.eval()
    with torch.no_grad():
        z = net(x, ei, deg)
        neg = torch.randint(n, (2000, 2))
        return auc((z[test_e[:, 0]] * z[test_e[:, 1]]).sum(-1), (z[neg[:, 0]] * z[neg[:, 1]]).sum(-1))


if __name__ == "__main__":
    print(main())
