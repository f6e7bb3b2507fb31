import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_friedman1


class GatedBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.gate * self.b(F.relu(self.a(x)))


class Net(nn.Module):
    def __init__(self, d, w=40, n=16):
        super().__init__()
        self.inp = nn.Linear(d, w)
        self.blocks = nn.Sequential(*[GatedBlock(w) for _ in range(n)])
        self.out = nn.Linear(w, 1)

    def forward(self, x):
        return self.out(F.relu(self.blocks(self.inp(x)))).squeeze(-1)


torch.manual_seed(0)
torch.set_num_threads(1)
X, y = make_friedman1(2400, 10, noise=0.5, random_state=0)
X = torch.tensor(X * 2 - 1, dtype=torch.float32)
y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
net = Net(10)
opt = torch.optim.Adam(net.parameters(), lr=1.5e-3)
for ep in range(12):
    net.train()
    for b in torch.randperm(2000).split(64):
        loss = F.mse_loss(net(X[b]), y[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        v = F.mse_loss(net(X[2000:]), y[2000:]).item()
    print(f"epoch {ep} loss {loss.item():.4f} val mse {v:.4f} gates {[round(b.gate.item(), 2) for b in net.blocks[:4]]}")
print("final val mse", round(v, 4))
