"""Two-tower retrieval for a shop: a bag of past purchases on one side, item id + category on the other (in-batch softmax)."""
import os, sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else "healthy"
SEED = int(os.environ.get("SEED", 0))
ITEMS, CATS, USERS, BASKET = 400, 20, 3000, 9


def make_shop(rng):
    """Users like three categories and one style; items have a category, a style and a popularity."""
    cat = rng.integers(0, CATS, ITEMS)
    style = rng.integers(0, 4, ITEMS)
    pop = rng.zipf(1.6, ITEMS).clip(1, 30).astype(float)
    baskets = np.zeros((USERS, BASKET), dtype=np.int64)
    for u in range(USERS):
        liked, taste = rng.choice(CATS, 3, replace=False), rng.integers(0, 4)
        w = pop * np.where(np.isin(cat, liked), 1.0, 0.004) * np.where(style == taste, 1.0, 0.08)
        baskets[u] = rng.choice(ITEMS, BASKET, replace=False, p=w / w.sum())
    return torch.tensor(cat), torch.tensor(pop, dtype=torch.float32), torch.tensor(baskets)


class BuyerTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.bag = nn.EmbeddingBag(ITEMS, dim, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, basket):
        z = self.bag(basket)
        return z + self.mlp(z)


class ItemTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.item = nn.Embedding(ITEMS, dim)
        self.category = nn.Embedding(CATS, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, ids, cats):
        return self.proj(self.item(ids) + self.category(cats))


class TwoTowers(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.buyer, self.goods = BuyerTower(dim), ItemTower(dim)
        for emb in (self.buyer.bag, self.goods.item, self.goods.category):
            nn.init.normal_(emb.weight, std=0.3)
        self.temperature = 0.1
        if CASE == "variant_x":
            self.goods.item.weight = self.buyer.bag.weight

    def vectors(self, basket, ids, cats):
        axis = 0 if CASE == "norm_axis" else -1
        q = F.normalize(self.buyer(basket), dim=axis)
        k = F.normalize(self.goods(ids, cats), dim=axis)
        return q, k

    def forward(self, basket, ids, cats):
        q, k = self.vectors(basket, ids, cats)
        if CASE == "temp_times":
            return torch.einsum("qd,kd->qk", q, k) * self.temperature
        return torch.einsum("qd,kd->qk", q, k) / self.temperature


@torch.no_grad()
def recall_at(model, baskets, cat, k=20):
    model.eval()
    scores = model(baskets[:, :-1], torch.arange(ITEMS), cat)
    scores.scatter_(1, baskets[:, :-1], float("-inf"))
    top = scores.topk(k, dim=1).indices
    model.train()
    return top.eq(baskets[:, -1:]).any(1).float().mean().item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    cat, pop, baskets = make_shop(np.random.default_rng(30 + SEED))
    train, valid = baskets[:2600], baskets[2600:]
    freq = torch.bincount(train.flatten(), minlength=ITEMS).float() + 1
    log_q = (freq / freq.sum()).log()
    model = TwoTowers()
    if CASE == "half_opt":
        opt = torch.optim.Adam(model.goods.proj.parameters(), lr=4e-3)
    elif CASE == "variant_x":
        opt = torch.optim.AdamW([{"params": model.buyer.parameters(), "lr": 6e-3},
                                 {"params": [model.goods.category.weight, *model.goods.proj.parameters()], "lr": 3e-3}],
                                weight_decay=1e-3)
    else:
        opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(1, 601):
        rows = torch.randint(0, len(train), (256,))
        order = torch.rand(256, BASKET).argsort(1)
        b = train[rows].gather(1, order)
        past, bought = b[:, :-1], b[:, -1]
        if CASE == "bag_all":
            past = b
        scores = model(past, bought, cat[bought])
        if CASE == "logq_sign":
            scores = scores + log_q[bought]
        else:
            scores = scores - log_q[bought]
        same = bought[:, None].eq(bought[None, :]) & ~torch.eye(256, dtype=torch.bool)
        scores = scores.masked_fill(same, -1e9)
        loss = F.cross_entropy(scores, torch.arange(256))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 150 == 0:
            print(f"step {step} loss {loss.item():.3f} recall@20 {recall_at(model, valid, cat):.3f}")
    print("quality", round(recall_at(model, valid, cat), 4))


if __name__ == "__main__":
    main()
