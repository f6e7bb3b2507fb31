import copy
import random
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal

from common import case, seed_all


class TwoExits:
    """Corridor 0..8, start 2.  Leaving at 0 pays 0.3, leaving at 8 pays 1.0."""
    n, n_act = 9, 2

    def __init__(self, rng):
        self.rng = rng
        self.reset()

    def obs(self):
        o = np.zeros(self.n, dtype=np.float32)
        o[self.s] = 1
        return o

    def reset(self):
        self.s, self.t = 2, 0
        return self.obs()

    def step(self, a):
        self.s += 1 if a == 1 else -1
        self.t += 1
        done = self.s in (0, self.n - 1)
        r = 1.0 if self.s == self.n - 1 else (0.3 if self.s == 0 else 0.0)
        return self.obs(), r, done, self.t >= 40


def greedy_return(q, env_cls=TwoExits, gamma=1.0):
    env = env_cls(random.Random(0))
    o, ret = env.reset(), 0.0
    for _ in range(40):
        with torch.no_grad():
            a = q(torch.from_numpy(o)[None]).argmax(1).item()
        o, r, d, tr = env.step(a)
        ret += r
        if d or tr:
            break
    return ret


class Pole:
    """Vectorised pole balancing, reward 1 per step while upright."""

    def __init__(self, n):
        self.n = n

    def reset(self):
        self.s = np.random.uniform(-0.05, 0.05, (self.n, 4)).astype(np.float32)
        self.alive = np.ones(self.n, bool)
        return self.s.copy()

    def step(self, a):
        x, xd, th, thd = self.s.T
        f = np.where(a == 1, 10.0, -10.0)
        tmp = (f + 0.05 * thd ** 2 * np.sin(th)) / 1.1
        tha = (9.8 * np.sin(th) - np.cos(th) * tmp) / (0.5 * (4 / 3 - 0.1 * np.cos(th) ** 2 / 1.1))
        xa = tmp - 0.05 * tha * np.cos(th) / 1.1
        self.s = np.stack([x + 0.02 * xd, xd + 0.02 * xa, th + 0.02 * thd, thd + 0.02 * tha], 1).astype(np.float32)
        r = self.alive.astype(np.float32)
        self.alive &= (np.abs(self.s[:, 2]) < 0.21) & (np.abs(self.s[:, 0]) < 2.4)
        return self.s.copy(), r, self.alive.copy()


def rollout(env, policy, T):
    o = env.reset()
    obs, acts, rews, masks = [], [], [], []
    m = np.ones(env.n, np.float32)
    for _ in range(T):
        with torch.no_grad():
            a = Categorical(logits=policy(torch.from_numpy(o))).sample()
        obs.append(torch.from_numpy(o))
        acts.append(a)
        masks.append(torch.from_numpy(m.copy()))
        o, r, alive = env.step(a.numpy())
        rews.append(torch.from_numpy(r))
        m = alive.astype(np.float32)
        if not alive.any():
            break
    return torch.stack(obs), torch.stack(acts), torch.stack(rews), torch.stack(masks)


def disc_returns(rew, gamma):
    out, R = [], torch.zeros(rew.size(1))
    for r in reversed(rew.unbind(0)):
        R = r + gamma * R
        out.append(R)
    return torch.stack(out[::-1])


# ---- rl_01
@case("rl_01")
def rl_01(log):
    seed_all(1)
    rng = random.Random(1)
    env = TwoExits(rng)
    q = nn.Sequential(nn.Linear(9, 48), nn.ReLU(), nn.Linear(48, 2))
    tgt = copy.deepcopy(q).requires_grad_(False)
    opt = torch.optim.Adam(q.parameters(), lr=3e-3)
    buf = deque(maxlen=3000)
    o, steps, eps = env.reset(), 0, 1.0
    while steps < 350:
        for _ in range(4):
            a = rng.randrange(2) if rng.random() < eps else q(torch.from_numpy(o)[None]).argmax(1).item()
            o2, r, done, trunc = env.step(a)
            buf.append((o, a, r, o2, float(done)))
            o = env.reset() if done or trunc else o2
        eps = max(0.1, eps * 0.992)
        if len(buf) < 64:
            continue
        s, a, r, s2, d = zip(*rng.sample(list(buf), 48))
        s, s2 = torch.from_numpy(np.stack(s)), torch.from_numpy(np.stack(s2))
        a, r, d = torch.tensor(a), torch.tensor(r), torch.tensor(d)
        with torch.no_grad():
            y = r + 0.95 * (1 - d) * tgt(s2).max(1).values
        loss = F.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        opt.step()
        steps += 1
        if steps % 15 == 0:
            tgt.load_state_dict(q.state_dict())
        if steps % 25 == 0:
            log("eval_return", greedy_return(q))
    return greedy_return(q)


# ---- rl_02
@case("rl_02")
def rl_02(log):
    seed_all(2)
    rng = random.Random(2)
    env = TwoExits(rng)
    net = nn.Sequential(nn.Linear(9, 48), nn.ReLU(), nn.Linear(48, 2))
    target_net = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    memory = deque(maxlen=4000)
    state = env.reset()
    for step in range(400):
        eps = max(0.2, 1 - step / 200)
        for _ in range(4):
            action = rng.randrange(2)
            if rng.random() > eps:
                with torch.no_grad():
                    action = net(torch.from_numpy(state)[None]).argmax(1).item()
            nxt, reward, done, trunc = env.step(action)
            if done or trunc:
                start = env.reset()
                memory.append((state, action, reward, start, done))
                state = start
            else:
                memory.append((state, action, reward, nxt, done))
                state = nxt
        batch = [rng.choice(memory) for _ in range(48)]
        s = torch.tensor(np.array([b[0] for b in batch]))
        a = torch.tensor([b[1] for b in batch])
        r = torch.tensor([b[2] for b in batch])
        s2 = torch.tensor(np.array([b[3] for b in batch]))
        done = torch.tensor([b[4] for b in batch])
        with torch.no_grad():
            target = r + 0.97 * target_net(s2).amax(1)
        loss = F.mse_loss(net(s)[torch.arange(48), a], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            target_net.load_state_dict(net.state_dict())
        if step % 25 == 0:
            log("eval_return", greedy_return(net))
    return greedy_return(net)


# ---- rl_03
@case("rl_03")
def rl_03(log):
    seed_all(3)
    rng = random.Random(3)
    env = TwoExits(rng)
    online = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2))
    target = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2))
    target.load_state_dict(online.state_dict())
    opt = torch.optim.Adam(online.parameters(), lr=4e-3)
    mem, o = [], env.reset()
    sync_every = 1000
    for step in range(400):
        for _ in range(4):
            a = rng.randrange(2)
            o2, r, d, tr = env.step(a)
            mem.append((o, a, r, o2, d))
            o = env.reset() if d or tr else o2
        b = [rng.choice(mem) for _ in range(48)]
        s, s2 = torch.tensor(np.array([t[0] for t in b])), torch.tensor(np.array([t[3] for t in b]))
        a, r, d = torch.tensor([t[1] for t in b]), torch.tensor([t[2] for t in b]), torch.tensor([t[4] for t in b]).float()
        with torch.no_grad():
            y = r + 0.95 * (1 - d) * target(s2).max(1)[0]
        loss = F.mse_loss(online(s).gather(1, a.view(-1, 1)).view(-1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % sync_every == 0:
            target.load_state_dict(online.state_dict())
        if step % 25 == 0:
            log("eval_return", greedy_return(online))
    return greedy_return(online)


# ---- rl_04
@case("rl_04")
def rl_04(log):
    seed_all(4)
    env = Pole(16)
    pi = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    opt = torch.optim.Adam(pi.parameters(), lr=0.01)
    last = []
    for it in range(150):
        obs, act, rew, mask = rollout(env, pi, 80)
        G = disc_returns(rew, 0.98)
        sel = mask > 0
        adv = G[sel]
        adv = (adv - adv.mean()) / (adv.std() + 1e-6)
        logp = Categorical(logits=pi(obs[sel])).log_prob(act[sel])
        loss = -(logp * adv).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        last.append(rew.sum(0).mean().item())
        if it % 10 == 0:
            log("episode_length", last[-1])
    return float(np.mean(last[-20:]))


# ---- rl_05
@case("rl_05")
def rl_05(log):
    seed_all(5)
    env = Pole(16)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    lens = []
    for it in range(150):
        obs, act, rew, mask = rollout(env, policy, 80)
        returns = disc_returns(rew, 0.98)
        valid = mask > 0
        advantage = returns[valid] - returns[valid].mean()
        advantage = advantage / (returns[valid].std() + 1e-6)
        log_prob = F.log_softmax(policy(obs[valid]), -1).gather(1, act[valid][:, None]).squeeze(1)
        loss = (log_prob * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lens.append(rew.sum(0).mean().item())
        if it % 10 == 0:
            log("episode_length", lens[-1])
    return float(np.mean(lens[-20:]))


# ---- rl_06
class ActorCritic6(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 48), nn.Tanh())
        self.pi = nn.Linear(48, 2)
        self.v = nn.Linear(48, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


@case("rl_06")
def rl_06(log):
    seed_all(6)
    env = Pole(12)
    ac = ActorCritic6()
    opt = torch.optim.Adam(ac.parameters(), lr=0.01)
    lens = []
    for it in range(170):
        obs, act, rew, mask = rollout(env, lambda o: ac(o)[0], 80)
        G = disc_returns(rew, 0.97)
        keep = mask > 0
        logits, value = ac(obs[keep])
        returns = (G[keep] / 20).unsqueeze(1)
        adv = returns - value.detach()
        logp = Categorical(logits=logits).log_prob(act[keep])
        policy_loss = -(logp * adv).mean()
        value_loss = (returns - value).pow(2).mean()
        loss = policy_loss + 0.5 * value_loss
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ac.parameters(), 1.0)
        opt.step()
        lens.append(rew.sum(0).mean().item())
        if it % 10 == 0:
            log("episode_length", lens[-1])
    return float(np.mean(lens[-20:]))


# ---- rl_07
@case("rl_07")
def rl_07(log):
    seed_all(7)
    env = Pole(12)
    actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    nn.init.zeros_(actor[2].weight)
    nn.init.zeros_(actor[2].bias)
    a_opt = torch.optim.RMSprop(actor.parameters(), lr=6e-3)
    c_opt = torch.optim.Adam(critic.parameters(), lr=1e-2)
    lens = []
    for it in range(160):
        obs, act, rew, mask = rollout(env, actor, 80)
        G, keep = disc_returns(rew, 0.97) / 20, mask > 0
        o, a, ret = obs[keep], act[keep], G[keep]
        v = critic(o).squeeze(-1)
        c_loss = F.mse_loss(v, ret)
        c_opt.zero_grad()
        c_loss.backward()
        c_opt.step()
        dist = Categorical(logits=actor(o))
        adv = (ret - v).detach()
        a_loss = -(dist.log_prob(a) * adv).mean() * 5 - 0.01 * dist.entropy().mean()
        a_opt.zero_grad()
        a_loss.backward()
        a_opt.step()
        lens.append(rew.sum(0).mean().item())
        if it % 10 == 0:
            log("episode_length", lens[-1])
    return float(np.mean(lens[-20:]))


# ---- rl_08
class Bandit:
    """Contextual bandit with 5 arms, rewards around 0.1."""

    def __init__(self, d=6, k=5):
        self.W = torch.randn(d, k)
        self.d = d

    def contexts(self, n):
        return torch.randn(n, self.d)

    def reward(self, x, a):
        best = (x @ self.W).argmax(1)
        return 0.1 * (a == best).float() + 0.01 * torch.randn(len(x))


@case("rl_08")
def rl_08(log):
    seed_all(8)
    env = Bandit()
    policy = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 5))
    opt = torch.optim.Adam(policy.parameters(), lr=5e-3)
    ent_coef = 0.5
    test = env.contexts(500)
    for it in range(350):
        x = env.contexts(128)
        dist = Categorical(logits=policy(x))
        a = dist.sample()
        r = env.reward(x, a)
        loss = -(dist.log_prob(a) * (r - r.mean())).mean() - ent_coef * dist.entropy().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 25 == 0:
            log("reward", r.mean().item())
    with torch.no_grad():
        p = policy(test).softmax(-1)
        best = (test @ env.W).argmax(1)
        return p.gather(1, best[:, None]).mean().item()


# ---- rl_09
@case("rl_09")
def rl_09(log):
    seed_all(9)
    env = Pole(16)
    actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=5e-3)
    lens = []
    for it in range(70):
        obs, act, rew, mask = rollout(env, actor, 80)
        G, keep = disc_returns(rew, 0.97) / 20, mask > 0
        o, a, ret = obs[keep], act[keep], G[keep]
        with torch.no_grad():
            adv = ret - critic(o).squeeze(-1)
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        old_logp = Categorical(logits=actor(o)).log_prob(a)
        for epoch in range(4):
            logp = Categorical(logits=actor(o)).log_prob(a)
            if epoch > 0:
                old_logp = Categorical(logits=actor(o)).log_prob(a)
            ratio = torch.exp(logp - old_logp)
            clipped = torch.clamp(ratio, 0.8, 1.2)
            pg = -torch.min(ratio * adv, clipped * adv).mean()
            vf = F.mse_loss(critic(o).squeeze(-1), ret)
            loss = pg + 0.5 * vf
            opt.zero_grad()
            loss.backward()
            opt.step()
        lens.append(rew.sum(0).mean().item())
        if it % 5 == 0:
            log("episode_length", lens[-1])
    return float(np.mean(lens[-10:]))


# ---- rl_10
class Walk:
    """Corridor 0..8, start 2, 18 steps at most, +1 for reaching 8.  The two moves are swapped on odd tiles."""

    def __init__(self):
        self.n = 9

    def episode(self, policy):
        s, obs, acts, rews = 2, [], [], []
        for _ in range(18):
            o = F.one_hot(torch.tensor(s), self.n).float()
            with torch.no_grad():
                a = Categorical(logits=policy(o)).sample().item()
            obs.append(o)
            acts.append(a)
            move = [-1, 1][a] if s % 2 == 0 else [1, -1][a]
            s = max(0, s + move)
            rews.append(1.0 if s == self.n - 1 else 0.0)
            if s == self.n - 1:
                break
        return obs, acts, rews


@case("rl_10")
def rl_10(log):
    seed_all(10)
    env = Walk()
    policy = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 2))
    opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
    score = []
    for it in range(160):
        O, A, G = [], [], []
        for ep in range(6):
            obs, acts, rews = env.episode(policy)
            returns, R = [], 0.0
            for r in rews:
                R = r + 0.9 * R
                returns.append(R)
            O += obs
            A += acts
            G += returns
            score.append(sum(rews))
        G = torch.tensor(G)
        logp = F.log_softmax(policy(torch.stack(O)), -1)[torch.arange(len(A)), torch.tensor(A)]
        loss = -(logp * (G - 0.0)).sum() / 6
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 10 == 0:
            log("return", float(np.mean(score[-60:])))
    return float(np.mean(score[-120:]))


# ---- rl_11
class Grid:
    """4x4 grid, start in a corner, goal (1,2)."""
    corners = [(0, 0), (0, 3), (3, 0), (3, 3)]

    def __init__(self):
        self.pos = np.zeros(2, dtype=np.float32)

    def reset(self, corner=None):
        self.pos[:] = self.corners[np.random.randint(4) if corner is None else corner]
        self.t = 0
        return self.pos

    def step(self, a):
        dx, dy = [(1, 0), (-1, 0), (0, 1), (0, -1)][a]
        self.pos[0] = np.clip(self.pos[0] + dx, 0, 3)
        self.pos[1] = np.clip(self.pos[1] + dy, 0, 3)
        self.t += 1
        done = bool(self.pos[0] == 1 and self.pos[1] == 2)
        return self.pos, 1.0 if done else -0.02, done, self.t >= 30


@case("rl_11")
def rl_11(log):
    seed_all(11)
    rng = random.Random(11)
    env = Grid()

    def feat(p):
        return F.one_hot((p[:, 0] * 4 + p[:, 1]).long(), 16).float()

    q = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
    qt = copy.deepcopy(q)
    opt = torch.optim.Adam(q.parameters(), lr=3e-3)
    memory = []
    s = env.reset()
    for step in range(380):
        eps = max(0.15, 1 - step / 250)
        for _ in range(6):
            with torch.no_grad():
                a = q(feat(torch.from_numpy(s)[None])).argmax(1).item()
            if rng.random() < eps:
                a = rng.randrange(4)
            s2, r, d, tr = env.step(a)
            memory.append((s, a, r, s2, d))
            s = env.reset() if d or tr else s2
        b = rng.choices(memory, k=48)
        S, S2 = torch.from_numpy(np.stack([t[0] for t in b])), torch.from_numpy(np.stack([t[3] for t in b]))
        A, R, D = torch.tensor([t[1] for t in b]), torch.tensor([t[2] for t in b]), torch.tensor([float(t[4]) for t in b])
        with torch.no_grad():
            y = R + 0.95 * (1 - D) * qt(feat(S2)).max(1).values
        loss = F.smooth_l1_loss(q(feat(S)).gather(1, A[:, None])[:, 0], y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        for p, pt in zip(q.parameters(), qt.parameters()):
            pt.data.mul_(0.95).add_(0.05 * p.data)
        if step % 25 == 0:
            log("td_loss", loss.item())
    total = 0.0
    test = Grid()
    for corner in range(4):
        o = test.reset(corner)
        for _ in range(30):
            with torch.no_grad():
                o, r, d, tr = test.step(q(feat(torch.from_numpy(o)[None])).argmax(1).item())
            total += r / 4
            if d or tr:
                break
    return total


# ---- rl_12
@case("rl_12")
def rl_12(log):
    """Deterministic policy gradient: push a point to the origin."""
    seed_all(12)
    actor = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2), nn.Tanh())
    nn.init.uniform_(actor[2].weight, -3e-3, 3e-3)
    critic = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
    actor_t, critic_t = copy.deepcopy(actor), copy.deepcopy(critic)
    a_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    c_opt = torch.optim.Adam(critic.parameters(), lr=4e-3)

    def env_step(s, a):
        s2 = (s + 0.5 * a).clamp(-2, 2)
        return s2, -(s2 ** 2).sum(-1)

    S, A, R, S2 = [], [], [], []

    def evaluate():
        with torch.no_grad():
            s, tot = torch.tensor([[1.5, -1.5], [-1.0, 0.5], [2.0, 2.0], [-0.3, -1.8]]), 0.0
            for _ in range(8):
                s, r = env_step(s, actor(s))
                tot += r.mean().item()
        return tot

    for step in range(300):
        with torch.no_grad():
            s = torch.rand(16, 2) * 4 - 2
            a = (actor(s) + 0.4 * torch.randn(16, 2)).clamp(-1, 1)
            s2, r = env_step(s, a)
        S.append(s), A.append(a), R.append(r), S2.append(s2)
        if step < 10:
            continue
        i = torch.randint(0, len(S) * 16, (64,))
        s, a, r, s2 = torch.cat(S)[i], torch.cat(A)[i], torch.cat(R)[i], torch.cat(S2)[i]
        with torch.no_grad():
            y = r[:, None] + 0.9 * critic_t(torch.cat([s2, actor_t(s2)], 1))
        c_loss = F.mse_loss(critic(torch.cat([s, a], 1)), y)
        c_opt.zero_grad()
        c_loss.backward()
        c_opt.step()
        a_loss = -critic(torch.cat([s, actor(s)], 1)).mean()
        a_opt.zero_grad()
        a_loss.backward()
        a_opt.step()
        with torch.no_grad():
            for net, tn in ((actor, actor_t), (critic, critic_t)):
                for p, pt in zip(net.parameters(), tn.parameters()):
                    pt.lerp_(p, 0.02)
        if step % 25 == 0:
            log("eval_return", evaluate())
    return evaluate()
