import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
torch.set_num_threads(1)


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Linear(h, o))


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(mlp(64, 128, 64), mlp(64, 128, 32))
        self.predictor = mlp(32, 64, 32)
        self.target = copy.deepcopy(self.online)
        self.target.requires_grad_(False)

    def forward(self, a, b):
        pa, pb = self.predictor(self.online(a)), self.predictor(self.online(b))
        with torch.no_grad():
            ta, tb = self.target(a), self.target(b)
        return 4 - 2 * F.cosine_similarity(pa, tb).mean() - 2 * F.cosine_similarity(pb, ta).mean()

    @torch.no_grad()
    def update_target(self, tau=0.97):
        for t, o in zip(self.target.parameters(), self.online.parameters()):
            t.data = tau * t.data + (1 - tau) * o.data


def view(x):
    x = x * (torch.rand_like(x) > 0.25)
    return x + 0.15 * torch.randn_like(x)


d = load_digits()
X, Y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
model = BYOL()
opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=1e-5)
for step in range(1, 401):
    model.train()
    x = X[torch.randint(0, 1300, (128,))]
    loss = model(view(x), view(x))
    opt.zero_grad()
    loss.backward()
    opt.step()
    model.update_target()
    if step % 80 == 0:
        model.eval()
        with torch.no_grad():
            h = F.normalize(model.online[0](X), dim=1)
        acc = (Y[:1300][(h[1300:] @ h[:1300].T).argmax(1)] == Y[1300:]).float().mean().item()
        print(f"step {step} loss {loss.item():.4f} knn {acc:.4f} std {h.std(0).mean():.4f}")
print("final knn", round(acc, 4))
