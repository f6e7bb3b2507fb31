import torch
import torch.nn as nn
from sklearn.datasets import make_classification

torch.manual_seed(0)
torch.set_num_threads(1)
X, y = make_classification(5000, 12, n_informative=8, weights=[0.93], class_sep=0.9, flip_y=0.02, random_state=4)
X = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
y = torch.tensor(y, dtype=torch.float32)
Xtr, ytr, Xte, yte = X[:4000], y[:4000], X[4000:], y[4000:]


class FraudNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.seq = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.seq(x).squeeze(1)


n_pos, n_neg = ytr.sum(), (1 - ytr).sum()
criterion = nn.BCEWithLogitsLoss(pos_weight=n_pos / n_neg)
model = FraudNet()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)


def scores():
    model.eval()
    with torch.no_grad():
        p = (model(Xte) > 0).float()
    rec_pos = (p * yte).sum() / yte.sum()
    rec_neg = ((1 - p) * (1 - yte)).sum() / (1 - yte).sum()
    return rec_pos.item(), rec_neg.item()


for epoch in range(8):
    model.train()
    for b in torch.randperm(4000).split(80):
        loss = criterion(model(Xtr[b]), ytr[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    rp, rn = scores()
    print(f"epoch {epoch} loss {loss.item():.4f} recall+ {rp:.3f} recall- {rn:.3f}")
print("final balanced accuracy", round((rp + rn) / 2, 4))
