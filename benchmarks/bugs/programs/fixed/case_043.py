import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class SimSiam(nn.Module):
    def __init__(self, d=64, h=128, z=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, h), nn.BatchNorm1d(h), nn.ReLU(),
                                     nn.Linear(h, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Linear(h, z))
        self.predictor = nn.Sequential(nn.Linear(z, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, z))

    def forward(self, a, b):
        za, zb = self.encoder(a), self.encoder(b)
        return self.predictor(za), self.predictor(zb), za, zb


def D(p, z):
    return -F.cosine_similarity(p, z.detach(), dim=-1).mean()


def view(x):
    x = x + 0.25 * torch.randn_like(x)
    return x * (torch.rand_like(x) > 0.2)


def knn_acc(model, x, y):
    model.eval()
    with torch.no_grad():
        z = F.normalize(model.encoder(x), dim=1)
    model.train()
    s = z[1200:] @ z[:1200].t()
    return (y[:1200][s.argmax(1)] == y[1200:]).float().mean().item()


torch.manual_seed(5)
torch.set_num_threads(1)
data = load_digits()
X = torch.tensor(data.data, dtype=torch.float32) / 8 - 1
Y = torch.tensor(data.target)
model = SimSiam()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
for it in range(1, 401):
    x = X[torch.randint(0, 1200, (128,))]
    p1, p2, z1, z2 = model(view(x), view(x))
    loss = 0.5 * (D(p1, z2) + D(p2, z1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 80 == 0:
        std = F.normalize(z1, dim=1).std(0).mean().item()
        print(f"iter {it} loss {loss.item():.4f} z std {std:.4f} knn {knn_acc(model, X, Y):.4f}")
print("final knn accuracy", round(knn_acc(model, X, Y), 4))
