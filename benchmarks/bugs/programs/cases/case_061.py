import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                               nn.Linear(256, 128), nn.ReLU())
        self.g = nn.Linear(128, 32)

    def forward(self, x):
        return F.normalize(self.g(self.f(x)), dim=1)


def info_nce(z1, z2, tau=0.1):
    logits = z1 @ z2.t() / tau
    target = torch.arange(len(z1))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def jitter(x):
    x = x * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1)) + 0.1 * torch.randn_like(x)
    return x * (torch.rand_like(x) > 0.15)


X = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16


def sample(n=96):
    return X[torch.randint(0, 1300, (n,))]


net = Encoder()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)


def retrieval():
    net.eval()
    with torch.no_grad():
        a, b = net(jitter(X[1300:])), net(jitter(X[1300:]))
    net.train()
    return ((a @ b.t()).argmax(1) == torch.arange(len(a))).float().mean().item()


for step in range(1, 301):
    view1, view2 = jitter(sample()), jitter(sample())
    loss = info_nce(net(view1), net(view2))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f} retrieval {retrieval():.4f}")
print("final retrieval", round(sum(retrieval() for _ in range(4)) / 4, 4))
