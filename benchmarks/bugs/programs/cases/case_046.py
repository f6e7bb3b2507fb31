import torch
import torch.nn as nn


class MultiTask(nn.Module):
    def __init__(self, d, h=48, tasks=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(h, 1)] * tasks)

    def forward(self, x):
        z = self.trunk(x)
        return torch.cat([head(z) for head in self.heads], dim=1)


def make(n):
    x = torch.rand(n, 8) * 2 - 1
    y = torch.stack([x[:, 0] + x[:, 1] * x[:, 2],
                     torch.sin(3 * x[:, 3]) + 0.3 * x[:, 0],
                     x[:, 4].abs() + 0.5 * x[:, 5],
                     x[:, 6] - x[:, 7] ** 2 + 0.4 * x[:, 1]], 1)
    return x, y + 0.05 * torch.randn_like(y)


def main(epochs=14, bs=50, lr=3e-3):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    (xa, ya), (xb, yb) = make(2000), make(500)
    model = MultiTask(8)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for ep in range(epochs):
        model.train()
        for b in torch.randperm(2000).split(bs):
            loss = nn.functional.mse_loss(model(xa[b]), ya[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            per = ((model(xb) - yb) ** 2).mean(0)
        print(f"epoch {ep} loss {loss.item():.4f} val mse per task", [round(v, 4) for v in per.tolist()])
    print("final val mse", round(per.mean().item(), 4))


main()
