"""What the terms of a loss, and the calls that lead to it, reveal: each bug beside its remedy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules.test_causes_of_strangers import Loss, fit, found, mlp
from tests.support.shortened import shortened

N = 32


def names(root: Path, loss: Loss, model: nn.Module, *, steps: int = 5) -> set[str]:
    return {*found(root, lambda: fit(model, loss, steps=steps))}


# -- policies --------------------------------------------------------------------------------------


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = mlp(4, 3), mlp(4, 1)
        self.log_std = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.value(x)[:, 0]


def gathered(logits: Tensor, actions: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]


def distributed(logits: Tensor, actions: Tensor) -> Tensor:
    found: Tensor = torch.distributions.Categorical(logits=logits).log_prob(actions)
    return found


def by_cross_entropy(logits: Tensor, actions: Tensor) -> Tensor:
    return -F.cross_entropy(logits, actions, reduction="none")


def of_probabilities(logits: Tensor, actions: Tensor) -> Tensor:
    return torch.distributions.Categorical(probs=logits.softmax(-1)).log_prob(actions)


def gaussian(logits: Tensor, actions: Tensor) -> Tensor:
    normal = torch.distributions.Normal(logits, torch.ones(3))
    return normal.log_prob(actions[:, None] - 1.0).sum(-1)


LogProb = Callable[[Tensor, Tensor], Tensor]
LOG_PROBS = [gathered, distributed, by_cross_entropy, of_probabilities, gaussian]


def advantage_actor_critic(
    model: nn.Module, *, log_prob: LogProb = gathered, sign: float = -1, detach: bool = True
) -> Tensor:
    x, actions = torch.randn(N, 4), torch.randint(0, 3, (N,))
    logits, values = model(x)
    returns = torch.randn(N) + x[:, 0]
    advantage = returns - values
    advantage = advantage.detach() if detach else advantage
    loss: Tensor = sign * (log_prob(logits, actions) * advantage).mean()
    return loss + 0.5 * F.mse_loss(values, returns)


def clipped(model: nn.Module, *, negated: bool, sign: float, attached: bool = False) -> Tensor:
    x, actions = torch.randn(N, 4), torch.randint(0, 3, (N,))
    logits, values = model(x)
    returns = torch.randn(N) + x[:, 0]
    advantage = (returns - values).detach()
    advantage = (advantage - advantage.mean()) / advantage.std()
    now = gathered(logits, actions)
    ratio = (now - (now if attached else now.detach() + 0.01)).exp()
    weight = -advantage if negated else advantage
    both = weight * ratio, weight * ratio.clamp(0.8, 1.2)
    policy = (torch.max(*both) if negated else torch.min(*both)).mean()
    return sign * policy + ((values - returns) ** 2).mean()


@pytest.mark.parametrize("log_prob", shortened(LOG_PROBS, tried=1))
@pytest.mark.parametrize(("sign", "wrong"), [(-1, False), (1, True)])
def test_a_policy_that_unlearns_good_actions(
    log_prob: LogProb, sign: float, wrong: bool, tmp_path: Path
) -> None:
    loss = partial(advantage_actor_critic, log_prob=log_prob, sign=sign)
    findings = found(tmp_path, lambda: fit(ActorCritic(), loss, steps=5))
    assert ("policy_sign" in findings) is wrong
    if wrong:
        assert findings["policy_sign"].severity == "error"


@pytest.mark.parametrize(
    ("negated", "sign", "wrong"),
    [(False, -1, False), (False, 1, True), (True, 1, False), (True, -1, True)],
)
@pytest.mark.slow
def test_the_sign_of_a_clipped_objective(
    negated: bool, sign: float, wrong: bool, tmp_path: Path
) -> None:
    found_ = names(tmp_path, partial(clipped, negated=negated, sign=sign), ActorCritic())
    assert ("policy_sign" in found_) is wrong


def reinforce(model: nn.Module, *, sign: float, loop: bool) -> Tensor:
    logits = model(torch.randn(N, 4))[0]
    chosen, returns = gathered(logits, torch.randint(0, 3, (N,))), torch.rand(N) + 0.1
    if loop:
        return sum((sign * p * r for p, r in zip(chosen, returns, strict=True)), torch.zeros(()))
    return sign * (chosen * returns).sum()


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize(("sign", "wrong"), [(-1, False), (1, True)])
@pytest.mark.slow
def test_without_values_a_wrong_sign_is_a_hint(
    loop: bool, sign: float, wrong: bool, tmp_path: Path
) -> None:
    loss = partial(reinforce, sign=sign, loop=loop)
    finding = found(tmp_path, lambda: fit(ActorCritic(), loss, steps=5)).get("policy_sign")
    assert (finding is not None and finding.severity == "hint") is wrong


@pytest.mark.slow
def test_weighted_classes_and_regressions_are_no_policies(tmp_path: Path) -> None:
    def weighted(model: nn.Module) -> Tensor:
        x, y = torch.randn(N, 4), torch.randint(0, 3, (N,))
        logits, values = model(x)
        loss = (F.cross_entropy(logits, y, reduction="none") * torch.rand(N)).mean()
        return loss + (torch.rand(N) * (values - x[:, 0]) ** 2).mean()

    assert "policy_sign" not in names(tmp_path, weighted, ActorCritic())


@pytest.mark.parametrize("detach", [True, False])
def test_an_advantage_that_trains_the_values(detach: bool, tmp_path: Path) -> None:
    loss = partial(advantage_actor_critic, detach=detach)
    assert ("attached_advantage" in names(tmp_path, loss, ActorCritic())) is not detach


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.slow
def test_a_ratio_of_a_policy_with_itself(attached: bool, tmp_path: Path) -> None:
    loss = partial(clipped, negated=False, sign=-1, attached=attached)
    assert ("attached_ratio" in names(tmp_path, loss, ActorCritic())) is attached


@pytest.mark.parametrize(
    ("weight", "wrong"),
    [
        (-0.01, False),
        pytest.param(-1.5, True, marks=pytest.mark.slow),
        (0.01, True),
        pytest.param(0, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("library", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_entropy_that_opposes_or_outweighs_the_policy(
    weight: float, wrong: bool, library: bool, tmp_path: Path
) -> None:
    def loss(model: nn.Module) -> Tensor:
        logits = model(torch.randn(N, 4))[0]
        policy = -(gathered(logits, torch.randint(0, 3, (N,))) * torch.randn(N)).mean()
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        if not library:
            entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        return policy + weight * entropy.mean() if weight else policy

    assert ("entropy_weight" in names(tmp_path, loss, ActorCritic())) is wrong


# -- bootstrapped targets --------------------------------------------------------------------------


def masked_by_product(values: Tensor, done: Tensor) -> Tensor:
    return 0.9 * values * (1 - done)


def masked_first(values: Tensor, done: Tensor) -> Tensor:
    return (1 - done) * 0.9 * values


def masked_in_place(values: Tensor, done: Tensor) -> Tensor:
    values = values.clone()
    values[done.bool()] = 0.0
    return 0.9 * values


def masked_by_where(values: Tensor, done: Tensor) -> Tensor:
    return 0.9 * torch.where(done.bool(), torch.zeros_like(values), values)


def not_masked(values: Tensor, _done: Tensor) -> Tensor:
    return 0.9 * values


Discount = Callable[[Tensor, Tensor], Tensor]


def q_learning(model: nn.Module, *, target: nn.Module, discount: Discount, same: bool) -> Tensor:
    x, after, reward = torch.randn(N, 4), torch.randn(N, 4), torch.randn(N)
    after = x.clone() if same else after
    done = (torch.rand(N) < 0.2).float()
    with torch.no_grad():
        goal = reward + discount(target(after).max(1).values, done)
    taken = model(x).gather(1, torch.randint(0, 3, (N, 1)))[:, 0]
    return F.smooth_l1_loss(taken, goal)


def q_findings(root: Path, discount: Discount, *, same: bool = False) -> set[str]:
    model = mlp(4, 3)
    target = deepcopy(model).requires_grad_(False)
    loss = partial(q_learning, target=target, discount=discount, same=same)
    return names(root, loss, model)


@pytest.mark.parametrize(
    "discount",
    [masked_by_product, masked_first, masked_in_place, masked_by_where, not_masked],
)
@pytest.mark.slow
def test_targets_beyond_the_end_of_an_episode(discount: Discount, tmp_path: Path) -> None:
    assert ("unmasked_target" in q_findings(tmp_path, discount)) is (discount is not_masked)


@pytest.mark.parametrize("same", [True, False])
def test_next_states_that_are_the_states(same: bool, tmp_path: Path) -> None:
    assert ("same_states" in q_findings(tmp_path, masked_first, same=same)) is same


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.slow
def test_the_order_in_which_returns_are_added_up(ascending: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x, rewards = torch.randn(6, N, 4), torch.randn(6, N)
        logits, values = model(x)
        returns, running = torch.zeros(6, N), torch.zeros(N)
        for t in range(6) if ascending else reversed(range(6)):
            running = rewards[t] + 0.9 * running
            returns[t] = running
        advantage = (returns - values[..., 0]).detach()
        return -(logits.log_softmax(-1)[..., 0] * advantage).mean() + F.mse_loss(
            values[..., 0], returns
        )

    class Both(ActorCritic):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.policy(x), self.value(x)

    assert ("ascending_returns" in names(tmp_path, loss, Both())) is ascending


REWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "data": lambda x, _a: torch.randn(len(x), 1),
    "computed from actions": lambda x, a: x[:, :1] - (x[:, 1:2] - a).square(),
    "in place": lambda x, a: a.clone().mul_(x[:, :1]),
}


@pytest.mark.parametrize("reward", shortened(REWARDS, tried=1))
@pytest.mark.parametrize(("sign", "wrong"), [(-1, False), (1, True)])
def test_an_actor_that_minimizes_its_value(
    sign: float, wrong: bool, reward: str, tmp_path: Path
) -> None:
    actor, critic, target = mlp(4, 1), mlp(5, 1), mlp(5, 1)
    optimizers = [torch.optim.Adam(net.parameters(), 0.01) for net in (critic, actor)]

    def train() -> None:
        for _ in range(5):
            x, after = torch.randn(N, 4), torch.randn(N, 4)
            done = (torch.rand(N, 1) < 0.2).float()
            with torch.no_grad():
                action = actor(x) + 0.1 * torch.randn(N, 1)
                following = target(torch.cat([after, actor(after)], 1))
                goal = REWARDS[reward](x, action) + 0.9 * (1 - done) * following
            value = critic(torch.cat([x, action], 1))
            optimizers[0].zero_grad()
            F.mse_loss(value, goal).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (sign * critic(torch.cat([x, actor(x)], 1)).mean()).backward()
            optimizers[1].step()

    assert ("actor_sign" in found(tmp_path, train)) is wrong


@pytest.mark.parametrize("low", [0.0, -1.0])
@pytest.mark.slow
def test_an_actor_may_minimize_what_may_be_costs(low: float, tmp_path: Path) -> None:
    actor, critic = mlp(4, 1), mlp(5, 1)
    optimizer = torch.optim.Adam([*critic.parameters(), *actor.parameters()], 0.01)

    def train() -> None:
        for _ in range(5):
            x, costs = torch.randn(N, 4), torch.rand(N, 1) + low
            with torch.no_grad():
                goal = costs + 0.9 * critic(torch.cat([torch.randn(N, 4), actor(x)], 1))
            optimizer.zero_grad()
            F.mse_loss(critic(torch.cat([x, torch.rand(N, 1)], 1)), goal).backward()
            critic(torch.cat([x, actor(x)], 1)).mean().backward()
            optimizer.step()

    assert found(tmp_path, train)["actor_sign"].severity == ("hint" if low == 0 else "warning")


@pytest.mark.slow
def test_a_mean_of_two_networks_is_no_bootstrapped_target(tmp_path: Path) -> None:
    one, two = mlp(4, 1), mlp(4, 1)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        with torch.no_grad():
            goal = one(x) + 0.5 * two(x)
        return F.mse_loss(model(x), goal)

    assert "unmasked_target" not in names(tmp_path, loss, mlp(4, 1))


# -- posteriors ------------------------------------------------------------------------------------


class VAE(nn.Module):
    def __init__(self, scale: float = 0.5, *, uniform: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(40, 8), mlp(4, 40)
        self.scale, self.uniform = scale, uniform

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        noise = torch.rand_like(mean) if self.uniform else torch.randn_like(mean)
        size = log_variance.exp() if self.scale == 1 else (self.scale * log_variance).exp()
        return self.decoder(mean + size * noise), mean, log_variance


def bound(model: nn.Module, *, summed: bool = True, weight: float = 1.0) -> Tensor:
    x = torch.randn(N, 40)
    out, mean, log_variance = model(x)
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
    if summed:
        return F.mse_loss(out, x, reduction="sum") / N + weight * divergence / N
    return F.mse_loss(out, x) + weight * divergence


@pytest.mark.parametrize(("scale", "wrong"), [(0.5, False), (1, True)])
def test_a_sample_scaled_by_its_variance(scale: float, wrong: bool, tmp_path: Path) -> None:
    assert ("variance_as_scale" in names(tmp_path, bound, VAE(scale))) is wrong


@pytest.mark.parametrize(
    ("summed", "weight", "wrong"),
    [(True, 1, False), (True, 4, False), (False, 1, True), (False, 1e-3, False)],
)
def test_a_divergence_that_outweighs_the_reconstruction(
    summed: bool, weight: float, wrong: bool, tmp_path: Path
) -> None:
    loss = partial(bound, summed=summed, weight=weight)
    findings = found(tmp_path, lambda: fit(VAE(), loss, steps=5))
    assert ("divergence_weight" in findings) is wrong
    if wrong:  # a mean over 32 x 40 elements beside a sum
        assert findings["divergence_weight"].evidence["ratio"] == pytest.approx(32 * 40)


@pytest.mark.parametrize("uniform", [True, False])
def test_noise_from_the_wrong_distribution(uniform: bool, tmp_path: Path) -> None:
    assert ("uniform_noise" in names(tmp_path, bound, VAE(uniform=uniform))) is uniform


# -- results and gradients -------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention, with the mistakes that `mistake` names."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(16, 16) for _ in range(3))
        self.head, self.mistake = nn.Linear(16, 2), mistake

    def forward(self, x: Tensor) -> Tensor:
        scores = self.queries(x) @ self.keys(x).transpose(-2, -1)
        if self.mistake != "unscaled":
            scores = scores / 4
        later = torch.ones(6, 6).triu(1).bool()
        if self.mistake == "unused":
            scores.masked_fill(later, -1e9)
        else:
            scores = scores.masked_fill(later, -1e9)
        y = scores.softmax(-1) @ self.values(x)
        y = y + (y if self.mistake == "added to itself" else x)
        if self.mistake == "clamped":
            y = y.clamp(10, 20)
        if self.mistake == "rounded":
            y = y.round()
        if self.mistake == "straight through":
            y = y + (y.round() - y).detach()
        out: Tensor = self.head(y)
        return out


RESULTS = {
    "unscaled": "unscaled_attention",
    "unused": "unused_result",
    "added to itself": "added_to_itself",
    "clamped": "clamped_values",
    "rounded": "zero_derivative",
}


@pytest.mark.parametrize("mistake", ["", "straight through", *RESULTS])
def test_calls_without_the_intended_effect(mistake: str, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 6, 16)
        return F.mse_loss(model(x), x.cumsum(1)[..., :2])

    findings = names(tmp_path, loss, Attention(mistake))
    assert (
        findings & {*RESULTS.values()} == {RESULTS[mistake]} & {*RESULTS.values()}
        if (mistake in RESULTS)
        else not findings & {*RESULTS.values()}
    )


# -- predictions, losses and optimizers ------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "scale", "wrong"),
    [(nn.Sigmoid(), 1.0, True), (nn.Tanh(), 3.0, True), (nn.Tanh(), 0.1, False)],
)
@pytest.mark.slow
def test_predictions_that_cannot_reach_their_targets(
    last: nn.Module, scale: float, wrong: bool, tmp_path: Path
) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        y = scale * x.sum(1, keepdim=True)
        return F.mse_loss(model(x), y)

    assert ("bounded_answer" in names(tmp_path, loss, nn.Sequential(mlp(4, 1), last))) is wrong


@pytest.mark.parametrize("classes", [True, False])
def test_regressions_of_class_numbers(classes: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        y = torch.randint(0, 4, (N, 1)).float() if classes else x[:, :1]
        return F.mse_loss(model(x), y)

    assert ("classes_as_numbers" in names(tmp_path, loss, mlp(4, 1), steps=10)) is classes


def cross_entropy(model: nn.Module, options: dict[str, Any] | None = None) -> Tensor:
    x = torch.randn(512, 4)
    return F.cross_entropy(model(x), (x[:, 0] > 0).long(), **(options or {}))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"label_smoothing": 0.6}, "heavy_smoothing"),
        pytest.param({"label_smoothing": 0.1}, "", marks=pytest.mark.slow),
        ({"reduction": "sum"}, "summed_loss"),
    ],
)
def test_arguments_of_losses(options: dict[str, object], rule: str, tmp_path: Path) -> None:
    found_ = names(tmp_path, partial(cross_entropy, options=options), mlp(4, 2))
    assert found_ & {"heavy_smoothing", "summed_loss"} == ({rule} if rule else set())


@pytest.mark.parametrize(
    ("betas", "wrong"),
    [
        ((0.999, 0.9), True),
        pytest.param((0.9, 0.999), False, marks=pytest.mark.slow),
        ((0.0, 0.9), False),
    ],
)
def test_swapped_betas(betas: tuple[float, float], wrong: bool, tmp_path: Path) -> None:
    model = mlp(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, betas=betas)
    findings = found(tmp_path, lambda: fit(model, cross_entropy, steps=60, optimizer=optimizer))
    assert ("unusual_momentum" in findings) is wrong


# -- data ------------------------------------------------------------------------------------------


class Speaker(nn.Module):
    """A model of tokens [batch, positions]."""

    def __init__(self, *, dropout: str = "", words: int = 7) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, 16), nn.Linear(16, words)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        if self.dropout:
            x = F.dropout(x, 0.2, self.training or self.dropout == "always")
        out: Tensor = self.head(x)
        return out


def speaking(model: nn.Module, *, shift: int) -> Tensor:
    text = torch.randint(0, 7, (N, 14))
    first, last = max(0, -shift), 14 - max(0, shift)
    x, y = text[:, first:last].clone(), text[:, first + shift : last + shift].clone()
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@pytest.mark.parametrize(
    ("shift", "wrong"),
    [
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
        (-1, True),
        (3, False),
    ],
)
def test_targets_shifted_by_two_or_backwards(shift: int, wrong: bool, tmp_path: Path) -> None:
    found_ = names(tmp_path, partial(speaking, shift=shift), Speaker(), steps=8)
    assert ("wrong_shift" in found_) is wrong


@pytest.mark.parametrize(("dropout", "wrong"), [("training", False), ("always", True)])
def test_dropout_in_evaluation(dropout: str, wrong: bool, tmp_path: Path) -> None:
    def training() -> None:
        fit(Speaker(dropout=dropout), partial(speaking, shift=1), steps=8)

    findings = found(tmp_path, training, perturbations=True)
    assert ("dropout_in_evaluation" in findings) is wrong


@pytest.mark.parametrize("shuffled", [True, False])
def test_nodes_pooled_into_other_graphs(shuffled: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x, graphs = torch.randn(8 * N, 4), torch.arange(N).repeat_interleave(8)
        index = torch.arange(8 * N) % N if shuffled else graphs
        y = torch.zeros(N, 4).index_add(0, graphs, x)[:, :1]
        out = model(x)
        return F.mse_loss(torch.zeros(N, 1).index_add(0, index, out), y)

    assert ("unsorted_pooling" in names(tmp_path, loss, mlp(4, 1))) is shuffled


@pytest.mark.parametrize(("factor", "wrong"), [(0.3, True), (0.95, False)])
@pytest.mark.slow
def test_a_discount_that_forgets_the_future(factor: float, wrong: bool, tmp_path: Path) -> None:
    def discount(values: Tensor, done: Tensor) -> Tensor:
        return factor * (1 - done) * values

    assert ("short_horizon" in q_findings(tmp_path, discount)) is wrong


@pytest.mark.parametrize(("shift", "wrong"), [(4.0, True), (0.2, False)])
def test_inputs_with_another_mean_in_evaluation(shift: float, wrong: bool, tmp_path: Path) -> None:
    model = mlp(5, 1)

    def training() -> None:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(4):
            model.train()
            for _ in range(3):
                x = torch.randn(N, 5)
                y = x.sum(1, keepdim=True)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                model(torch.randn(N, 5) + shift)

    assert ("evaluation_shift" in found(tmp_path, training)) is wrong


@pytest.mark.parametrize("related", [True, False])
@pytest.mark.slow
def test_classes_about_which_the_inputs_say_little(related: bool, tmp_path: Path) -> None:
    x = torch.randn(4096, 8)
    y = (x[:, 0] > 0).long() if related else torch.randint(0, 2, (4096,))

    def loss(model: nn.Module) -> Tensor:
        rows = torch.randint(0, 4096, (64,))
        return F.cross_entropy(model(x[rows]), y[rows])

    findings = found(tmp_path, lambda: fit(mlp(8, 2), loss, steps=320))
    assert ("no_better_than_guessing" in findings) is not related


@pytest.mark.parametrize(("weight", "wrong"), [(-0.01, False), (0.01, True)])
@pytest.mark.slow
def test_the_entropy_of_a_gaussian_policy(weight: float, wrong: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        assert isinstance(model, ActorCritic)
        normal = torch.distributions.Normal(model(torch.randn(N, 4))[0], model.log_std.exp())
        chosen = normal.log_prob(normal.sample()).sum(-1)
        return -(chosen * torch.randn(N)).mean() + weight * normal.entropy().sum(-1).mean()

    assert ("entropy_weight" in names(tmp_path, loss, ActorCritic())) is wrong


@pytest.mark.parametrize("masked", [True, False])
def test_samples_that_compete_with_their_positives(masked: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(8, 6)
        z = F.normalize(model(torch.cat([x, x + 0.1 * torch.randn(8, 6)])), dim=-1)
        similar = z @ z.T / 0.5
        if masked:
            similar = similar.masked_fill(torch.eye(16).bool(), -1e9)
        return F.cross_entropy(similar, (torch.arange(16) + 8) % 16)

    assert ("own_candidate" in names(tmp_path, loss, mlp(6, 8))) is not masked


class Recreating(nn.Module):
    def __init__(self, *, anew: bool) -> None:
        super().__init__()
        self.first, self.second, self.anew = nn.Linear(4, 8), nn.Linear(8, 1), anew

    def forward(self, x: Tensor) -> Tensor:
        second = nn.Linear(8, 1) if self.anew else self.second
        out: Tensor = second(self.first(x).relu())
        return out


@pytest.mark.parametrize("anew", [True, False])
def test_a_layer_that_is_created_in_every_step(anew: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        return F.mse_loss(model(x), x.sum(1, keepdim=True))

    assert ("recreated_parameter" in names(tmp_path, loss, Recreating(anew=anew))) is anew


@pytest.mark.parametrize("rows", [True, False])
def test_tables_that_are_standardized_by_row(rows: bool, tmp_path: Path) -> None:
    table = torch.randn(400, 6) * torch.arange(1, 7) + torch.arange(6)
    dim = 1 if rows else 0
    x = (table - table.mean(dim, keepdim=True)) / table.std(dim, keepdim=True)

    def loss(model: nn.Module) -> Tensor:
        chosen = torch.randint(0, 400, (N,))
        return F.mse_loss(model(x[chosen]), table[chosen, :1])

    assert ("standardized_rows" in names(tmp_path, loss, mlp(6, 1), steps=12)) is rows


@pytest.mark.parametrize(
    ("mode", "wrong"),
    [("train", True), ("eval", False), pytest.param("none", False, marks=pytest.mark.slow)],
)
def test_evaluations_in_training_mode(mode: str, wrong: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def training() -> None:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(8):
            x = torch.randn(N, 4)
            y = x.sum(1, keepdim=True)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if mode != "none":
                model.train(mode == "train")
                with torch.no_grad():
                    model(torch.randn(3 * N, 4))
                model.train()

    assert ("evaluation_in_training_mode" in found(tmp_path, training)) is wrong


@pytest.mark.parametrize("sampled", [True, False])
def test_a_posterior_that_is_never_sampled(sampled: bool, tmp_path: Path) -> None:
    class Autoencoder(VAE):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = self.encoder(x).chunk(2, -1)
            z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean) if sampled else mean
            return self.decoder(z), mean, log_variance

    assert ("deterministic_posterior" in names(tmp_path, bound, Autoencoder())) is not sampled


# -- masks, graphs and sequences -------------------------------------------------------------------


class Reader(nn.Module):
    """Attention over padded tokens; `how` says where the mask goes, and whether it is inverted."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.head, self.how = nn.Embedding(9, 16, padding_idx=0), nn.Linear(16, 2), how
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x, hidden = self.words(tokens), tokens == 0
        if "inverted" in self.how:
            hidden = ~hidden
        if "module" in self.how:
            y = self.attention(x, x, x, key_padding_mask=hidden)[0]
        elif "fused" in self.how:
            y = F.scaled_dot_product_attention(x, x, x, attn_mask=~hidden[:, None, :])
        else:
            scores = (x @ x.transpose(1, 2) / 4).masked_fill(hidden[:, None], -1e9)
            y = scores.softmax(-1) @ x
        out: Tensor = self.head(y.nan_to_num().mean(1))
        return out


def padded(model: nn.Module) -> Tensor:
    tokens = torch.randint(1, 9, (16, 8))
    lengths = torch.randint(3, 9, (16, 1))
    tokens = tokens.masked_fill(torch.arange(8) >= lengths, 0)
    return F.cross_entropy(model(tokens), (tokens[:, 0] > 4).long())


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("by hand", marks=pytest.mark.slow),
        "module",
        pytest.param("fused", marks=pytest.mark.slow),
    ],
)
def test_masks_that_hide_the_tokens(how: str, inverted: bool, tmp_path: Path) -> None:
    reader = Reader(f"inverted {how}" if inverted else how)
    assert ("inverted_mask" in names(tmp_path, padded, reader)) is inverted


@pytest.mark.parametrize("own", [False, True])
def test_messages_from_the_node_itself(own: bool, tmp_path: Path) -> None:
    source, sink = torch.randint(0, 40, (2, 200))

    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            sums = torch.zeros(40, 8).index_add(0, sink, h[sink if own else source])
            out: Tensor = self.outer(sums)
            return out

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(40, 4)
        return F.mse_loss(model(x), x.sum(1, keepdim=True))

    assert ("own_messages" in names(tmp_path, loss, Messages())) is own


@pytest.mark.parametrize("kind", ["own", "right", "difference", "scaled by targets"])
@pytest.mark.slow
def test_messages_weighed_by_attention(kind: str, tmp_path: Path) -> None:
    source, sink = torch.randint(0, 40, (2, 200))
    sink = sink.sort().values

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)
            self.scores = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h, scores = self.inner(x).view(40, 2, 4), self.scores(x)
            weights = (scores[source, :2] + scores[sink, 2:]).sigmoid()
            totals = torch.zeros(40, 2).index_add(0, sink, weights)
            weights = (weights / totals[sink])[..., None]
            messages = {
                "own": weights * h[sink],
                "right": weights * h[source],
                "difference": weights * (h[source] - h[sink]),
                "scaled by targets": weights * h[source] * h[sink].sigmoid(),
            }
            sums = torch.zeros(40, 2, 4).index_add(0, sink, messages[kind]).flatten(1)
            out: Tensor = self.outer(sums)
            return out

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(40, 4)
        return F.mse_loss(model(x), x.sum(1, keepdim=True))

    assert ("own_messages" in names(tmp_path, loss, Attention())) is (kind == "own")


def chain_of_atoms(directions: str) -> tuple[Tensor, Tensor]:
    """Returns the sources and sinks of the bonds of a batch of two to nine chains of 8 atoms."""
    first = (torch.arange(int(torch.randint(2, 10, ()))) * 8)[:, None] + torch.arange(7)
    low, high = first.flatten(), first.flatten() + 1
    if directions == "up":
        return low, high
    if directions == "down":
        return high, low
    both = torch.cat([low, high]), torch.cat([high, low])
    return tuple(each % 8 for each in both) if directions == "first graph" else both  # type: ignore[return-value]


class Bonds(nn.Module):
    """Passes messages along bonds whose ends come as two tensors."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.embed, self.head, self.twice = nn.Linear(4, 8), nn.Linear(8, 1), twice

    def forward(self, x: Tensor, source: Tensor, sink: Tensor) -> Tensor:
        h = self.embed(x).relu()
        sums = torch.zeros_like(h).index_add(0, sink, h[source])
        if self.twice:
            sums = sums + torch.zeros_like(h).scatter_add(
                0, source[:, None].expand(-1, 8), h.index_select(0, sink)
            )
        out: Tensor = self.head(h + sums)
        return out


@pytest.mark.parametrize(
    ("directions", "twice", "rule"),
    [
        pytest.param("up", False, "one_way_messages", marks=pytest.mark.slow),
        ("down", False, "one_way_messages"),
        pytest.param("up", True, "", marks=pytest.mark.slow),
        pytest.param("both", False, "", marks=pytest.mark.slow),
        ("first graph", False, "unreached_nodes"),
    ],
)
def test_the_ends_of_edges(directions: str, twice: bool, rule: str, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        source, sink = chain_of_atoms(directions)
        rows = -(-(int(sink.max()) + 1) // 8) * 8 if directions != "first graph" else len(source)
        x = torch.randn(rows, 4)
        return F.mse_loss(model(x, source, sink), x[:, :1])

    seen = names(tmp_path, loss, Bonds(twice=twice))
    assert seen & {"one_way_messages", "unreached_nodes"} == {rule} - {""}


def sliced(model: nn.Module, *, shift: int) -> Tensor:
    """Cut inputs and targets from one tensor, too large to be stored without samples."""
    text = torch.randint(0, 7, (96, 21))
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.reshape(-1, 7), text[:, shift : 20 + shift].reshape(-1))


@pytest.mark.parametrize(("shift", "wrong"), [(1, False), (0, True)])
@pytest.mark.slow
def test_targets_cut_from_the_tensor_of_the_inputs(shift: int, wrong: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    findings = found(tmp_path, lambda: fit(Speaker(), partial(sliced, shift=shift), steps=6))
    assert ("target_among_inputs" in findings) is wrong


class Translator(nn.Module):
    """A recurrent encoder and decoder; the decoder may see the token it should predict."""

    def __init__(self, *, ahead: int = 0, batch_first: bool = True) -> None:
        super().__init__()
        self.words, self.head, self.ahead = nn.Embedding(9, 16), nn.Linear(16, 9), ahead
        self.encoder = nn.GRU(16, 16, batch_first=batch_first)
        self.cell = nn.GRUCell(16, 16)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        h = self.encoder(self.words(source))[0].mean(1)
        out = []
        for t in range(target.shape[1] - 1):
            h = self.cell(self.words(target[:, t + self.ahead]), h)
            out.append(self.head(h))
        return torch.stack(out, 1)


def translating(model: nn.Module) -> Tensor:
    source = torch.randint(1, 9, (16, 6))
    target = torch.cat([torch.zeros(16, 1, dtype=torch.long), source.flip(1)], 1)
    return F.cross_entropy(model(source, target).flatten(0, 1), target[:, 1:].reshape(-1))


@pytest.mark.parametrize(("ahead", "wrong"), [(0, False), (1, True)])
@pytest.mark.slow
def test_decoders_that_see_the_next_token(ahead: int, wrong: bool, tmp_path: Path) -> None:
    def training() -> None:
        fit(Translator(ahead=ahead), translating, steps=8)

    assert ("future_visible" in found(tmp_path, training, perturbations=True)) is wrong


@pytest.mark.slow
def test_mixed_samples_name_the_module_that_mixes_them(tmp_path: Path) -> None:
    def training() -> None:
        fit(Translator(batch_first=False), translating, steps=8)

    finding = found(tmp_path, training, perturbations=True)["samples_mixed"]
    assert "encoder (GRU) lacks batch_first=True" in finding.message


@pytest.mark.parametrize(("dim", "wrong"), [(1, False), (0, True)])
@pytest.mark.slow
def test_weights_that_are_normalized_over_the_samples(
    dim: int, wrong: bool, tmp_path: Path
) -> None:
    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.head = nn.Linear(5, 1), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            weights = self.score(x)[..., 0].softmax(dim)
            out: Tensor = self.head(torch.einsum("bt,bth->bh", weights, x))
            return out

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 6, 5)
        return F.mse_loss(model(x), x.sum((1, 2))[:, None])

    assert ("softmax_axis" in names(tmp_path, loss, Pooling())) is wrong


# -- what else strangers wrote ---------------------------------------------------------------------


def index_of_the_best(values: Tensor, done: Tensor) -> Tensor:
    return 0.9 * (1 - done) * values.argmax(1)


def value_of_the_best(values: Tensor, done: Tensor) -> Tensor:
    return 0.9 * (1 - done) * values.max(1).values


@pytest.mark.parametrize("choice", [index_of_the_best, value_of_the_best])
def test_targets_with_the_index_of_the_best_action(choice: Discount, tmp_path: Path) -> None:
    model, target = mlp(4, 3), mlp(4, 3).requires_grad_(False)

    def loss(model: nn.Module) -> Tensor:
        x, after, reward = torch.randn(N, 4), torch.randn(N, 4), torch.randn(N)
        with torch.no_grad():
            goal = reward + choice(target(after), (torch.rand(N) < 0.2).float())
        return F.mse_loss(model(x)[:, 0], goal)

    assert ("index_as_value" in names(tmp_path, loss, model)) is (choice is index_of_the_best)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("used", ["stored", "executed"])
def test_log_probabilities_of_other_actions(fresh: bool, used: str, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        policy = torch.distributions.Categorical(logits=model(torch.randn(N, 4))[0])
        actions = policy.sample() if fresh or used == "executed" else torch.randint(0, 3, (N,))
        if used == "executed":  # by an environment
            assert int(actions.numpy().max()) < 3
        return -(policy.log_prob(actions) * torch.randn(N)).mean()

    wrong = fresh and used == "stored"
    assert ("fresh_actions" in names(tmp_path, loss, ActorCritic())) is wrong


@pytest.mark.slow
def test_further_actions_may_estimate_the_entropy(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        policy = torch.distributions.Categorical(logits=model(torch.randn(N, 4))[0])
        executed, further = policy.sample(), policy.sample()
        reward = 1.0 - (executed - 1) ** 2
        guess = policy.log_prob(further)
        return -(policy.log_prob(executed) * reward).mean() + 0.01 * (guess * guess.detach()).mean()

    assert "fresh_actions" not in names(tmp_path, loss, ActorCritic())


@pytest.mark.parametrize("updated", [True, False])
def test_the_program_may_update_parameters_itself(updated: bool, tmp_path: Path) -> None:
    body, head = mlp(4, 3), mlp(4, 3)

    def training() -> None:
        optimizer = torch.optim.Adam(body.parameters(), 0.01)
        for _ in range(5):
            x, y = torch.randn(N, 4), torch.randint(0, 3, (N,))
            optimizer.zero_grad()
            F.cross_entropy(body(x), y).backward()
            optimizer.step()
            F.cross_entropy(head(x), y).backward()
            with torch.no_grad():
                for parameter in head.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1 if updated else 0.0)
                    parameter.grad = None

    assert ("useless_backward" in found(tmp_path, training)) is not updated


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.slow
def test_a_loss_whose_parameters_no_optimizer_holds(right: bool, tmp_path: Path) -> None:
    actor, critic = mlp(4, 1), mlp(5, 1)

    def training() -> None:
        of_critic = torch.optim.Adam((critic if right else actor).parameters(), 0.01)
        of_actor = torch.optim.Adam(actor.parameters(), 0.01)
        for _ in range(5):
            x, y = torch.randn(N, 4), torch.randn(N, 1)
            of_critic.zero_grad()
            F.mse_loss(critic(torch.cat([x, torch.rand(N, 1)], 1)), y).backward()
            of_critic.step()
            of_actor.zero_grad()
            (-critic(torch.cat([x, actor(x)], 1)).mean()).backward()
            of_actor.step()

    assert ("useless_backward" in found(tmp_path, training)) is not right


@pytest.mark.parametrize(
    "actions",
    [
        "stored",
        pytest.param("detached", marks=pytest.mark.slow),
        "own",
        pytest.param("summed", marks=pytest.mark.slow),
        pytest.param("separate values", marks=pytest.mark.slow),
    ],
)
def test_an_actor_loss_must_evaluate_the_actions_of_the_actor(actions: str, tmp_path: Path) -> None:
    actor, critic, values = mlp(4, 1), mlp(5, 1), mlp(4, 1)

    def quality(x: Tensor, action: Tensor) -> Tensor:
        found = critic(torch.cat([x, action], 1))
        return found + values(x) if actions == "separate values" else found

    def training() -> None:
        of_critic = torch.optim.Adam([*critic.parameters(), *values.parameters()], 0.01)
        of_actor = torch.optim.Adam(actor.parameters(), 0.01)
        for _ in range(6):
            x, stored, y = torch.randn(N, 4), torch.rand(N, 1), torch.randn(N, 1)
            of_critic.zero_grad()
            F.mse_loss(quality(x, stored), y).backward()
            of_critic.step()
            new = actor(x)
            action = stored if actions == "stored" else new
            value = quality(x, action.detach() if actions == "detached" else action)
            of_actor.zero_grad()
            (0.1 * new.square() - value).mean().backward()
            of_actor.step()
            if actions == "summed":
                of_critic.step()

    assert ("idle_term" in found(tmp_path, training)) is (actions in ("stored", "detached"))


@pytest.mark.parametrize("alternating", [True, False])
@pytest.mark.slow
def test_optimizers_may_use_the_terms_of_a_loss_in_turn(alternating: bool, tmp_path: Path) -> None:
    one, other = mlp(4, 3), mlp(4, 3)

    def training() -> None:
        optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in (one, other)]
        for step in range(6):
            x, y = torch.randn(N, 4), torch.randint(0, 3, (N,))
            for optimizer in optimizers:
                optimizer.zero_grad()
            (F.cross_entropy(one(x), y) + F.cross_entropy(other(x), y)).backward()
            for optimizer in [optimizers[step % 2]] if alternating else optimizers:
                optimizer.step()

    assert "idle_term" not in found(tmp_path, training)


@pytest.mark.parametrize(("weight", "sampled"), [(1 / N, True), (1.0, True), (1 / N, False)])
@pytest.mark.slow
def test_divergences_of_distributions(weight: float, sampled: bool, tmp_path: Path) -> None:
    class Posterior(VAE):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            mean, scale = self.encoder(x).chunk(2, -1)
            normal = torch.distributions.Normal(mean, F.softplus(scale) + 1e-3)
            prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
            divergence = torch.distributions.kl_divergence(normal, prior).sum()
            return self.decoder(normal.rsample() if sampled else normal.mean), divergence

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 40)
        out, divergence = model(x)
        reconstruction = F.mse_loss(out, x, reduction="sum") / N if weight < 1 else None
        if reconstruction is None:
            return F.mse_loss(out, x) + divergence
        return reconstruction + weight * divergence

    found_ = names(tmp_path, loss, Posterior())
    assert ("divergence_weight" in found_) is (weight == 1)
    assert ("deterministic_posterior" in found_) is not sampled


@pytest.mark.parametrize(("rate", "wrong"), [(0.95, True), (0.3, False)])
@pytest.mark.slow
def test_dropout_functions_that_drop_nearly_everything(
    rate: float, wrong: bool, tmp_path: Path
) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(F.dropout(x, rate, self.training))
            return out

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        return F.mse_loss(model(x), x.sum(1, keepdim=True))

    assert ("heavy_dropout" in names(tmp_path, loss, Dropping())) is wrong


@pytest.mark.parametrize("columns", [1, N])
@pytest.mark.slow
def test_targets_that_were_broadcast_before_the_loss(columns: int, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        y = (x.sum(1, keepdim=True) + torch.randn(columns)).detach()
        return F.mse_loss(model(x), y)

    wrong = columns > 1
    with pytest.warns(UserWarning, match="target size") if wrong else nullcontext():
        assert ("silent_broadcasting" in names(tmp_path, loss, mlp(4, 1))) is wrong


@pytest.mark.slow
def test_a_layer_that_is_frozen_late_may_have_moved_before(tmp_path: Path) -> None:
    model = mlp(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        return F.mse_loss(model(x), x.sum(1, keepdim=True))

    def training() -> None:
        fit(model, loss, steps=8, optimizer=optimizer)
        model[0].requires_grad_(False)
        fit(model, loss, steps=8, optimizer=optimizer)

    assert "frozen_parameter_moves" not in found(tmp_path, training)


@pytest.mark.slow
def test_weighted_samples_beside_an_entropy_are_no_policy(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        logits, values = model(torch.randn(N, 4))
        weighted = F.cross_entropy(logits, torch.randint(0, 3, (N,)), reduction="none")
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        return (torch.rand(N) * weighted).mean() + 0.5 * entropy + values.square().mean()

    found_ = names(tmp_path, loss, ActorCritic())
    assert not found_ & {"policy_sign", "entropy_weight", "fresh_actions"}


@pytest.mark.parametrize("end", [True, False])
def test_sequences_whose_end_is_ignored(end: bool, tmp_path: Path) -> None:
    """Token 0 is padding, and token 8 the end, if there is one."""

    def loss(model: nn.Module) -> Tensor:
        text = torch.randint(1, 8, (16, 14))
        length = torch.randint(5, 12, (16, 1))
        place = torch.arange(14)[None]
        text = text.masked_fill(place > length, 0)
        text = text.masked_fill(place == length, 8 if end else 0)
        logits = model(text[:, :-1])
        return F.cross_entropy(logits.mT, text[:, 1:], ignore_index=0)

    assert ("ignored_end" in names(tmp_path, loss, Speaker(words=9), steps=8)) is not end


@pytest.mark.parametrize(
    ("choice", "negated"), [("min", False), pytest.param("max", True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("right", [True, False])
def test_the_side_on_which_an_objective_is_clipped(
    choice: str, negated: bool, right: bool, tmp_path: Path
) -> None:
    def loss(model: nn.Module) -> Tensor:
        x, actions = torch.randn(N, 4), torch.randint(0, 3, (N,))
        logits, values = model(x)
        advantage = torch.randn(N)
        now = gathered(logits, actions)
        ratio = (now - now.detach()).exp()
        weight = -advantage if negated else advantage
        chooses = torch.min if (choice == "min") is right else torch.max
        policy = chooses(weight * ratio, weight * ratio.clamp(0.8, 1.2)).mean()
        return (policy if negated else -policy) + values.square().mean()

    assert ("wrong_clipping" in names(tmp_path, loss, ActorCritic())) is not right


@pytest.mark.parametrize("log_prob", [gathered, pytest.param(distributed, marks=pytest.mark.slow)])
@pytest.mark.parametrize("twice", [True, False])
def test_policies_of_probabilities(log_prob: LogProb, twice: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        logits = model(torch.randn(N, 4))[0]
        chosen = log_prob(logits.softmax(-1) if twice else logits, torch.randint(0, 3, (N,)))
        return -(chosen * torch.randn(N)).mean()

    assert ("policy_of_probabilities" in names(tmp_path, loss, ActorCritic())) is twice


@pytest.mark.parametrize(("dim", "wrong"), [(-1, False), (1, True)])
@pytest.mark.slow
def test_attention_over_the_heads(dim: int, wrong: bool, tmp_path: Path) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all, self.head = nn.Linear(16, 48), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.all(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            y = (q @ k.mT / 8**0.5).softmax(dim) @ v
            out: Tensor = self.head(y.transpose(1, 2).flatten(2))
            return out

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 6, 16)
        return F.mse_loss(model(x), x[..., :1].cumsum(1))

    assert ("softmax_axis" in names(tmp_path, loss, Heads())) is wrong


@pytest.mark.parametrize(("dim", "wrong"), [(1, False), (0, True)])
@pytest.mark.slow
def test_log_probabilities_of_chosen_rows(dim: int, wrong: bool, tmp_path: Path) -> None:
    chosen = torch.randperm(N)[:20]

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        y = (x[:, 0] > 0).long()
        return F.nll_loss(model(x).log_softmax(dim)[chosen], y[chosen])

    assert ("batch_mixing" in names(tmp_path, loss, mlp(4, 2))) is wrong


class Tagger(nn.Module):
    """A recurrent tagger of padded sentences, which receives their lengths."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 16, padding_idx=0), nn.Linear(16, 3)
        self.rnn = nn.GRU(16, 16, batch_first=batch_first)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(self.words(tokens))[0])
        return out * (lengths > 0)[:, None, None]


@pytest.mark.parametrize("batch_first", [True, False])
def test_taggers_that_read_the_batch_as_time(batch_first: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        tokens, lengths = torch.randint(1, 9, (20, 8)), torch.randint(3, 9, (20,))
        tokens = tokens.masked_fill(torch.arange(8) >= lengths[:, None], 0)
        return F.cross_entropy(model(tokens, lengths).mT, tokens % 3, ignore_index=0)

    def training() -> None:
        fit(Tagger(batch_first=batch_first), loss, steps=8)

    findings = found(tmp_path, training, perturbations=True)
    assert ("samples_mixed" in findings) is not batch_first
    assert ("batch_as_time" in findings) is not batch_first
    if not batch_first:
        assert "rnn (GRU) lacks batch_first=True" in findings["samples_mixed"].message


@pytest.mark.parametrize("time_first", [True, False])
@pytest.mark.slow
def test_the_loss_of_padded_sentences_may_be_part_of_the_model(
    time_first: bool, tmp_path: Path
) -> None:
    """As in a random field: nothing is compared, but padding shows which dimension is time."""
    embed, rnn = nn.Embedding(9, 16, padding_idx=0), nn.GRU(16, 3)

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = embed, rnn

        def forward(self, tokens: Tensor) -> Tensor:
            scores = self.rnn(self.embed(tokens))[0]
            return (scores.logsumexp(-1) - scores[..., 0])[tokens > 0].mean()

    def loss(model: nn.Module) -> Tensor:
        lengths = torch.randint(3, 9, (20, 1))
        tokens = torch.randint(1, 9, (20, 8)).masked_fill(torch.arange(8) >= lengths, 0)
        mean: Tensor = model(tokens.T if time_first else tokens)
        return mean

    assert ("batch_as_time" in names(tmp_path, loss, Field())) is not time_first


@pytest.mark.slow
def test_a_target_that_was_broadcast_before_a_difference(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        y = (x.sum(1) + torch.randn(N, 1)).detach()
        return (model(x)[:, 0] - y).square().mean()

    assert "silent_broadcasting" in names(tmp_path, loss, mlp(4, 1))


@pytest.mark.slow
def test_logits_beside_probabilities_of_another_loss(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 3, (4, 8, 8))
        likely = model(x).softmax(1)
        wanted = F.one_hot(y, 3).movedim(-1, 1).float()
        overlap = 1 - (2 * likely * wanted).sum() / (likely + wanted).sum()
        return overlap + F.cross_entropy(model(x), y)

    findings = found(tmp_path, lambda: fit(nn.Conv2d(3, 3, 3, padding=1), loss, steps=12))
    assert "probabilities_as_logits" not in findings
    assert {f.severity for f in findings.values()} <= {"hint"}


@pytest.mark.slow
def test_the_last_state_of_a_loop_may_be_unused(tmp_path: Path) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state, self.out = nn.Linear(5, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            state, outs = torch.zeros(N, 4), []
            for t in range(x.shape[1]):
                outs.append(self.out(state))
                state = F.relu(self.state(torch.cat([state, x[:, t]], 1)))
            return torch.cat(outs, 1)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 6, 1)
        return F.mse_loss(model(x), x[..., 0].cumsum(1))

    assert "unused_result" not in names(tmp_path, loss, Loop())
