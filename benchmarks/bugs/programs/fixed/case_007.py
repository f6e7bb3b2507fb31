import torch
import torch.nn as nn
from sklearn.datasets import make_moons

torch.manual_seed(0)
torch.set_num_threads(1)
T = 60
betas = torch.linspace(1e-3, 0.15, T)
alphas = 1 - betas
alphas_cumprod = torch.cumprod(alphas, 0)


class Denoiser(nn.Module):
    def __init__(self, h=96):
        super().__init__()
        self.time = nn.Embedding(T, 32)
        self.net = nn.Sequential(nn.Linear(2 + 32, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


def q_sample(x0, t, noise=None):
    if noise is None:
        noise = torch.randn_like(x0)
    a = alphas_cumprod[t].unsqueeze(1)
    return a.sqrt() * x0 + (1 - a).sqrt() * noise


@torch.no_grad()
def sample(model, n):
    x = torch.randn(n, 2)
    for i in reversed(range(T)):
        t = torch.full((n,), i)
        eps = model(x, t)
        x = (x - betas[i] / (1 - alphas_cumprod[i]).sqrt() * eps) / alphas[i].sqrt()
        if i > 0:
            x = x + betas[i].sqrt() * torch.randn_like(x)
    return x


data = torch.tensor(make_moons(2000, noise=0.05, random_state=0)[0], dtype=torch.float32)
data = (data - data.mean(0)) / data.std(0)
model = Denoiser()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(1, 601):
    x0 = data[torch.randint(len(data), (256,))]
    t = torch.randint(0, T, (256,))
    noise = torch.randn_like(x0)
    loss = ((model(q_sample(x0, t, noise), t) - noise) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.4f}")
s = sample(model, 1000)
d = torch.cdist(s, data)
print("final chamfer distance", round((d.min(1).values.mean() + d.min(0).values.mean()).item(), 4))
