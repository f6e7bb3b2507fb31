"""Advantage actor-critic on a vectorised cart-pole."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class CartPole:
    def __init__(self, n, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.s = self._fresh(n)

    def _fresh(self, k):
        return (torch.rand(k, 4, generator=self.g) - 0.5) * 0.1

    def step(self, a):
        x, xd, th, thd = self.s.unbind(-1)
        f = a.float() * 20 - 10
        c, s = th.cos(), th.sin()
        tmp = (f + 0.05 * thd ** 2 * s) / 1.1
        tha = (9.8 * s - c * tmp) / (0.5 * (4 / 3 - 0.1 * c ** 2 / 1.1))
        xa = tmp - 0.05 * tha * c / 1.1
        self.s = torch.stack([x + 0.02 * xd, xd + 0.02 * xa, th + 0.02 * thd, thd + 0.02 * tha], -1)
        done = (self.s[:, 0].abs() > 2.4) | (self.s[:, 2].abs() > 0.2095)
        if done.any():
            self.s[done] = self._fresh(int(done.sum()))
        return self.s.clone(), torch.ones(len(a)), done.float()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, s):
        return self.actor(s), self.critic(s).squeeze(-1)


def discounted(rewards, dones, bootstrap, gamma):
    out, run = [], bootstrap
    for r, d in zip(reversed(rewards), reversed(dones)):
        run = r + gamma * run
        out.append(run)
    return torch.stack(out[::-1])


def episode_length(env_n, net, seed, limit=150):
    env = CartPole(env_n, seed)
    alive = torch.ones(env_n)
    length = torch.zeros(env_n)
    s = env.s.clone()
    with torch.no_grad():
        for _ in range(limit):
            s, _, d = env.step(net(s)[0].argmax(-1))
            length += alive
            alive = alive * (1 - d)
    return length.mean().item()


def main():
    torch.manual_seed(1)
    gamma, horizon, n = 0.97, 16, 24
    env = CartPole(n, 0)
    net = ActorCritic()
    opt = torch.optim.RMSprop(net.parameters(), lr=4e-3, alpha=0.99, eps=1e-5)
    s = env.s.clone()
    for update in range(180):
        states, actions, rewards, dones = [], [], [], []
        for _ in range(horizon):
            with torch.no_grad():
                a = torch.distributions.Categorical(logits=net(s)[0]).sample()
            s2, r, d = env.step(a)
            states.append(s), actions.append(a), rewards.append(0.1 * r), dones.append(d)
            s = s2
        with torch.no_grad():
            boot = net(s)[1]
        ret = discounted(rewards, dones, boot, gamma)
        logits, v = net(torch.stack(states))
        dist = torch.distributions.Categorical(logits=logits)
        adv = (ret - v).detach()
        policy_loss = -(dist.log_prob(torch.stack(actions)) * adv).mean()
        loss = policy_loss + 0.5 * F.mse_loss(v, ret) - 0.005 * dist.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        if update % 45 == 0:
            print(f"{update} loss {loss.item():.3f} length {horizon * n / max(1, torch.stack(dones).sum().item()):.1f}")
    return episode_length(50, net, 123)


if __name__ == "__main__":
    print(main())
