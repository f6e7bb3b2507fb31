"""MAML (second order) on sinusoid regression with functional inner updates and learned per-parameter inner rates."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call


class Reg(nn.Module):
    def __init__(self, w=40):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(1, w), nn.Linear(w, w), nn.Linear(w, 1)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Reg()
        self.rates = nn.ParameterDict({n.replace(".", "_"): nn.Parameter(torch.tensor(0.03)) for n, _ in self.net.named_parameters()})

    def adapt(self, x, y, steps=2):
        params = dict(self.net.named_parameters())
        for _ in range(steps):
            loss = F.mse_loss(functional_call(self.net, params, (x,)), y)
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            params = {n: p - self.rates[n.replace(".", "_")] * g for (n, p), g in zip(params.items(), grads)}
        return params

    def forward(self, xs, ys, xq):
        return functional_call(self.net, self.adapt(xs, ys), (xq,))


def task(g):
    amp = 0.5 + 2.5 * torch.rand(1, generator=g)
    ph = 3.14 * torch.rand(1, generator=g)
    x = torch.rand(30, 1, generator=g) * 8 - 4
    y = amp * torch.sin(x + ph)
    return x[:10], y[:10], x[10:], y[10:]


def main():
    torch.manual_seed(6)
    g = torch.Generator().manual_seed(6)
    meta = Meta()
    opt = torch.optim.Adam(meta.parameters(), lr=3e-3)
    for it in range(170):
        opt.zero_grad()
        total = 0.0
        for _ in range(5):
            xs, ys, xq, yq = task(g)
            loss = F.mse_loss(meta(xs, ys, xq), yq) / 5
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(meta.parameters(), 10.0)
        opt.step()
        if it % 40 == 0:
            print(it, total)
    errs = []
    for _ in range(60):
        xs, ys, xq, yq = task(g)
        errs.append(F.mse_loss(meta(xs, ys, xq), yq).item())
    return sum(errs) / len(errs)


if __name__ == "__main__":
    print(main())
