"""Physics-informed network for the Poisson equation u'' = f on [0, 1] with u(0) = u(1) = 0."""
import math

import torch
import torch.nn as nn


class FCN(nn.Module):
    def __init__(self, width=48, depth=3):
        super().__init__()
        dims = [1] + [width] * depth
        layers = []
        for i, o in zip(dims, dims[1:]):
            layers += [nn.Linear(i, o), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)


def source(x):
    return -math.pi ** 2 * torch.sin(math.pi * x)


def derivative(y, x):
    return torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y), create_graph=True)[0]


def residual(model, x):
    x = x.requires_grad_(True)
    u = model(x)
    u_x = derivative(u, x)
    u_xx = derivative(u_x, x)
    return u_xx - source(x)


def main():
    torch.manual_seed(0)
    model = FCN()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    boundary = torch.tensor([[0.0], [1.0]])
    for it in range(300):
        x = torch.rand(128, 1)
        pde = residual(model, x).pow(2).mean()
        bc = model(boundary).pow(2).mean()
        loss = pde + 50.0 * bc
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 60 == 0:
            print(f"iter {it} pde {pde.item():.4f} bc {bc.item():.5f}")
    with torch.no_grad():
        grid = torch.linspace(0, 1, 200)[:, None]
        exact = torch.sin(math.pi * grid)
        return ((model(grid) - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    print(main())
