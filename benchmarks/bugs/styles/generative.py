"""Models that learn to produce data."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from benchmarks.bugs.styles.common import Reached, adam, explained, mlp, moons, pictures, update


class _Coupling(nn.Module):
    """An affine coupling whose last layer starts at zero, so that the flow starts as identity."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip = flip
        self.net = mlp(1, 32, 32, 2)
        nn.init.zeros_(self.net[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.net[-1].bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
        log_scale, shift = self.net(a).chunk(2, 1)
        log_scale = torch.tanh(log_scale)
        y = torch.cat([a, b * log_scale.exp() + shift], 1)
        return (y.flip(1) if self.flip else y), log_scale.sum(1)


class _Flow(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_Coupling(bool(i % 2)) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for part in self.parts:
            x, log_det = part(x)
            total = total + log_det
        return -0.5 * x.pow(2).sum(1) - 1.8379 + total


def real_nvp() -> Reached:
    """Affine couplings that start at zero, maximum likelihood."""
    flow = _Flow(6)
    optimizer = adam(flow, 2e-3)
    losses = [update(optimizer, -flow(moons(128)).mean()) for _ in range(300)]
    return Reached(-sum(losses[-20:]) / 20, -1.5)


def spline_like_flow() -> Reached:
    """A flow with data-dependent scaling at the first batch and a large batch, weight decay."""

    class ActNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.log_scale = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
            self.known = False

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if not self.known:
                self.shift.data, self.log_scale.data = -x.mean(0), -x.std(0).log()
                self.known = True
            return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum().expand(len(x))

    norms = nn.ModuleList(ActNorm() for _ in range(4))
    couplings = nn.ModuleList(_Coupling(bool(i % 2)) for i in range(4))
    model = nn.ModuleList([norms, couplings])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    losses = []
    for _ in range(200):
        x, total = moons(256), torch.zeros(256)
        for norm, coupling in zip(norms, couplings, strict=True):
            for part in (norm, coupling):
                x, log_det = part(x)
                total = total + log_det
        losses.append(update(optimizer, (0.5 * x.pow(2).sum(1) + 1.8379 - total).mean(), 5.0))
        schedule.step()
    return Reached(-sum(losses[-20:]) / 20, -1.5)


class _Denoiser(nn.Module):
    """Predicts the noise from noisy points and the time; the last layer starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(50, 32)
        self.into = nn.Linear(2, 64)
        self.shifts = nn.ModuleList(nn.Linear(32, 64) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time, h = self.time(t), self.into(x)
        for layer, shift in zip(self.layers, self.shifts, strict=True):
            h = h + F.silu(layer(h + shift(time)))
        out: Tensor = self.out(h)
        return out


def diffusion() -> Reached:
    """Noise prediction with a cosine schedule, a warm-up and an average of the weights."""
    net = _Denoiser()
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 30)
    kept = torch.cos(torch.linspace(0.05, 1.5, 50)).pow(2)
    losses = []
    for _ in range(350):
        x, t = moons(128), torch.randint(50, (128,))
        noise = torch.randn_like(x)
        noisy = kept[t, None].sqrt() * x + (1 - kept[t, None]).sqrt() * noise
        losses.append(update(optimizer, F.mse_loss(net(noisy, t), noise), 1.0))
        average.update_parameters(net)
        warm.step()
    return Reached(-sum(losses[-30:]) / 30, -0.6)


def flow_matching() -> Reached:
    """Velocities of straight paths from noise to data; the time enters as a number."""
    net = mlp(3, 64, 64, 64, 2, act=nn.SiLU)
    optimizer = adam(net, 3e-3)
    losses = []
    for _ in range(300):
        x, noise, t = moons(256), torch.randn(256, 2), torch.rand(256, 1)
        along = torch.cat([(1 - t) * noise + t * x, t], 1)
        losses.append(update(optimizer, F.mse_loss(net(along), x - noise)))
    return Reached(-sum(losses[-30:]) / 30, -1.25)


def vae() -> Reached:
    """Convolutions, a weight of the divergence that rises from 0 to 1."""

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 8, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(8, 16, 3, 2, 1),
                nn.ReLU(),
                nn.Flatten(),
            )
            self.mean, self.log_var = nn.Linear(144, 4), nn.Linear(144, 4)
            self.decoder = nn.Sequential(
                nn.Linear(4, 144),
                nn.ReLU(),
                nn.Unflatten(1, (16, 3, 3)),
                nn.ConvTranspose2d(16, 8, 4, 2, 1),
                nn.ReLU(),
                nn.ConvTranspose2d(8, 1, 4, 2, 1),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.encoder(x)
            mean, log_var = self.mean(h), self.log_var(h)
            z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
            return self.decoder(z), mean, log_var

    model = Vae()
    optimizer = adam(model, 2e-3)
    for step in range(300):
        x, _ = pictures(64)
        y, mean, log_var = model(x)
        divergence = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
        rebuilt = F.mse_loss(y, x, reduction="none").sum((1, 2, 3)).mean()
        update(optimizer, rebuilt + min(1.0, step / 150) * 0.2 * divergence)
    return Reached(explained(y, x), 0.3)


def vq_vae() -> Reached:
    """A codebook with straight-through gradients and a commitment loss."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(16, 64, 8), mlp(8, 64, 16)
            self.codes = nn.Embedding(32, 8)
            nn.init.uniform_(self.codes.weight, -1 / 32, 1 / 32)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.encoder(x)
            index = torch.cdist(z, self.codes.weight).argmin(1)
            code = self.codes(index)
            loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
            return self.decoder(z + (code - z).detach()), loss

    model, prototypes = Quantized(), torch.randn(12, 16)
    optimizer = adam(model, 2e-3)
    for _ in range(300):
        x = prototypes[torch.randint(12, (64,))] + 0.1 * torch.randn(64, 16)
        y, extra = model(x)
        update(optimizer, F.mse_loss(y, x) + extra)
    return Reached(explained(y, x), 0.3)


def hinge_gan() -> Reached:
    """Spectral normalization, two steps of the discriminator per step of the generator."""
    generator = nn.Sequential(
        nn.Linear(4, 48),
        nn.BatchNorm1d(48),
        nn.ReLU(),
        nn.Linear(48, 48),
        nn.ReLU(),
        nn.Linear(48, 2),
    )
    judge = nn.Sequential(
        spectral_norm(nn.Linear(2, 48)),
        nn.LeakyReLU(0.2),
        spectral_norm(nn.Linear(48, 48)),
        nn.LeakyReLU(0.2),
        spectral_norm(nn.Linear(48, 1)),
    )
    first = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    second = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.0, 0.9))
    for _ in range(200):
        for _ in range(2):
            fake = generator(torch.randn(64, 4)).detach()
            loss = F.relu(1 - judge(moons(64))).mean() + F.relu(1 + judge(fake)).mean()
            update(second, loss)
        update(first, -judge(generator(torch.randn(64, 4))).mean())
    made, real = generator(torch.randn(256, 4)), moons(256)
    return Reached(-float(torch.cdist(real, made).min(1).values.mean()), -0.4)


def wasserstein_gan() -> Reached:
    """A critic with a gradient penalty, three steps of it per step of the generator."""
    generator, critic = mlp(4, 48, 48, 2), mlp(2, 48, 48, 1, act=nn.SiLU)
    first = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    for _ in range(200):
        for _ in range(3):
            real, fake = moons(64), generator(torch.randn(64, 4)).detach()
            share = torch.rand(64, 1)
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).pow(2).mean()
            update(second, critic(fake).mean() - critic(real).mean() + 10 * penalty)
        update(first, -critic(generator(torch.randn(64, 4))).mean())
    made, real = generator(torch.randn(256, 4)), moons(256)
    return Reached(-float(torch.cdist(real, made).min(1).values.mean()), -0.4)


def conditional_gan() -> Reached:
    """Least squares, labels given to both networks by embeddings, smoothed targets."""

    class Given(nn.Module):
        def __init__(self, size: int, out: int) -> None:
            super().__init__()
            self.label, self.net = (
                nn.Embedding(4, 8),
                mlp(size + 8, 64, 64, out, act=lambda: nn.LeakyReLU(0.2)),
            )

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            out: Tensor = self.net(torch.cat([x, self.label(label)], 1))
            return out

    generator, judge = Given(6, 2), Given(2, 1)
    first = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    second = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
    centers = torch.tensor([[2.0, 0], [-2, 0], [0, 2], [0, -2]])
    for _ in range(250):
        label = torch.randint(4, (64,))
        real = centers[label] + 0.2 * torch.randn(64, 2)
        fake = generator(torch.randn(64, 6), label)
        a = F.mse_loss(judge(real, label), torch.full((64, 1), 0.9))
        b = F.mse_loss(judge(fake.detach(), label), torch.zeros(64, 1))
        update(second, 0.5 * (a + b))
        update(first, F.mse_loss(judge(fake, label), torch.ones(64, 1)))
    far = (generator(torch.randn(64, 6), label) - centers[label]).norm(dim=1).mean()
    return Reached(-float(far), -1.2)


def energy_model() -> Reached:
    """Contrastive divergence: samples of Langevin dynamics against data."""
    energy = mlp(2, 64, 64, 1, act=nn.SiLU)
    optimizer = adam(energy, 1e-3)
    buffer = torch.randn(512, 2)
    for _ in range(200):
        rows = torch.randint(512, (64,))
        x = torch.where(torch.rand(64, 1) < 0.05, torch.randn(64, 2), buffer[rows])
        for _ in range(10):
            x.requires_grad_()
            (slope,) = torch.autograd.grad(energy(x).sum(), x)
            x = (x - 0.05 * slope + 0.05 * torch.randn_like(x)).detach().clamp(-4, 4)
        buffer[rows] = x
        real = moons(64)
        up, down = energy(real), energy(x)
        update(optimizer, up.mean() - down.mean() + 0.1 * (up.pow(2) + down.pow(2)).mean(), 1.0)
    with torch.no_grad():
        gap = energy(3 * torch.rand(256, 2) - 1.5).mean() - energy(moons(256)).mean()
    return Reached(float(gap), 0.1)


def masked_autoregression() -> Reached:
    """A network over binary values whose masks forbid to look ahead (MADE)."""

    class Masked(nn.Linear):
        def __init__(self, a: int, b: int, mask: Tensor) -> None:
            super().__init__(a, b)
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.mask, Tensor)
            return F.linear(x, self.weight * self.mask, self.bias)

    n, width = 16, 64
    degree = torch.arange(width) % (n - 1)
    into = (degree[:, None] >= torch.arange(n)[None]).float()
    out = (torch.arange(n)[:, None] > degree[None]).float()
    model = nn.Sequential(Masked(n, width, into), nn.ReLU(), Masked(width, n, out))
    optimizer = adam(model, 5e-3)
    prototypes = (torch.rand(5, n) < 0.5).float()
    losses = []
    for _ in range(250):
        x = prototypes[torch.randint(5, (64,))]
        x = torch.where(torch.rand(64, n) < 0.05, 1 - x, x)
        losses.append(update(optimizer, F.binary_cross_entropy_with_logits(model(x), x)))
    return Reached(-losses[-1], -0.45)


def adversarial_autoencoder() -> Reached:
    """Rebuilds, and in turn makes its codes look like noise; three optimizers."""
    encoder, decoder, judge = mlp(16, 48, 3), mlp(3, 48, 16), mlp(3, 32, 1)
    one, two, three = (
        adam([*encoder.parameters(), *decoder.parameters()], 3e-3),
        adam(judge),
        adam(encoder),
    )
    mix = torch.randn(3, 16)
    for _ in range(250):
        x = torch.randn(64, 3).tanh() @ mix + 0.05 * torch.randn(64, 16)
        y = decoder(encoder(x))
        update(one, F.mse_loss(y, x))
        real, fake = judge(torch.randn(64, 3)), judge(encoder(x).detach())
        ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
        update(
            two,
            F.binary_cross_entropy_with_logits(real, ones)
            + F.binary_cross_entropy_with_logits(fake, zeros),
        )
        update(three, F.binary_cross_entropy_with_logits(judge(encoder(x)), ones))
    return Reached(explained(y, x), 0.7)


def denoising_score() -> Reached:
    """Scores at several noise levels, weighted by their variance; weight-normalized layers."""
    net = nn.Sequential(
        weight_norm(nn.Linear(3, 64)),
        nn.Softplus(),
        weight_norm(nn.Linear(64, 64)),
        nn.Softplus(),
        nn.Linear(64, 2),
    )
    slow = deepcopy(net)
    optimizer = adam(net, 3e-3)
    levels = torch.logspace(0.3, -1.3, 8)
    losses = []
    for _ in range(300):
        x, noise = moons(128), torch.randn(128, 2)
        sigma = levels[torch.randint(8, (128, 1))]
        score = net(torch.cat([x + sigma * noise, sigma.log()], 1)) / sigma
        losses.append(update(optimizer, ((sigma * score + noise).pow(2).sum(1)).mean()))
        with torch.no_grad():
            for p, q in zip(slow.parameters(), net.parameters(), strict=True):
                p.lerp_(q, 0.01)
    return Reached(-sum(losses[-30:]) / 30, -1.7)
