"""Spectrally normalised hinge GAN on small ring images; generator loss is negative of the critic score."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm as sn


def rings(n, g):
    r = 2.5 + 3 * torch.rand(n, generator=g)
    t = torch.arange(16).float() - 7.5
    d = (t[:, None] ** 2 + t[None] ** 2).sqrt()
    img = torch.exp(-((d[None] - r[:, None, None]) / 0.9) ** 2)
    return img.unsqueeze(1) * 2 - 1


class G(nn.Module):
    def __init__(self, z=16):
        super().__init__()
        self.fc = nn.Linear(z, 32 * 16)
        self.b1 = nn.BatchNorm2d(32)
        self.c1 = nn.ConvTranspose2d(32, 16, 4, 2, 1)
        self.b2 = nn.BatchNorm2d(16)
        self.c2 = nn.ConvTranspose2d(16, 1, 4, 2, 1)

    def forward(self, z):
        h = F.relu(self.b1(self.fc(z).view(-1, 32, 4, 4)))
        return torch.tanh(self.c2(F.relu(self.b2(self.c1(h)))))


class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = sn(nn.Conv2d(1, 16, 4, 2, 1))
        self.c2 = sn(nn.Conv2d(16, 32, 4, 2, 1))
        self.fc = sn(nn.Linear(32 * 16, 1))

    def forward(self, x):
        h = F.leaky_relu(self.c1(x), 0.1)
        h = F.leaky_relu(self.c2(h), 0.1)
        return self.fc(h.flatten(1)).squeeze(1)


def distance(a, b):
    """Energy distance on pooled pixels."""
    a, b = (F.avg_pool2d(t, 2).flatten(1) for t in (a, b))
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def main():
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(3)
    gen, dis = G(), D()
    og = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.9))
    od = torch.optim.Adam(dis.parameters(), lr=2e-3, betas=(0.0, 0.9))
    ref = rings(300, g)
    print("before", distance(gen(torch.randn(300, 16)).detach(), ref))
    for step in range(220):
        real = rings(32, g)
        with torch.no_grad():
            fake = gen(torch.randn(32, 16))
        ld = F.relu(1 - dis(real)).mean() + F.relu(1 + dis(fake)).mean()
        od.zero_grad()
        ld.backward()
        od.step()
        dis.requires_grad_(False)
        lg = -dis(gen(torch.randn(32, 16))).mean()
        og.zero_grad()
        lg.backward()
        og.step()
        dis.requires_grad_(True)
        if step % 55 == 0:
            print(step, round(ld.item(), 3), round(lg.item(), 3))
    gen.eval()
    with torch.no_grad():
        return distance(gen(torch.randn(300, 16)), ref)


if __name__ == "__main__":
    print(main())
