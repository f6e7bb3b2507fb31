"""Neural ODE (fixed-step RK4) fitted to trajectories of a damped pendulum."""
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

cfg = SimpleNamespace(dt=0.1, horizon=10, batch=48, steps=220, lr=0.05, momentum=0.9, max_grad_norm=1e-4, width=48)


def pendulum(y):
    th, w = y.unbind(-1)
    return torch.stack([w, -2.0 * torch.sin(th) - 0.2 * w], -1)


def rk4(f, y, dt):
    k1 = f(y)
    k2 = f(y + dt / 2 * k1)
    k3 = f(y + dt / 2 * k2)
    k4 = f(y + dt * k3)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def integrate(f, y0, dt, n):
    ys = [y0]
    for _ in range(n):
        ys.append(rk4(f, ys[-1], dt))
    return torch.stack(ys, 1)


class ODEFunc(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, y):
        return self.net(y)


def initial(n, g):
    return (torch.rand(n, 2, generator=g) * 2 - 1) * torch.tensor([1.5, 1.5])


def main():
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(2)
    func = ODEFunc(cfg.width)
    optimizer = torch.optim.SGD(func.parameters(), lr=cfg.lr, momentum=cfg.momentum)
    for step in range(cfg.steps):
        y0 = initial(cfg.batch, g)
        with torch.no_grad():
            true = integrate(pendulum, y0, cfg.dt, cfg.horizon)
        pred = integrate(func, y0, cfg.dt, cfg.horizon)
        loss = F.mse_loss(pred, true)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(func.parameters(), cfg.max_grad_norm)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.5f}")
    with torch.no_grad():
        y0 = initial(200, g)
        return F.mse_loss(integrate(func, y0, cfg.dt, 20), integrate(pendulum, y0, cfg.dt, 20)).item()


if __name__ == "__main__":
    print(main())
