"""Agents that learn from rewards."""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from random import Random

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from benchmarks.bugs.styles.common import Reached, adam, mlp, update


class Corridor:
    """A walk on a line of ten places; the right end is worth 1, and each step has a small cost."""

    size = 10

    def reset(self) -> Tensor:
        """Start in the middle."""
        self.at, self.time = 3, 0
        return self._seen()

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        """Moves left (0) or right (1)."""
        self.at = min(self.size - 1, max(0, self.at + (1 if action else -1)))
        self.time += 1
        won = self.at == self.size - 1
        return self._seen(), 1.0 if won else -0.01, won or self.time >= 40

    def _seen(self) -> Tensor:
        return F.one_hot(torch.tensor(self.at), self.size).float()


class Poles:
    """Many poles that must not fall, balanced by pushes to the left or right."""

    def __init__(self, count: int) -> None:
        self.state = 0.05 * torch.randn(count, 2)
        self.steps = torch.zeros(count)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next states, the rewards, and which poles fell."""
        angle, speed = self.state.unbind(1)
        speed = (
            speed
            + 0.1 * (2.0 * angle.sin() + 1.5 * (2.0 * action - 1))
            + 0.02 * torch.randn(len(angle))
        )
        angle = angle + 0.1 * speed
        self.steps += 1
        fell = (angle.abs() > 0.6) | (self.steps >= 60)
        reward = torch.where(angle.abs() > 0.6, -1.0, 0.1)
        self.steps[fell] = 0
        self.state = torch.where(
            fell[:, None], 0.05 * torch.randn(len(angle), 2), torch.stack([angle, speed], 1)
        )
        return self.state, reward, fell


def dqn() -> Reached:
    """Deep Q-learning: replay, exploration that ends, a target network copied occasionally."""
    random, world = Random(0), Corridor()
    net = mlp(10, 32, 32, 2)
    target = deepcopy(net)
    optimizer = adam(net, 3e-3)
    memory: deque[tuple[Tensor, int, float, Tensor, bool]] = deque(maxlen=2000)
    state, wins, recent = world.reset(), 0.0, deque[float](maxlen=10)
    for time in range(900):
        if random.random() < max(0.05, 1 - time / 400):
            action = random.randrange(2)
        else:
            with torch.no_grad():
                action = int(net(state[None]).argmax())
        following, reward, done = world.step(action)
        memory.append((state, action, reward, following, done))
        wins += reward
        state = following
        if done:
            recent.append(wins)
            state, wins = world.reset(), 0.0
        if time >= 100 and time % 2 == 0:
            batch = random.sample(memory, 32)
            s, s2 = torch.stack([b[0] for b in batch]), torch.stack([b[3] for b in batch])
            a = torch.tensor([b[1] for b in batch])
            r = torch.tensor([b[2] for b in batch])
            over = torch.tensor([float(b[4]) for b in batch])
            q = net(s).gather(1, a[:, None]).squeeze(1)
            with torch.no_grad():
                wanted = r + 0.95 * (1 - over) * target(s2).max(1).values
            update(optimizer, F.smooth_l1_loss(q, wanted), clip=10.0)
            if time % 50 == 0:
                target.load_state_dict(net.state_dict())
    return Reached(sum(recent) / len(recent), 0.8)


def double_dqn_dueling() -> Reached:
    """A dueling network with a slowly updated target, on poles."""

    class Dueling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.value, self.advantage = (
                mlp(2, 48, 48),
                nn.Linear(48, 1),
                nn.Linear(48, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.body(x))
            a: Tensor = self.advantage(h)
            value: Tensor = self.value(h)
            return value + a - a.mean(1, keepdim=True)

    net, world = Dueling(), Poles(16)
    slow = deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    memory: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    rewards = []
    for time in range(400):
        state = world.state
        with torch.no_grad():
            action = net(state).argmax(1)
        action = torch.where(
            torch.rand(16) < max(0.05, 1 - time / 150), torch.randint(2, (16,)), action
        )
        following, reward, fell = world.step(action)
        rewards.append(float(reward.mean()))
        memory.append((state, action, reward, following, fell.float()))
        if time < 20:
            continue
        rows = [memory[i] for i in torch.randint(len(memory), (8,)).tolist()]
        s, a, r, s2, over = (torch.cat(part) for part in zip(*rows, strict=True))
        with torch.no_grad():
            best = net(s2).argmax(1, keepdim=True)
            wanted = r + 0.97 * (1 - over) * slow(s2).gather(1, best)[:, 0]
        update(optimizer, F.mse_loss(net(s).gather(1, a[:, None])[:, 0], wanted))
        with torch.no_grad():
            for p, q in zip(slow.parameters(), net.parameters(), strict=True):
                p.lerp_(q, 0.02)
    return Reached(sum(rewards[-50:]) / 50, 0.06)


def reinforce() -> Reached:
    """Policy gradient with normalized returns, one update per episode."""
    world, policy = Corridor(), mlp(10, 32, 2, act=nn.Tanh)
    optimizer = adam(policy, 1e-2)
    lengths = []
    for _ in range(200):
        state, done, logs, rewards = world.reset(), False, [], []
        while not done:
            chance = Categorical(logits=policy(state))
            action = chance.sample()
            state, reward, done = world.step(int(action))
            logs.append(chance.log_prob(action))
            rewards.append(reward)
        total, returns = 0.0, list[float]()
        for reward in reversed(rewards):
            total = reward + 0.95 * total
            returns.insert(0, total)
        values = torch.tensor(returns)
        values = (values - values.mean()) / (values.std() + 1e-6)
        update(optimizer, -(torch.stack(logs) * values).sum())
        lengths.append(len(rewards))
    return Reached(-sum(lengths[-20:]) / 20, -12)


class _Both(nn.Module):
    """A policy and a value with a shared body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = (
            mlp(2, 48, 48, act=nn.Tanh),
            nn.Linear(48, 2),
            nn.Linear(48, 1),
        )
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, 2**0.5)
                nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(self.policy.weight, 0.01)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.policy(h), self.value(h).squeeze(-1)


def ppo() -> Reached:
    """Clipped updates with generalized advantages, an entropy bonus and minibatches."""
    net, world = _Both(), Poles(16)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, eps=1e-5)
    quality = 0.0
    for round_ in range(12):
        seen = []
        with torch.no_grad():
            for _ in range(32):
                state = world.state
                logits, value = net(state)
                action = Categorical(logits=logits).sample()
                _, reward, fell = world.step(action)
                log = Categorical(logits=logits).log_prob(action)
                seen.append((state, action, log, value, reward, fell.float()))
            after = net(world.state)[1]
        s, a, old, v, r, over = (torch.stack(part) for part in zip(*seen, strict=True))
        quality = float(r.mean())
        advantage, running = torch.zeros_like(r), torch.zeros(16)
        for t in reversed(range(32)):
            following = v[t + 1] if t < 31 else after
            delta = r[t] + 0.97 * following * (1 - over[t]) - v[t]
            running = delta + 0.97 * 0.95 * (1 - over[t]) * running
            advantage[t] = running
        returns = (advantage + v).flatten()
        flat = advantage.flatten()
        s, a, old = s.flatten(0, 1), a.flatten(), old.flatten()
        for _ in range(4):
            for rows in torch.randperm(512).split(128):
                logits, value = net(s[rows])
                chance = Categorical(logits=logits)
                part = flat[rows]
                part = (part - part.mean()) / (part.std() + 1e-8)
                ratio = (chance.log_prob(a[rows]) - old[rows]).exp()
                surrogate = torch.min(ratio * part, ratio.clamp(0.8, 1.2) * part).mean()
                critic = F.mse_loss(value, returns[rows])
                update(optimizer, -surrogate + 0.5 * critic - 0.01 * chance.entropy().mean(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - round_ / 12)
    return Reached(quality, 0.06)


def actor_critic() -> Reached:
    """Advantages from rollouts of five steps; policy and value share a body."""
    net, world = _Both(), Poles(16)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3, alpha=0.99)
    quality = []
    for _ in range(250):
        logs, values, rewards, ends, entropy = [], [], [], [], []
        for _ in range(5):
            logits, value = net(world.state)
            chance = Categorical(logits=logits)
            action = chance.sample()
            _, reward, fell = world.step(action)
            logs.append(chance.log_prob(action))
            values.append(value)
            rewards.append(reward)
            ends.append(fell.float())
            entropy.append(chance.entropy().mean())
        with torch.no_grad():
            total = net(world.state)[1]
        losses = []
        for log, value, reward, end in zip(
            *(reversed(x) for x in (logs, values, rewards, ends)), strict=True
        ):
            total = reward + 0.97 * total * (1 - end)
            advantage = total - value
            losses.append(-(log * advantage.detach()).mean() + 0.5 * advantage.pow(2).mean())
        update(optimizer, torch.stack(losses).sum() - 0.01 * torch.stack(entropy).sum(), clip=0.5)
        quality.append(float(torch.stack(rewards).mean()))
    return Reached(sum(quality[-30:]) / 30, 0.06)


def actor_critic_episodes() -> Reached:
    """PyTorch's own example: one update per episode, with values for growing returns."""
    net = _Both()
    optimizer = adam(net, 1e-2)
    lengths = []
    for _ in range(150):
        world, logs, values, rewards = Poles(1), [], [], []
        while True:
            logits, value = net(world.state)
            chance = Categorical(logits=logits)
            action = chance.sample()
            _, _, fell = world.step(action)
            logs.append(chance.log_prob(action))
            values.append(value)
            rewards.append(1.0)
            if bool(fell):
                break
        total, returns = 0.0, list[float]()
        for gain in reversed(rewards):
            total = gain + 0.99 * total
            returns.insert(0, total)
        wanted = torch.tensor(returns)
        wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-8)
        policy = [-log * (r - v.item()) for log, v, r in zip(logs, values, wanted, strict=True)]
        value = [F.smooth_l1_loss(v, r[None]) for v, r in zip(values, wanted, strict=True)]
        update(optimizer, torch.stack(policy).sum() + torch.stack(value).sum())
        lengths.append(len(rewards))
    return Reached(sum(lengths[-20:]) / 20, 30)


class _Hill:
    """Points that must be pushed to the origin with as little force as possible."""

    def __init__(self, count: int) -> None:
        self.at = 2 * torch.rand(count, 2) - 1

    def step(self, push: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next places and the rewards."""
        self.at = self.at + 0.2 * push + 0.02 * torch.randn_like(self.at)
        reward = -self.at.pow(2).sum(1) - 0.05 * push.pow(2).sum(1)
        again = torch.rand(len(self.at)) < 0.05
        self.at = torch.where(again[:, None], 2 * torch.rand_like(self.at) - 1, self.at)
        return self.at, reward


def td3() -> Reached:
    """Deterministic policy, two critics, delayed policy updates, slowly updated targets."""
    actor = nn.Sequential(mlp(2, 48, 48, 2), nn.Tanh())
    critics = nn.ModuleList([mlp(4, 48, 48, 1), mlp(4, 48, 48, 1)])
    slow_actor, slow_critics = deepcopy(actor), deepcopy(critics)
    of_actor, of_critics = adam(actor, 3e-3), adam(critics, 3e-3)
    world, memory, rewards = _Hill(16), [], []
    for time in range(300):
        state = world.at
        with torch.no_grad():
            push = (actor(state) + 0.2 * torch.randn(16, 2)).clamp(-1, 1)
        following, reward = world.step(push)
        memory.append((state, push, reward, following))
        rewards.append(float(reward.mean()))
        rows = [memory[i] for i in torch.randint(len(memory), (8,)).tolist()]
        s, a, r, s2 = (torch.cat(part) for part in zip(*rows, strict=True))
        with torch.no_grad():
            a2 = (slow_actor(s2) + (0.2 * torch.randn_like(a)).clamp(-0.5, 0.5)).clamp(-1, 1)
            q2 = torch.min(*(critic(torch.cat([s2, a2], 1)) for critic in slow_critics))
            wanted = r[:, None] + 0.95 * q2
        both = torch.cat([s, a], 1)
        update(
            of_critics, torch.stack([F.mse_loss(critic(both), wanted) for critic in critics]).sum()
        )
        if time % 2 == 0:
            update(of_actor, -critics[0](torch.cat([s, actor(s)], 1)).mean())
            with torch.no_grad():
                for slow, fast in ((slow_actor, actor), (slow_critics, critics)):
                    for p, q in zip(slow.parameters(), fast.parameters(), strict=True):
                        p.mul_(0.97).add_(0.03 * q)
    return Reached(sum(rewards[-40:]) / 40, -0.2)


def sac() -> Reached:
    """A stochastic policy with a learned temperature."""
    policy = mlp(2, 48, 48, 4)
    first, second = mlp(4, 48, 48, 1), mlp(4, 48, 48, 1)
    slow = deepcopy(nn.ModuleList([first, second])).requires_grad_(False)
    log_alpha = torch.zeros(1, requires_grad=True)
    of_policy, of_alpha = adam(policy, 3e-3), torch.optim.Adam([log_alpha], lr=3e-3)
    of_critics = adam([*first.parameters(), *second.parameters()], 3e-3)

    def act(state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = policy(state).chunk(2, 1)
        normal = Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        action = raw.tanh()
        log = normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log.sum(1, keepdim=True)

    world, memory, rewards = _Hill(16), [], []
    for _ in range(250):
        state = world.at
        with torch.no_grad():
            push, _ = act(state)
        following, reward = world.step(push)
        memory.append((state, push, reward, following))
        rewards.append(float(reward.mean()))
        rows = [memory[i] for i in torch.randint(len(memory), (8,)).tolist()]
        s, a, r, s2 = (torch.cat(part) for part in zip(*rows, strict=True))
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            a2, log2 = act(s2)
            q2 = torch.min(*(critic(torch.cat([s2, a2], 1)) for critic in slow))
            wanted = r[:, None] + 0.95 * (q2 - alpha * log2)
        both = torch.cat([s, a], 1)
        update(of_critics, F.mse_loss(first(both), wanted) + F.mse_loss(second(both), wanted))
        action, log = act(s)
        both = torch.cat([s, action], 1)
        update(of_policy, (alpha * log - torch.min(first(both), second(both))).mean())
        update(of_alpha, -(log_alpha * (log.detach() - 2.0)).mean())
        with torch.no_grad():
            for p, q in zip(
                slow.parameters(), [*first.parameters(), *second.parameters()], strict=True
            ):
                p.lerp_(q, 0.02)
    return Reached(sum(rewards[-40:]) / 40, -0.3)


def contextual_bandit() -> Reached:
    """Rewards only for the chosen arm; an ensemble chooses by disagreement."""
    heads = nn.ModuleList(mlp(6, 32, 5) for _ in range(3))
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.05, momentum=0.9)
    truth = torch.randn(6, 5)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    hits = []
    for _ in range(250):
        x = torch.randn(16, 6)
        with torch.no_grad():
            guess = torch.stack([head(x) for head in heads])
            arm = (guess.mean(0) + guess.std(0)).argmax(1)
        reward = ((x @ truth).gather(1, arm[:, None]) > 0).float()[:, 0]
        hits.append(float(reward.mean()))
        seen.append((x, arm, reward))
        rows = [seen[i] for i in torch.randint(len(seen), (4,)).tolist()]
        x, arm, reward = (torch.cat(part) for part in zip(*rows, strict=True))
        losses = [
            F.binary_cross_entropy_with_logits(head(x).gather(1, arm[:, None])[:, 0], reward)
            for head in heads
        ]
        update(optimizer, torch.stack(losses).mean())
    return Reached(sum(hits[-40:]) / 40, 0.8)
