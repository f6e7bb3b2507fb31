import torch
from torch import nn

torch.manual_seed(2)
torch.set_num_threads(1)


class MoE(nn.Module):
    def __init__(self, d_in, d_hidden, n_experts):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d_in, d_hidden), nn.ReLU(), nn.Linear(d_hidden, 1)) for _ in range(n_experts))
        self.gate = nn.Sequential(nn.Linear(d_in, d_hidden), nn.Tanh(), nn.Linear(d_hidden, n_experts))

    def forward(self, x):
        w = torch.softmax(self.gate(x), dim=1)
        outs = torch.cat([e(x) for e in self.experts], dim=1)
        return (w * outs).sum(dim=1)


def generate(n):
    x = torch.randn(n, 6)
    a = 2 * x[:, 0] + x[:, 1]
    b = -3 * x[:, 0] + 1.5
    c = x[:, 2] * x[:, 3]
    region = x[:, 4] + 0.5 * x[:, 5]
    y = torch.where(region > 0.4, a, torch.where(region < -0.4, b, c))
    return x, y + 0.1 * torch.randn(n)


xtr, ytr = generate(2000)
xte, yte = generate(500)
net = MoE(6, 32, 4)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(1, 601):
    idx = torch.randint(0, len(xtr), (64,))
    loss = nn.functional.mse_loss(net(xtr[idx]), ytr[idx])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 100 == 0:
        net.eval()
        with torch.no_grad():
            mse = torch.stack([nn.functional.mse_loss(net(xb), yb)
                               for xb, yb in zip(xte.split(50), yte.split(50))]).mean()
        net.train()
        print(f"step {step} loss {loss.item():.4f} test mse {mse.item():.4f}")
print(f"final test mse {mse.item():.4f}")
