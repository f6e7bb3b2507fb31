import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class RingWalk:
    """batch of random walkers in 10 states; reward +1 when leaving state 9"""

    def __init__(self, n):
        self.n, self.s = n, torch.randint(0, 10, (n,))

    def step(self, a):
        move = torch.where(torch.rand(self.n) < 0.9, a * 2 - 1, 1 - a * 2)
        s2 = self.s + move
        done = s2 > 9
        r = done.float() - 0.01
        s2 = torch.where(done, torch.randint(0, 5, (self.n,)), s2.clamp(0, 9))
        s, self.s = self.s, s2
        return s, r, s2, done.float()


class ActorCritic(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(10, h), nn.Tanh(), nn.Linear(h, 2))
        self.critic = nn.Sequential(nn.Linear(10, h), nn.Tanh(), nn.Linear(h, 1))


def enc(s):
    return F.one_hot(s, 10).float()


net, env = ActorCritic(), RingWalk(64)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
gamma, avg = 0.9, []
for it in range(1, 601):
    dist = torch.distributions.Categorical(logits=net.actor(enc(env.s)))
    a = dist.sample()
    s, r, s2, done = env.step(a)
    values = net.critic(enc(s)).squeeze(1)
    next_values = net.critic(enc(s2)).squeeze(1)
    target = r + gamma * (1 - done) * next_values
    adv = (target - values).detach()
    actor_loss = -(dist.log_prob(a) * adv).mean() - 0.01 * dist.entropy().mean()
    critic_loss = F.mse_loss(values.detach(), target)
    opt.zero_grad()
    (actor_loss + critic_loss).backward()
    opt.step()
    avg.append(r.mean().item())
    if it % 100 == 0:
        print(f"{it} actor {actor_loss.item():.4f} critic {critic_loss.item():.4f} reward {sum(avg[-50:]) / 50:.4f}")
with torch.no_grad():
    v = net.critic(enc(torch.arange(10))).squeeze(1)
true = torch.zeros(10)
for _ in range(500):
    p = torch.softmax(net.actor(enc(torch.arange(10))), 1)[:, 1].detach()
    up = 0.9 * p + 0.1 * (1 - p)
    nxt = torch.cat([gamma * true[1:], torch.ones(1)])
    true = -0.01 + up * nxt + (1 - up) * gamma * true[(torch.arange(10) - 1).clamp(min=0)]
print("final value error", round((v - true).abs().mean().item(), 4))
