"""Two-tower retrieval with in-batch negatives."""
import torch
import torch.nn as nn
import torch.nn.functional as F

N_USERS, N_ITEMS, DIM = 400, 300, 16
gg = torch.Generator().manual_seed(77)
U_TASTE = torch.randn(N_USERS, 6, generator=gg)
I_STYLE = torch.randn(N_ITEMS, 6, generator=gg)


def interactions(n, seed):
    g = torch.Generator().manual_seed(seed)
    u = torch.randint(N_USERS, (n,), generator=g)
    p = (1.8 * U_TASTE[u] @ I_STYLE.T / 6 ** 0.5).softmax(-1)
    i = torch.multinomial(p, 1, generator=g).squeeze(1)
    return u, i


class Tower(nn.Module):
    def __init__(self, n, n_feat):
        super().__init__()
        self.id_emb = nn.Embedding(n, 16)
        self.feat = nn.Linear(n_feat, 16)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, DIM))

    def forward(self, ids, feats):
        z = self.mlp(torch.cat([self.id_emb(ids), self.feat(feats)], -1))
        return F.normalize(z, dim=-1)


class TwoTower(nn.Module):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.user_tower = Tower(N_USERS, 6)
        self.item_tower = Tower(N_ITEMS, 6)
        self.temperature = temperature

    def forward(self, u, i):
        zu = self.user_tower(u, U_TASTE[u])
        zi = self.item_tower(i, I_STYLE[i])
        return zu @ zi.T * self.temperature


def recall_at_k(model, u, i, k=20):
    with torch.no_grad():
        items = model.item_tower(torch.arange(N_ITEMS), I_STYLE)
        users = model.user_tower(u, U_TASTE[u])
        top = (users @ items.T).topk(k, dim=-1).indices
    return (top == i[:, None]).any(-1).float().mean().item()


def main():
    torch.manual_seed(13)
    u, i = interactions(12000, 1)
    tu, ti = interactions(1500, 2)
    model = TwoTower()
    opt = torch.optim.Adagrad(model.parameters(), lr=0.03)
    for step in range(220):
        idx = torch.randint(len(u), (128,))
        logits = model(u[idx], i[idx])
        loss = F.cross_entropy(logits, torch.arange(len(idx)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 55 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    return recall_at_k(model, tu, ti)


if __name__ == "__main__":
    print(main())
