"""Docking a drifting puck at the origin (continuous thrust): soft actor-critic with twin critics."""
import copy, math, os, sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else "healthy"
SEED = int(os.environ.get("SEED", 0))
GAMMA, TAU, LIMIT, FLEET, TARGET = 0.96, 0.02, 50, 16, -2.0


class Pucks:
    """A fleet of independent pucks: state (x, y, vx, vy), thrust in [-1, 1]^2, side wind by position."""

    def __init__(self, n, seed):
        self.n, self.gen = n, torch.Generator().manual_seed(seed)
        self.state, self.t = torch.zeros(n, 4), torch.zeros(n)
        self.reset(torch.ones(n, dtype=torch.bool))

    def reset(self, who):
        fresh = (torch.rand(self.n, 4, generator=self.gen) * 2 - 1) * torch.tensor([2.0, 2.0, 0.5, 0.5])
        self.state = torch.where(who[:, None], fresh, self.state)
        self.t = torch.where(who, torch.zeros(self.n), self.t)

    def step(self, thrust):
        pos, vel = self.state[:, :2], self.state[:, 2:]
        wind = 0.3 * torch.stack([torch.sin(pos[:, 1]), torch.cos(pos[:, 0])], 1)
        vel = 0.97 * vel + 0.15 * (thrust + wind)
        pos = pos + 0.15 * vel
        self.state = torch.cat([pos, vel], 1)
        self.t = self.t + 1
        reward = -pos.norm(dim=1) - 0.1 * vel.norm(dim=1) - 0.02 * thrust.pow(2).sum(1)
        away = pos.abs().amax(1) > 4
        return self.state, reward - 10.0 * away, away, self.t >= LIMIT


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Pilot(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(4, 64, 64, 4)

    def forward(self, s, noise=True):
        mean, log_std = self.net(s).chunk(2, dim=-1)
        std = log_std.clamp(-4, 1).exp()
        raw = mean + std * torch.randn_like(std) * float(noise)
        a = torch.tanh(raw)
        logp = -0.5 * ((raw - mean) / std).pow(2) - std.log() - 0.5 * math.log(2 * math.pi)
        logp = logp - torch.log(1 - a.pow(2) + 1e-6)
        return a, logp.sum(-1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(6, 64, 64, 1)

    def forward(self, s, a):
        return self.net(torch.cat([s, a], dim=-1)).squeeze(-1)


@torch.no_grad()
def average_cost(pilot):
    env, total = Pucks(64, 77), torch.zeros(64)
    alive = torch.ones(64)
    for _ in range(LIMIT):
        a, _ = pilot(env.state, noise=False)
        _, r, away, _ = env.step(a)
        total += alive * r
        alive = alive * (~away)
        total += (1 - alive) * -4.0
    return total.mean().item() / LIMIT


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    env, pilot = Pucks(FLEET, 300 + SEED), Pilot()
    c1, c2 = Critic(), Critic()
    t1, t2 = copy.deepcopy(c1), copy.deepcopy(c2)
    log_alpha = torch.zeros(1, requires_grad=True)
    critics = list(c1.parameters()) + list(c2.parameters())
    if CASE == "joint_params":
        opt_pi = torch.optim.Adam(list(pilot.parameters()) + critics, lr=2e-3)
    else:
        opt_pi = torch.optim.Adam(pilot.parameters(), lr=2e-3)
    opt_q = torch.optim.Adam(critics, lr=2e-3)
    opt_a = torch.optim.Adam([log_alpha], lr=5e-3)
    if CASE == "variant_x":
        opt_q = torch.optim.AdamW(critics, lr=2e-3, weight_decay=1e-4)
        log_alpha.data.fill_(math.log(0.1))
    store = [torch.zeros(20000, k) for k in (4, 2, 1, 4, 1)]
    size = 0
    for t in range(1, 901):
        s = env.state
        with torch.no_grad():
            a = pilot(s)[0] if t > 40 else torch.rand(FLEET, 2) * 2 - 1
        s2, r, away, late = env.step(a)
        rows = slice(size, size + FLEET)
        for buf, v in zip(store, (s, a, r[:, None], s2, away[:, None].float())):
            buf[rows] = v
        size += FLEET
        env.reset(away | late)
        if t <= 40:
            continue
        idx = torch.randint(0, size, (128,))
        bs, ba, br, bs2, bend = (b[idx] for b in store)
        br, bend, alpha = br.squeeze(1), bend.squeeze(1), log_alpha.exp().detach()
        with torch.no_grad():
            na, nlogp = pilot(bs2)
            nq = torch.minimum(t1(bs2, na), t2(bs2, na))
            y = br + GAMMA * (1 - bend) * (nq - alpha * nlogp)
            if CASE == "reward_minus":
                y = GAMMA * (1 - bend) * (nq - alpha * nlogp) - br
        loss_q = F.mse_loss(c1(bs, ba), y) + F.mse_loss(c2(bs, ba), y)
        opt_q.zero_grad()
        loss_q.backward()
        if CASE == "variant_x":
            nn.utils.clip_grad_norm_(critics, 10.0)
        opt_q.step()
        if CASE != "variant_x" or t % 2 == 0:
            na, logp = pilot(bs)
            if CASE == "old_action":
                q = torch.minimum(c1(bs, ba), c2(bs, ba))
            else:
                q = torch.minimum(c1(bs, na), c2(bs, na))
            loss_pi = (alpha * logp - q).mean()
            opt_pi.zero_grad()
            loss_pi.backward()
            opt_pi.step()
            gap = (logp.detach() + TARGET).mean()
            loss_a = (log_alpha * gap).mean() if CASE == "alpha_sign" else -(log_alpha * gap).mean()
            if CASE != "variant_x":
                opt_a.zero_grad()
                loss_a.backward()
                opt_a.step()
        with torch.no_grad():
            for net, tgt in ((c1, t1), (c2, t2)):
                for p, q_ in zip(net.parameters(), tgt.parameters()):
                    if CASE == "tau_side":
                        p.lerp_(q_, 1 - TAU)
                    else:
                        q_.lerp_(p, TAU)
        if t % 150 == 0:
            print(f"t {t} loss_q {loss_q.item():.3f} alpha {alpha.item():.3f} reward {average_cost(pilot):.3f}")
    print("quality", round(average_cost(pilot), 4))


if __name__ == "__main__":
    main()
