"""Damped oscillator PINN: hard initial conditions, sine activations, Adam then L-BFGS with strong Wolfe line search."""
import torch
import torch.nn as nn


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


class Net(nn.Module):
    def __init__(self, w=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, w), Sine(), nn.Linear(w, w), Sine(), nn.Linear(w, 1))
        with torch.no_grad():
            self.net[0].weight.uniform_(-4, 4)
            self.net[4].weight.mul_(0.1)

    def forward(self, t):
        return 1.0 + t ** 2 * self.net(t)


def residual(net, t):
    t = t.clone().requires_grad_(True)
    u = net(t)
    du, = torch.autograd.grad(u.sum(), t, create_graph=True)
    ddu, = torch.autograd.grad(du.sum(), t, create_graph=True)
    return ddu + 0.4 * du + 9.0 * u


def exact(t):
    w = (9 - 0.04) ** 0.5
    return torch.exp(-0.2 * t) * (torch.cos(w * t) + 0.2 / w * torch.sin(w * t))


def main():
    torch.manual_seed(1)
    net = Net()
    t = torch.linspace(0, 2.5, 80)[:, None]
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    for it in range(150):
        loss = residual(net, t).pow(2).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    print("adam", loss.item())
    lbfgs = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=10, history_size=30, line_search_fn="strong_wolfe")

    def closure():
        lbfgs.zero_grad()
        l = residual(net, t).pow(2).mean()
        l.backward()
        return l

    for it in range(25):
        loss = lbfgs.step(closure)
    print("lbfgs", loss.item())
    with torch.no_grad():
        return ((net(t) - exact(t)).norm() / exact(t).norm()).item()


if __name__ == "__main__":
    print(main())
