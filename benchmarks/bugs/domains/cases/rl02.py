"""REINFORCE with a learned baseline and a recurrent policy on a T-maze (losses are negative and noisy)."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

L = 6


class Policy(nn.Module):
    def __init__(self, hid=32):
        super().__init__()
        self.gru = nn.GRU(4, hid, batch_first=True)
        self.pi = nn.Linear(hid, 3)
        self.base = nn.Linear(hid, 1)
        nn.init.zeros_(self.pi.weight)
        nn.init.zeros_(self.pi.bias)

    def forward(self, obs):
        h, _ = self.gru(obs)
        return Categorical(logits=self.pi(h)), self.base(h.detach()).squeeze(-1)


def rollout(policy, n, g):
    """Cue at t=0, a corridor of L-1 steps (forward = 0), then turn left (1) or right (2)."""
    cue = torch.randint(2, (n,), generator=g)
    obs = torch.zeros(n, L + 1, 4)
    obs[torch.arange(n), 0, cue] = 1
    obs[:, 1:L, 2] = 1
    obs[:, L, 3] = 1
    with torch.no_grad():
        act = policy(obs)[0].sample()
    rew = torch.where(act == 0, 0.0, -0.1)
    rew[:, L] = torch.where(act[:, L] == cue + 1, 1.0, -1.0)
    return obs, act, rew


def main():
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(3)
    policy = Policy()
    opt = torch.optim.Adam(policy.parameters(), lr=6e-3)
    for it in range(200):
        obs, act, rew = rollout(policy, 96, g)
        ret = rew.flip(1).cumsum(1).flip(1)
        dist, base = policy(obs)
        adv = ret - base.detach()
        pg = -(dist.log_prob(act) * adv).mean()
        ent = dist.entropy().mean()
        loss = pg + 0.5 * F.mse_loss(base, ret) - 0.02 * ent
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        opt.step()
        if it % 40 == 0:
            print(it, round(loss.item(), 4), round(rew.sum(1).mean().item(), 3))
    obs, act, rew = rollout(policy, 500, g)
    return rew.sum(1).mean().item()


if __name__ == "__main__":
    print(main())
