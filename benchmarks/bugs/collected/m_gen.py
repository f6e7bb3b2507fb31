import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import case, seed_all, digits


def ring(n, k=6, r=2.0, s=0.15):
    a = torch.randint(0, k, (n,)).float() * 2 * math.pi / k
    return torch.stack([a.cos(), a.sin()], 1) * r + s * torch.randn(n, 2)


def moons(n, s=0.06):
    t = torch.rand(n) * math.pi
    up = torch.rand(n) < 0.5
    x = torch.where(up, t.cos(), 1 - t.cos())
    y = torch.where(up, t.sin(), 0.5 - t.sin())
    return torch.stack([x - 0.5, y - 0.25], 1) + s * torch.randn(n, 2)


def energy_distance(a, b):
    if not torch.isfinite(a).all():
        return 1e3
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


# ---- gen_01
class VAE1(nn.Module):
    def __init__(self, z=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, x):
        mu, lv = self.enc(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return self.dec(z), mu, lv


def elbo_terms(out, x, mu, lv):
    rec = (0.5 * ((out - x) / 0.2) ** 2 + math.log(0.2)).sum() / len(x)
    kl = -0.5 * (1 + lv - mu.pow(2) - lv.exp()).sum() / len(x)
    return rec, kl


@case("gen_01")
def gen_01(log):
    seed_all(1)
    X, _, Xv, _ = digits()
    m = VAE1()
    opt = torch.optim.Adam(m.parameters(), lr=2e-3)
    for step in range(350):
        x = X[torch.randint(0, len(X), (64,))]
        rec, kl = elbo_terms(*(lambda o, mu, lv: (o, x, mu, lv))(*m(x)))
        loss = rec + min(1.0, step / 100) * kl
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                o, mu, lv = m(Xv)
                r, k = elbo_terms(o, Xv, mu, lv)
                log("val_elbo", -(r + k).item())
                log("val_kl", k.item())
    with torch.no_grad():
        o, mu, lv = m(Xv)
        r, k = elbo_terms(o, Xv, mu, lv)
        return -(r + k).item()


# ---- gen_02
class VAE2(nn.Module):
    def __init__(self, z=8):
        super().__init__()
        self.e1, self.mu, self.logvar = nn.Linear(64, 96), nn.Linear(96, z), nn.Linear(96, z)
        self.d1, self.d2 = nn.Linear(z, 96), nn.Linear(96, 64)

    def encode(self, x):
        h = F.relu(self.e1(x))
        return self.mu(h), self.logvar(h)

    def decode(self, z):
        return torch.sigmoid(self.d2(F.relu(self.d1(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        std = torch.exp(0.5 * logvar)
        z = mu + std * torch.randn_like(std)
        return self.decode(z), mu, logvar


@case("gen_02")
def gen_02(log):
    seed_all(2)
    X, _, Xv, _ = digits()
    model = VAE2()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(350):
        x = X[torch.randint(0, len(X), (64,))]
        recon, mu, logvar = model(x)
        recon_loss = F.mse_loss(recon, x)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / len(x)
        loss = recon_loss + kld
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_recon", F.mse_loss(model(Xv)[0], Xv).item())
    with torch.no_grad():
        r = model.decode(model.encode(Xv)[0])
        return 1 - (F.mse_loss(r, Xv) / ((Xv - Xv.mean(0)) ** 2).mean()).item()


# ---- gen_03
class VAE3(nn.Module):
    def __init__(self, z=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * z))
        self.decoder = nn.Sequential(nn.Linear(z, 64), nn.ReLU(), nn.Linear(64, 64))

    def sample(self, mu, logvar):
        return torch.distributions.Normal(mu, (0.5 * logvar).exp()).sample()

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, 1)
        return self.decoder(self.sample(mu, logvar)), mu, logvar


@case("gen_03")
def gen_03(log):
    seed_all(3)
    X, _, Xv, _ = digits()
    vae = VAE3()
    opt = torch.optim.Adam(vae.parameters(), lr=3e-3)
    for step in range(350):
        x = X[torch.randint(0, len(X), (64,))]
        out, mu, lv = vae(x)
        rec = F.binary_cross_entropy_with_logits(out, x, reduction="none").sum(1).mean()
        kl = 0.5 * (mu ** 2 + lv.exp() - lv - 1).sum(1).mean()
        loss = rec + 0.5 * kl
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                o, m_, l_ = vae(Xv)
                log("val_rec", F.binary_cross_entropy_with_logits(o, Xv, reduction="none").sum(1).mean().item())
    with torch.no_grad():
        r = vae.decoder(vae.encoder(Xv).chunk(2, 1)[0]).sigmoid()
        return 1 - (F.mse_loss(r, Xv) / ((Xv - Xv.mean(0)) ** 2).mean()).item()


def g_net(z=4, h=48):
    return nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 2))


def d_net(h=48):
    return nn.Sequential(nn.Linear(2, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, 1))


# ---- gen_04
@case("gen_04")
def gen_04(log):
    seed_all(4)
    G, D = g_net(), d_net()
    g_opt = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
    ref = ring(500)
    for step in range(350):
        real = ring(96)
        fake = G(torch.randn(96, 4))
        d_loss = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
        g_loss = F.softplus(-D(fake)).mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("energy_distance", energy_distance(G(torch.randn(500, 4)), ref))
    with torch.no_grad():
        return -energy_distance(G(torch.randn(500, 4)), ref)


# ---- gen_05
@case("gen_05")
def gen_05(log):
    seed_all(5)
    netG, netD = g_net(), d_net()
    optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(96, 1), torch.zeros(96, 1)
    ref = ring(500)
    for step in range(350):
        real = ring(96)
        fake = netG(torch.randn(96, 4)).detach()
        optD.zero_grad()
        lossD = bce(netD(real), ones) + bce(netD(fake), zeros)
        lossD.backward()
        optD.step()
        optG.zero_grad()
        lossG = bce(netD(fake), ones)
        lossG.backward()
        optG.step()
        if step % 25 == 0:
            log("lossG", lossG.item())
            with torch.no_grad():
                log("energy_distance", energy_distance(netG(torch.randn(500, 4)), ref))
    with torch.no_grad():
        return -energy_distance(netG(torch.randn(500, 4)), ref)


# ---- gen_06
@case("gen_06")
def gen_06(log):
    seed_all(6)
    gen, disc = g_net(), d_net()
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(list(disc.parameters()) + list(gen.parameters()), lr=2e-3, betas=(0.5, 0.999))
    ref = ring(500)
    for step in range(350):
        z = torch.randn(96, 4)
        x_fake = gen(z)
        logits = torch.cat([disc(ring(96)), disc(x_fake)])
        labels = torch.cat([torch.ones(96, 1), torch.zeros(96, 1)])
        d_loss = F.binary_cross_entropy_with_logits(logits, labels)
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        g_loss = F.binary_cross_entropy_with_logits(disc(gen(z)), torch.ones(96, 1))
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        if step % 25 == 0:
            log("d_loss", d_loss.item())
            log("g_loss", g_loss.item())
    with torch.no_grad():
        return -energy_distance(gen(torch.randn(500, 4)), ref)


class Eps(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.t = nn.Linear(16, h)
        self.i = nn.Linear(2, h)
        self.f = nn.Sequential(nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 2))

    def forward(self, x, t):
        w = torch.exp(torch.linspace(0, 4, 8))
        e = t[:, None] * w[None]
        return self.f(self.i(x) + self.t(torch.cat([e.sin(), e.cos()], 1)))


@torch.no_grad()
def ddpm_sample(net, n, betas, T, t_of):
    al = 1 - betas
    ab = torch.cumprod(al, 0)
    x = torch.randn(n, 2)
    for k in reversed(range(T)):
        e = net(x, t_of(torch.full((n,), k)))
        x = (x - betas[k] / (1 - ab[k]).sqrt() * e) / al[k].sqrt()
        if k:
            x = x + betas[k].sqrt() * torch.randn_like(x)
    return x


# ---- gen_07
@case("gen_07")
def gen_07(log):
    seed_all(7)
    T = 40
    betas = torch.linspace(1e-3, 0.2, T)
    ab = torch.cumprod(1 - betas, 0)
    net = Eps()
    ema = copy.deepcopy(net).eval()
    for p in ema.parameters():
        p.requires_grad_(False)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    t_of = lambda t: t.float() / T
    ref = moons(500)
    for step in range(350):
        x0 = moons(128)
        t = torch.randint(0, T, (128,))
        eps = torch.randn_like(x0)
        xt = ab[t].sqrt()[:, None] * x0 + (1 - ab[t]).sqrt()[:, None] * eps
        loss = F.mse_loss(net(xt, t_of(t)), eps)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), net.parameters()):
                a.mul_(0.97).add_(b, alpha=0.03)
        if step % 100 == 99:
            log("energy_distance", energy_distance(ddpm_sample(ema, 300, betas, T, t_of), ref))
    return -energy_distance(ddpm_sample(ema, 500, betas, T, t_of), ref)


# ---- gen_08
@case("gen_08")
def gen_08(log):
    seed_all(8)
    T = 40
    betas = torch.linspace(1e-3, 0.2, T)
    alphas_bar = torch.cumprod(1 - betas, 0)
    net = Eps()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def time_feature(t):
        return (t // T).float()

    ref = moons(1500, 0.03)
    for step in range(400):
        x0 = moons(256, 0.03)
        t = torch.randint(0, T, (256,))
        noise = torch.randn_like(x0)
        a = alphas_bar[t].unsqueeze(1)
        pred = net(a.sqrt() * x0 + (1 - a).sqrt() * noise, time_feature(t))
        loss = ((pred - noise) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 100 == 99:
            log("energy_distance", energy_distance(ddpm_sample(net, 300, betas, T, time_feature), ref))
    return -energy_distance(ddpm_sample(net, 1500, betas, T, time_feature), ref)


class Coupling(nn.Module):
    def __init__(self, flip, h=48):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 2))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x[:, :1], x[:, 1:]
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = 2 * torch.tanh(s)
        b = b * s.exp() + t
        y = torch.cat([b, a], 1) if self.flip else torch.cat([a, b], 1)
        return y, s.squeeze(1)


def base_logp(z):
    return -0.5 * (z ** 2).sum(1) - math.log(2 * math.pi)


# ---- gen_09
@case("gen_09")
def gen_09(log):
    seed_all(9)
    flow = nn.ModuleList([Coupling(k % 2 == 1) for k in range(6)])
    opt = torch.optim.Adam(flow.parameters(), lr=3e-3)
    val = moons(600) * 0.2

    def nll(x):
        ld = 0
        for c in flow:
            x, s = c(x)
            ld = ld + s
        return -(base_logp(x) + ld).mean()

    for step in range(280):
        loss = nll(moons(128) * 0.2)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 2.0)
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_nll", nll(val).item())
    with torch.no_grad():
        return -nll(val).item()


# ---- gen_10
class Flow10(nn.Module):
    def __init__(self, k=6):
        super().__init__()
        self.parts = nn.ModuleList([Coupling(i % 2 == 1) for i in range(k)])

    def forward(self, x):
        logdet = torch.zeros(len(x))
        for p in self.parts:
            x, ld = p(x)
            logdet = logdet + ld
        return x, logdet

    @torch.no_grad()
    def inverse(self, z):
        for p in reversed(self.parts):
            a, b = (z[:, 1:], z[:, :1]) if p.flip else (z[:, :1], z[:, 1:])
            s, t = p.net(a).chunk(2, 1)
            b = (b - t) * (-2 * torch.tanh(s)).exp()
            z = torch.cat([b, a], 1) if p.flip else torch.cat([a, b], 1)
        return z


@case("gen_10")
def gen_10(log):
    seed_all(10)
    flow = Flow10()
    optimizer = torch.optim.Adam(flow.parameters(), lr=2e-3)
    val = moons(500)
    for it in range(280):
        x = moons(128)
        z, logdet = flow(x)
        loss = -(base_logp(z) - logdet).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 25 == 0:
            with torch.no_grad():
                z, ld = flow(val)
                log("val_nll", -(base_logp(z) - ld).mean().item())
    return max(-1e3, -energy_distance(flow.inverse(torch.randn(500, 2)), val))


# ---- gen_11
@case("gen_11")
def gen_11(log):
    seed_all(11)
    T = 100
    betas = torch.linspace(1e-4, 0.08, T)
    alphas = 1.0 - betas
    net = Eps()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def q_sample(x0, t, noise):
        a = alphas[t].view(-1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    tf = lambda t: t / T
    ref = moons(1500, 0.03)
    for step in range(400):
        x0 = moons(256, 0.03)
        t = torch.randint(0, T, (256,))
        noise = torch.randn_like(x0)
        loss = F.mse_loss(net(q_sample(x0, t, noise), tf(t)), noise)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 100 == 99:
            log("energy_distance", energy_distance(ddpm_sample(net, 300, betas, T, tf), ref))
    return -energy_distance(ddpm_sample(net, 1500, betas, T, tf), ref)


# ---- gen_12
@case("gen_12")
def gen_12(log):
    """WGAN-GP on the ring, several critic updates for one generator update."""
    seed_all(12)
    G, C = g_net(), d_net()
    go = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.0, 0.9))
    co = torch.optim.Adam(C.parameters(), lr=2e-3, betas=(0.0, 0.9))
    ref = ring(500)
    for step in range(100):
        for _ in range(3):
            real = ring(64)
            with torch.no_grad():
                fake = G(torch.randn(64, 4))
            u = torch.rand(64, 1)
            mix = (u * real + (1 - u) * fake).requires_grad_(True)
            g, = torch.autograd.grad(C(mix).sum(), mix, create_graph=True)
            loss = C(fake).mean() - C(real).mean() + 5 * ((g.norm(dim=1) - 1) ** 2).mean()
            co.zero_grad()
            loss.backward()
            co.step()
        g_loss = -C(G(torch.randn(64, 4))).mean()
        go.zero_grad()
        g_loss.backward()
        go.step()
        if step % 20 == 0:
            with torch.no_grad():
                log("energy_distance", energy_distance(G(torch.randn(500, 4)), ref))
    with torch.no_grad():
        return -energy_distance(G(torch.randn(500, 4)), ref)


# ---- gen_13
@case("gen_13")
def gen_13(log):
    seed_all(13)
    G = g_net()
    D = nn.Sequential(d_net(), nn.Sigmoid())
    og = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
    od = torch.optim.Adam(D.parameters(), lr=5e-3, betas=(0.5, 0.999))
    ref = ring(500) + 9.0
    for step in range(130):
        for _ in range(2):
            real = ring(96) + 9.0
            fake = G(torch.randn(96, 4))
            d_loss = -(torch.log(D(real) + 1e-8) + torch.log(1 - D(fake.detach()) + 1e-8)).mean()
            od.zero_grad()
            d_loss.backward()
            od.step()
        g_loss = torch.log(1 - D(fake) + 1e-8).mean()
        og.zero_grad()
        g_loss.backward()
        og.step()
        if step % 20 == 0:
            log("d_loss", d_loss.item())
            with torch.no_grad():
                log("energy_distance", energy_distance(G(torch.randn(500, 4)), ref))
    with torch.no_grad():
        return -energy_distance(G(torch.randn(500, 4)), ref)
