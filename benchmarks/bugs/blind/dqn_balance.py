"""DQN on a small environment: keep an unstable point near the centre as long as possible."""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CASES = (
    "healthy",
    "done_not_masked",
    "target_never_updated",
    "best_instead_of_taken",
    "target_broadcasts",
    "variant_double_soft_target",
)
ENVS, LONGEST, CAPACITY = 16, 100, 20000
STEPS, BATCH, ACT_PER_UPDATE, GAMMA = 400, 128, 2, 0.95


class Balance:
    """Sixteen points that drift away from zero; three pushes; out of bounds ends an episode."""

    def __init__(self, count: int = ENVS) -> None:
        self.state = torch.zeros(count, 2)
        self.age = torch.zeros(count, dtype=torch.long)
        self.reset(torch.ones(count, dtype=torch.bool))

    def reset(self, which: Tensor) -> None:
        fresh = 0.6 * torch.rand_like(self.state) - 0.3
        self.state = torch.where(which[:, None], fresh, self.state)
        self.age = self.age.masked_fill(which, 0)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rewards, whether the point fell, and the states before any reset."""
        place, speed = self.state.unbind(1)
        push = 0.06 * (action - 1).float() + 0.02 * torch.randn_like(place)
        speed = 0.98 * speed + 0.08 * place + push
        self.state = torch.stack([place + 0.5 * speed, speed], 1)
        self.age += 1
        fell = self.state[:, 0].abs() > 1
        after = self.state.clone()
        self.reset(fell | (self.age >= LONGEST))
        return torch.ones_like(place), fell, after


def make_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )


@torch.no_grad()
def mean_length(net: nn.Module) -> float:
    """The mean length of 64 greedy episodes, at most LONGEST."""
    env = Balance(64)
    alive, total = torch.ones(64, dtype=torch.bool), torch.zeros(64)
    for _ in range(LONGEST):
        _, fell, _ = env.step(net(env.state).argmax(1))
        total += alive
        alive &= ~fell
    return float(total.mean())


def main(case: str) -> None:  # noqa: C901
    torch.manual_seed(0)
    env, net = Balance(), make_net()
    target_net = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    special = case == "variant_double_soft_target"
    memory: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    for step in range(STEPS):
        epsilon = max(0.1, 1 - step / 150)
        for _ in range(ACT_PER_UPDATE):
            state = env.state
            with torch.no_grad():
                action = net(state).argmax(1)
            explore = torch.rand(ENVS) < epsilon
            action = torch.where(explore, torch.randint(0, 3, (ENVS,)), action)
            reward, fell, after = env.step(action)
            memory.append((state, action, reward, fell.float(), after))
        memory = memory[-CAPACITY // ENVS :]
        picks = torch.randint(0, len(memory), (BATCH // ENVS,)).tolist()
        state, action, reward, done, after = (
            torch.cat(part) for part in zip(*(memory[i] for i in picks), strict=True)
        )
        values = net(state)
        with torch.no_grad():
            if special:
                chosen_next = net(after).argmax(1, keepdim=True)
                following = target_net(after).gather(1, chosen_next)[:, 0]
            else:
                following = target_net(after).max(1).values
            alive = torch.ones_like(done) if case == "done_not_masked" else 1 - done
            target = reward + GAMMA * alive * following
        taken = values.gather(1, action[:, None])
        if case == "best_instead_of_taken":
            taken = values.max(1, keepdim=True).values
        if case != "target_broadcasts":
            target = target[:, None]
        loss = F.smooth_l1_loss(taken, target) if special else F.mse_loss(taken, target)
        optimizer.zero_grad()
        loss.backward()
        if special:
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            if special:
                for slow, fast in zip(target_net.parameters(), net.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            elif step % 10 == 0 and case != "target_never_updated":
                target_net.load_state_dict(net.state_dict())
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"quality (mean length of an episode): {mean_length(net):.1f}")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "healthy"
    assert chosen in CASES, CASES
    main(chosen)
