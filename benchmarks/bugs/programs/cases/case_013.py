import torch
import torch.nn as nn
from sklearn.datasets import load_digits


class Generator(nn.Module):
    def __init__(self, nz=16):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(nz, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(128, 1))

    def forward(self, x):
        return self.main(x)


class GANTrainer:
    def __init__(self, data, nz=16):
        self.g, self.d, self.data, self.nz = Generator(nz), Discriminator(), data, nz
        self.opt_g = torch.optim.Adam(self.g.parameters(), 1e-3, betas=(0.5, 0.99))
        self.opt_d = torch.optim.Adam(self.d.parameters(), 1e-3, betas=(0.5, 0.99))
        self.loss = nn.BCEWithLogitsLoss()

    def step(self, bs=64):
        real = self.data[torch.randint(len(self.data), (bs,))]
        one, zero = torch.ones(bs, 1), torch.zeros(bs, 1)
        fake = self.g(torch.randn(bs, self.nz))
        d_loss = self.loss(self.d(real), one) + self.loss(self.d(fake.detach()), zero)
        d_loss.backward()
        self.opt_d.step()
        self.opt_g.zero_grad()
        g_loss = self.loss(self.d(fake), one)
        g_loss.backward()
        self.opt_g.step()
        return d_loss.item(), g_loss.item()

    @torch.no_grad()
    def quality(self):
        self.g.eval()
        s = self.g(torch.randn(400, self.nz))
        self.g.train()
        return torch.cdist(s, self.data).min(1).values.mean().item() + torch.cdist(self.data, s).min(1).values.mean().item()


def main():
    torch.manual_seed(3)
    torch.set_num_threads(1)
    x = torch.tensor(load_digits(n_class=3).data, dtype=torch.float32) / 8 - 1
    t = GANTrainer(x)
    for i in range(600):
        d, g = t.step()
        if i % 100 == 99:
            print(f"step {i + 1} D {d:.3f} G {g:.3f} nn-dist {t.quality():.3f}")
    print("final nn-dist", round(t.quality(), 4))


main()
