import torch
import torch.nn as nn
from sklearn.datasets import make_classification

torch.manual_seed(0)
torch.set_num_threads(1)
X, y = make_classification(n_samples=2600, n_features=20, n_informative=12, n_classes=6, class_sep=1.5, random_state=0)
X = torch.tensor(X, dtype=torch.float32)
X = (X - X.mean(0)) / X.std(0)
y = torch.tensor(y)
Xtr, ytr, Xte, yte = X[:2000], y[:2000], X[2000:], y[2000:]


class ResMLP(nn.Module):
    def __init__(self, d, w=64, n=3, k=6):
        super().__init__()
        self.inp = nn.Linear(d, w)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(w), nn.Linear(w, w), nn.GELU(), nn.Linear(w, w))
                                    for _ in range(n))
        self.out = nn.Linear(w, k)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = x + b(x)
        return self.out(x)


model = ResMLP(20)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
for epoch in range(15):
    model.train()
    for b in torch.randperm(2000).split(64):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(Xtr[b])
        loss = nn.functional.cross_entropy(logits.float(), ytr[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(Xte)
        vl = nn.functional.cross_entropy(out.float(), yte).item()
    if epoch % 3 == 2:
        print(f"epoch {epoch} train {loss.item():.4f} val loss {vl:.4f} acc {(out.argmax(1) == yte).float().mean():.4f}")
print("final val loss", round(vl, 4))
