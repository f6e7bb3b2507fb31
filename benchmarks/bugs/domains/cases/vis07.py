"""DCGAN-style training on small images of bars."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def bars(n, g):
    pos = torch.randint(2, 14, (n,), generator=g)
    vert = torch.rand(n, generator=g) < 0.5
    t = torch.arange(16)
    line = ((t[None] - pos[:, None]).abs() < 2).float() * 2 - 1
    img = torch.where(vert[:, None, None], line[:, None, :].expand(n, 16, 16), line[:, :, None].expand(n, 16, 16))
    return (img * 0.9 + 0.05 * torch.randn(n, 16, 16, generator=g)).unsqueeze(1)


class Generator(nn.Module):
    def __init__(self, latent=24):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(latent, 32 * 4 * 4), nn.Unflatten(1, (32, 4, 4)), nn.BatchNorm2d(32), nn.ReLU(True),
            nn.ConvTranspose2d(32, 24, 4, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(True),
            nn.ConvTranspose2d(24, 1, 4, 2, 1), nn.Tanh())

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2, True),
            nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Flatten(), nn.Linear(32 * 16, 1))

    def forward(self, x):
        return self.main(x).squeeze(1)


def energy_distance(a, b):
    a, b = a.flatten(1), b.flatten(1)
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def main():
    torch.manual_seed(6)
    g = torch.Generator().manual_seed(6)
    netG, netD = Generator(), Discriminator()
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optG = torch.optim.Adam(netG.parameters(), lr=3e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    ones, zeros = torch.full((32,), 0.9), torch.zeros(32)
    for it in range(280):
        real = bars(32, g)
        fake = netG(torch.randn(32, 24)).detach()
        lossD = bce(netD(real), ones) + bce(netD(fake), zeros)
        optD.zero_grad()
        lossD.backward()
        optD.step()

        optG.zero_grad()
        lossG = bce(netD(fake), ones)
        lossG.backward()
        optG.step()
        if it % 70 == 0:
            print(f"[{it}] D {lossD.item():.3f} G {lossG.item():.3f}")
    netG.eval()
    with torch.no_grad():
        return energy_distance(netG(torch.randn(300, 24)), bars(300, g))


if __name__ == "__main__":
    print(main())
