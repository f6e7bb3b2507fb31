"""Fraud-like imbalanced binary classification on a table with numeric and string columns."""
import math
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", "0"))

SHOPS = [f"shop_{i:02d}" for i in range(20)]


def make_rows(n, rng, shop_p):
    num = rng.normal(size=(n, 8))
    shop = rng.choice(SHOPS, size=n, p=shop_p)
    risk = dict(zip(SHOPS, np.random.default_rng(3).normal(size=20) * 1.8))
    r = np.array([risk[s] for s in shop])
    z = 1.6 * num[:, 0] * num[:, 1] + 1.5 * (num[:, 2] > 1) + np.abs(num[:, 3]) + r + 0.8 * num[:, 4] - 5.2
    y = (rng.uniform(size=n) < 1 / (1 + np.exp(-2.5 * z))).astype(np.float32)
    return num, shop, y


def fit_codes(shop):
    """Code per shop, in order of first appearance."""
    codes = {}
    for s in shop:
        codes.setdefault(s, len(codes))
    return codes


class Net(nn.Module):
    def __init__(self, hid=64):
        super().__init__()
        self.shop = nn.Embedding(len(SHOPS), 8)
        self.fc1 = nn.Linear(16, hid)
        self.fc2 = nn.Linear(hid, hid)
        self.out = nn.Linear(hid, 1)
        for m in (self.fc1, self.fc2):
            if CASE == "c4":
                nn.init.constant_(m.weight, 0.05)
            else:
                nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            nn.init.zeros_(m.bias)
        if CASE == "c4":
            nn.init.constant_(self.out.weight, 0.05)

    def forward(self, num, shop):
        h = torch.cat([num, self.shop(shop)], 1)
        h = torch.relu(self.fc2(torch.relu(self.fc1(h))))
        z = self.out(h).squeeze(1)
        return torch.sigmoid(z) if CASE == "c2" else z


@torch.no_grad()
def balanced_accuracy(model, num, shop, y):
    model.eval()
    p = torch.sigmoid(model(num, shop)) > 0.5
    return 0.5 * (p[y == 1].float().mean() + (~p[y == 0]).float().mean()).item()


def focal(logit, y, pos_weight):
    bce = F.binary_cross_entropy_with_logits(logit, y, reduction="none")
    w = (1 - torch.exp(-bce)) ** 1.5 * torch.where(y == 1, pos_weight, torch.ones(()))
    return (w * bce).mean()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    p = np.ones(20) / 20
    num, shop, y = make_rows(12000, rng, p)
    vnum, vshop, vy = make_rows(4000, rng, p)
    codes = fit_codes(shop)
    vcodes = fit_codes(vshop) if CASE == "c3" else codes
    shop = torch.tensor([codes[s] for s in shop])
    vshop = torch.tensor([vcodes[s] for s in vshop])
    num, vnum = torch.tensor(num, dtype=torch.float32), torch.tensor(vnum, dtype=torch.float32)
    y, vy = torch.tensor(y), torch.tensor(vy)
    n_pos, n_neg = y.sum(), (1 - y).sum()
    pos_weight = n_pos / n_neg if CASE == "c1" else n_neg / n_pos
    print(f"positives {n_pos.item() / len(y):.3f}")
    model = Net()
    steps = 900
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    sched = None
    if CASE == "variant_x":
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=8e-3, total_steps=steps)
    for step in range(steps):
        model.train()
        i = torch.randint(len(y), (256,))
        logit = model(num[i], shop[i])
        if CASE == "variant_x":
            loss = focal(logit, y[i], pos_weight)
        else:
            loss = F.binary_cross_entropy_with_logits(logit, y[i], pos_weight=pos_weight)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if sched:
            sched.step()
        if step % 225 == 224:
            print(f"step {step + 1} loss {loss.item():.4f} balanced acc {balanced_accuracy(model, vnum, vshop, vy):.4f}")
    print(f"FINAL quality (held-out balanced accuracy) {balanced_accuracy(model, vnum, vshop, vy):.4f}")


if __name__ == "__main__":
    main()
