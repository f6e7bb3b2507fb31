"""One mistake is written in many ways, and some code that is right looks like it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from comgra_decl.hooks.tensors.arrangement import interleaving
from tests.rules.test_causes_of_strangers import Loss, fit, found, mlp
from tests.support.shortened import shortened

N = 32
TEACHER = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


def names(root: Path, loss: Loss, model: nn.Module, *, steps: int = 5) -> set[str]:
    return {*found(root, lambda: fit(model, loss, steps=steps))}


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cleared", ["none", "zero", "by hand", None])
@pytest.mark.slow
def test_gradients_that_grow_steadily_are_not_summed_if_they_are_cleared(
    cleared: str | None, tmp_path: Path
) -> None:
    """Inputs that grow let the gradients of weights grow as those of a constant batch add up."""
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    x = torch.rand(N, 4)

    def train() -> None:
        for step in range(40):
            loss = model(x * (1 + step)).square().sum(1).sqrt().mean()
            if cleared == "by hand":
                for parameter in model.parameters():
                    assert parameter.grad is None or parameter.grad.zero_() is not None
            elif cleared is not None:
                optimizer.zero_grad(set_to_none=cleared == "none")
            loss.backward()
            optimizer.step()

    wrong = {"stale_gradient", "accumulated_gradient"} & {*found(tmp_path, train)}
    assert bool(wrong) is (cleared is None)


# -- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.slow
def test_advantages_are_compared_with_the_values_of_their_own_step(
    wrong: bool, tmp_path: Path
) -> None:
    """Sixteen steps of one step agree with those of another by chance."""
    policy, value = mlp(4, 3), mlp(4, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], 0.01)

    def train() -> None:
        for _ in range(8):
            x = torch.randn(16, 4)
            with torch.no_grad():
                actions = Categorical(logits=policy(x)).sample()
                known = value(x)[:, 0]
            target = (x @ TEACHER).gather(1, actions[:, None])[:, 0]
            chosen = Categorical(logits=policy(x)).log_prob(actions)
            sign = 1 if wrong else -1
            loss = sign * (chosen * (target - known)).mean() + F.mse_loss(value(x)[:, 0], target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert ("policy_sign" in found(tmp_path, train)) is wrong


@pytest.mark.slow
def test_actions_that_are_imitated_have_positive_weights(tmp_path: Path) -> None:
    """Implicit Q-learning: exp(Q - V) disagrees with target - Q."""
    critic, value, policy = mlp(4, 3), mlp(4, 1), mlp(4, 3)
    parts = [*critic.parameters(), *value.parameters(), *policy.parameters()]
    optimizer = torch.optim.Adam(parts, 0.01)

    def train() -> None:
        for _ in range(8):
            x, actions = torch.randn(64, 4), torch.randint(0, 3, (64, 1))
            q, v = critic(x).gather(1, actions)[:, 0], value(x)[:, 0]
            target = (x @ TEACHER).gather(1, actions)[:, 0]
            weight = (3 * (q - v).detach()).exp().clamp(max=50)
            chosen = policy(x).log_softmax(1).gather(1, actions)[:, 0]
            loss = (q - target).square().mean() + (q.detach() - v).square().mean()
            loss = loss - (weight * chosen).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert "policy_sign" not in found(tmp_path, train)


@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.slow
def test_signs_are_judged_for_losses_that_are_minimized(maximize: bool, tmp_path: Path) -> None:
    policy, value = mlp(4, 3), mlp(4, 1)
    ascending = torch.optim.Adam(policy.parameters(), 0.01, maximize=maximize)
    descending = torch.optim.Adam(value.parameters(), 0.01)

    def train() -> None:
        for _ in range(8):
            x = torch.randn(64, 4)
            with torch.no_grad():
                actions = Categorical(logits=policy(x)).sample()
                before = Categorical(logits=policy(x)).log_prob(actions)
                target = (x @ TEACHER).gather(1, actions[:, None])[:, 0]
                gain = target - value(x)[:, 0]
            for _ in range(2):
                ratio = (Categorical(logits=policy(x)).log_prob(actions) - before).exp()
                objective = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                ascending.zero_grad()
                objective.backward()
                ascending.step()
                error = F.mse_loss(value(x)[:, 0], target)
                descending.zero_grad()
                error.backward()
                descending.step()

    assert bool({*found(tmp_path, train)} & {"policy_sign", "wrong_clipping"}) is not maximize


@pytest.mark.parametrize("kind", ["classes", "density"])
@pytest.mark.slow
def test_an_objective_that_is_maximized_may_be_negative_and_rise(kind: str, tmp_path: Path) -> None:
    model = mlp(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, maximize=True)

    def train() -> None:
        for _ in range(60):
            x = torch.randn(64, 4)
            out = model(x)
            if kind == "classes":
                objective = -F.cross_entropy(out, (x @ TEACHER).argmax(1))
            else:
                scale = F.softplus(out[:, 1]) + 1e-3
                objective = Normal(out[:, 0], scale).log_prob(x.sum(1) / 4).mean()
            optimizer.zero_grad()
            objective.backward()
            optimizer.step()

    assert not [f for f in found(tmp_path, train).values() if f.severity != "hint"]


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.slow
def test_a_cross_entropy_may_be_weighted_by_advantages(wrong: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(64, 4)
        out = model(x)
        if wrong:
            return -F.cross_entropy(out, (x @ TEACHER).argmax(1), reduction="none").mean()
        actions = Categorical(logits=out.detach()).sample()
        reward = (x @ TEACHER).gather(1, actions[:, None])[:, 0]
        gain = (reward - reward.mean()) / reward.std()
        return (F.cross_entropy(out, actions, reduction="none") * gain).mean()

    assert ("negative_loss" in names(tmp_path, loss, mlp(4, 3), steps=40)) is wrong


@pytest.mark.slow
def test_a_policy_may_stay_near_the_one_before(tmp_path: Path) -> None:
    """A penalty on the divergence of two Gaussians takes the place of clipping."""
    policy, spread = mlp(4, 2), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*policy.parameters(), spread], 0.01)

    def train() -> None:
        for _ in range(8):
            x = torch.randn(64, 4)
            with torch.no_grad():
                mean, scale = policy(x), spread.exp()
                actions = Normal(mean, scale).sample()
                gain = -actions.square().sum(1)
                gain = (gain - gain.mean()) / gain.std()
                before = Normal(mean, scale).log_prob(actions).sum(1)
            new, width = policy(x), spread
            now = Normal(new, width.exp()).log_prob(actions).sum(1)
            apart = 0.5 * ((2 * width).exp() + (new - mean).square() - 1 - 2 * width).sum(1)
            loss = (-(now - before).exp() * gain + 0.5 * apart).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert "deterministic_posterior" not in found(tmp_path, train)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.slow
def test_a_learned_number_is_the_same_for_all_samples(alone: bool, tmp_path: Path) -> None:
    """The average reward of a task without end."""
    value, average = mlp(4, 1), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([*value.parameters(), average], 0.01)

    def train() -> None:
        for _ in range(30):
            x = torch.randn(64, 4)
            reward = x[:, 0].square()
            values = value(x)[:, 0] * 0 + average if alone else value(x)[:, 0]
            loss = F.mse_loss(values, reward - average.detach())
            loss = loss + F.mse_loss(average.expand(64), reward)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert ("input_independence" in found(tmp_path, train)) is alone


@pytest.mark.slow
def test_a_likelihood_with_a_learned_scale_may_be_negative_and_fall(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(64, 4)
        out = model(x)
        scale = F.softplus(out[:, 1]).clamp(min=1e-3)
        error = (x[:, 0].clamp(-0.1, 0.1) * 5 + 0.1 * torch.randn(64) - out[:, 0]) / scale
        return (0.5 * error.square() + scale.log()).mean()

    assert "negative_loss" not in names(tmp_path, loss, mlp(4, 2), steps=80)


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.slow
def test_actions_that_a_product_with_their_encoding_selects(wrong: bool, tmp_path: Path) -> None:
    value = mlp(4, 1)

    def loss(model: nn.Module) -> Tensor:
        x, actions = torch.randn(N, 4), F.one_hot(torch.randint(0, 3, (N,)), 3).float()
        returns = (x @ TEACHER * actions).sum(1)
        chosen = torch.einsum("na,na->n", model(x).log_softmax(1), actions)
        advantage = (returns - value(x)[:, 0]).detach()
        policy = torch.dot(chosen, advantage) / N
        return (policy if wrong else -policy) + (value(x)[:, 0] - returns).square().mean()

    assert ("policy_sign" in names(tmp_path, loss, mlp(4, 3))) is wrong


@pytest.mark.parametrize("use", ["rows", "table", "compared", "none"])
@pytest.mark.slow
def test_rewards_that_are_looked_up_by_the_sampled_actions(use: str, tmp_path: Path) -> None:
    table = torch.randn(3)
    optimizer = torch.optim.Adam((policy := mlp(4, 3)).parameters(), 0.01)

    def train() -> None:
        for _ in range(6):
            x = torch.randn(N, 4)
            choices = Categorical(logits=policy(x))
            actions = choices.sample()
            if use == "rows":
                reward = x[torch.arange(N), actions]
            elif use == "table":
                reward = table[actions]
            elif use == "compared":
                reward = (actions == x[:, :3].argmax(1)).float()
            else:
                reward = x[:, 0]
            optimizer.zero_grad()
            (-(choices.log_prob(actions) * (reward - 0.1)).mean()).backward()
            optimizer.step()

    assert ("fresh_actions" in found(tmp_path, train)) is (use == "none")


@pytest.mark.slow
def test_returns_that_are_all_negative_push_no_scale(tmp_path: Path) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_scale = mlp(4, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Distribution:
            return Independent(Normal(self.mean(x), self.log_scale.exp()), 1)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        actions = (policy := model(x)).sample()
        returns = -(actions - x[:, :2]).pow(2).sum(1)
        result: Tensor = -(returns * policy.log_prob(actions)).mean()
        return result - 0.001 * policy.entropy().mean()

    assert "wrong_log_scale" not in names(tmp_path, loss, Policy())


@pytest.mark.parametrize("smaller", [True, False])
@pytest.mark.slow
def test_a_clipped_objective_of_stacked_gains(smaller: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x, actions = torch.randn(N, 4), torch.randint(0, 3, (N, 1))
        logs = model(x).log_softmax(1).gather(1, actions)[:, 0]
        ratio, advantage = (logs - logs.detach() + 0.01).exp(), torch.randn(N)
        gains = torch.stack([ratio * advantage, ratio.clamp(0.8, 1.2) * advantage])
        return -(gains.amin(0) if smaller else gains.amax(0)).mean()

    assert ("wrong_clipping" in names(tmp_path, loss, mlp(4, 3))) is not smaller


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("form", [pytest.param("division", marks=pytest.mark.slow), "difference"])
def test_a_ratio_whose_denominator_carries_a_gradient(
    detach: bool, form: str, tmp_path: Path
) -> None:
    def loss(model: nn.Module) -> Tensor:
        x, actions = torch.randn(N, 4), torch.randint(0, 3, (N, 1))
        new, old = (model(x).softmax(1).gather(1, actions) for _ in range(2))
        old = old.detach() if detach else old
        ratio = new / old if form == "division" else (new.log() - old.log()).exp()
        return -(ratio * torch.randn(N, 1)).mean()

    assert ("attached_ratio" in names(tmp_path, loss, mlp(4, 3))) is not detach


@pytest.mark.slow
def test_a_normalized_advantage_that_trains_the_values(tmp_path: Path) -> None:
    value = mlp(4, 1)

    def loss(model: nn.Module) -> Tensor:
        x, actions = torch.randn(N, 4), torch.randint(0, 3, (N, 1))
        returns, values = x[:, 0], value(x)[:, 0]
        advantage = returns - values
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        chosen = model(x).log_softmax(1).gather(1, actions)[:, 0]
        return -(chosen * advantage).mean() + F.mse_loss(values, returns)

    assert "attached_advantage" in names(tmp_path, loss, mlp(4, 3))


# -- bootstrapped targets --------------------------------------------------------------------------

GOALS: dict[str, tuple[str, Callable[[Tensor, Callable[[], Tensor], Tensor], Tensor]]] = {
    "discount and mask come first": ("", lambda r, v, d: r + 0.9 * ~d * v().max(1)[0]),
    "the target is chosen": ("", lambda r, v, d: torch.where(d, r, r + 0.9 * v().amax(1))),
    "a discount per sample": ("", lambda r, v, d: r + (0.9 * (~d).float()) * v().max(1)[0]),
    "alpha": ("unmasked_target", lambda r, v, _d: torch.add(r, v().amax(1), alpha=0.97)),
    "in place": ("unmasked_target", lambda r, v, _d: v().amax(1).mul_(0.9).add_(r)),
    "addcmul": ("short_horizon", lambda r, v, d: torch.addcmul(r, 0.5 * ~d, v().amax(1))),
    "an index": ("index_as_value", lambda r, v, d: r + 0.9 * ~d * v().argmax(1).float()),
}


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("the target is chosen", "addcmul") else pytest.param(n, marks=pytest.mark.slow)
        for n in GOALS
    ],
)
def test_targets_of_q_learning(name: str, tmp_path: Path) -> None:
    wrong, goal = GOALS[name]
    model = mlp(4, 3)
    target = deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module) -> Tensor:
        x, after = torch.randn(N, 4), torch.randn(N, 4)
        done = torch.rand(N) < 0.2
        with torch.no_grad():
            y = goal(torch.randn(N), lambda: target(after), done)
        return F.smooth_l1_loss(model(x).gather(1, torch.randint(0, 3, (N, 1)))[:, 0], y)

    seen = names(tmp_path, loss, model)
    assert seen & {"unmasked_target", "short_horizon", "index_as_value"} == ({wrong} - {""})


@pytest.mark.parametrize("ascending", [True, False])
def test_returns_in_a_list(ascending: bool, tmp_path: Path) -> None:
    value = mlp(4, 1)

    def loss(model: nn.Module) -> Tensor:
        x, rewards = torch.randn(12, 4), torch.randn(12)
        values, running = value(x)[:, 0], torch.zeros(())
        returns: list[Tensor] = []
        for t in range(12) if ascending else reversed(range(12)):
            running = rewards[t] + 0.9 * running
            returns.insert(len(returns) if ascending else 0, running)
        goal = torch.stack(returns)
        chosen = model(x).log_softmax(1)[:, 0]
        return -(chosen * (goal - values).detach()).mean() + F.mse_loss(values, goal)

    assert ("ascending_returns" in names(tmp_path, loss, mlp(4, 3))) is ascending


# -- comparisons -----------------------------------------------------------------------------------

DIFFERENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rsub": lambda p, y: torch.rsub(p, y).pow(2).mean(),
    "log cosh": lambda p, y: torch.log(torch.cosh(y.sub(p))).mean(),
    "log_prob": lambda p, y: -Normal(p, 1.0).log_prob(y).mean(),
    "half precision": lambda p, y: ((p.bfloat16() - y.bfloat16()) ** 2).mean().float(),
}


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("form", DIFFERENCES)
@pytest.mark.slow
def test_predictions_that_meet_every_target(form: str, fits: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        return DIFFERENCES[form](model(x), x[:, :1] if fits else x[:, 0])

    assert ("silent_broadcasting" in names(tmp_path, loss, mlp(4, 1))) is not fits


@pytest.mark.parametrize("form", ["energy distance", "all pairs"])
@pytest.mark.slow
def test_pairs_that_are_meant(form: str, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        out, data = model(torch.randn(N, 4)), torch.randn(N)
        if form == "all pairs":
            return (out[:, 0][:, None] - data[None]).abs().mean()
        return (out - data).abs().mean() - 0.5 * (out - out.squeeze(1)).abs().mean()

    assert "silent_broadcasting" not in names(tmp_path, loss, mlp(4, 1))


@pytest.mark.parametrize("scale", shortened([0.5, 5.0], tried=2))
@pytest.mark.parametrize("form", shortened(["square", "huber", "gaussian"], tried=2))
def test_targets_beyond_the_range_of_an_answer(form: str, scale: float, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        out, y = model(x), scale * x[:, :1].tanh()
        if form == "square":
            return torch.square(y - out).mean()
        if form == "huber":
            return F.huber_loss(target=y, input=out)
        return F.gaussian_nll_loss(out, y, torch.ones_like(out))

    model = nn.Sequential(mlp(4, 1), nn.Tanh())
    assert ("bounded_answer" in names(tmp_path, loss, model)) is (scale > 1)


# -- functions -------------------------------------------------------------------------------------


class Round(torch.autograd.Function):
    """Rounds, and passes on gradients; it has the name of torch's function."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


STEPS: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "sign": (True, torch.sign),
    "division that rounds": (
        True,
        lambda h: torch.div(h, 0.25, rounding_mode="floor") * 0.25,
    ),
    "straight through": (False, Round.apply),
    "division": (False, lambda h: torch.div(h, 0.25)),
}


@pytest.mark.parametrize("form", STEPS)
def test_functions_without_derivative(form: str, tmp_path: Path) -> None:
    wrong, function = STEPS[form]

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = mlp(4, 16), mlp(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.after(function(3 * self.before(x)))
            return result

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        return F.cross_entropy(model(x), (x @ TEACHER).argmax(1))

    assert ("zero_derivative" in names(tmp_path, loss, Quantized())) is wrong


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize("form", ["addcmul", "einsum"])
@pytest.mark.slow
def test_samples_scaled_by_their_variance(form: str, wrong: bool, tmp_path: Path) -> None:
    decoder = mlp(4, 10)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 10)
        mean, log_variance = model(x).chunk(2, -1)
        scale, noise = (log_variance * (1 if wrong else 0.5)).exp(), torch.randn(N, 4)
        if wrong:
            scale = log_variance.exp()
        sample = torch.addcmul(mean, scale, noise)
        if form == "einsum":
            sample = mean + torch.einsum("bz,bz->bz", scale, noise)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1)
        return (decoder(sample) - x).pow(2).sum(-1).mean() + divergence.mean()

    assert ("variance_as_scale" in names(tmp_path, loss, mlp(10, 8))) is wrong


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_copies_and_perturbations_that_live_for_a_step_are_no_forgotten_layers(
    tmp_path: Path,
) -> None:
    """First-order meta-learning, and adversarial training with a parameter as perturbation."""
    optimizer = torch.optim.Adam((model := mlp(4, 3)).parameters(), 0.01)

    def train() -> None:
        for _ in range(12):
            optimizer.zero_grad()
            x = torch.randn(N, 4)
            y = (x @ TEACHER).argmax(1)
            copy = deepcopy(model)
            for gradient, p in zip(
                torch.autograd.grad(F.cross_entropy(copy(x), y), [*copy.parameters()]),
                copy.parameters(),
                strict=True,
            ):
                p.data.sub_(gradient, alpha=0.05)
            F.cross_entropy(copy(x), y).backward()
            shift = nn.Parameter(torch.zeros_like(x))
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(x + shift), y), shift)
            shift.data.add_(gradient.sign(), alpha=0.05)
            F.cross_entropy(model(x + shift), y).backward()
            for p, q in zip(model.parameters(), copy.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                p.grad += q.grad
            optimizer.step()

    seen = {*found(tmp_path, train)}
    assert not seen & {"recreated_parameter", "useless_backward", "untrained_parameter"}


@pytest.mark.slow
def test_a_deviation_may_begin_constant_beside_random_means(tmp_path: Path) -> None:
    class Bayesian(nn.Module):
        def __init__(self, *, random: bool) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.randn(3, 4) if random else torch.full((3, 4), 0.2))
            self.scale = nn.Parameter(torch.full((3, 4), -3.0))

        def forward(self, x: Tensor) -> Tensor:
            scale = F.softplus(self.scale)
            return F.linear(x, self.mean + scale * torch.randn_like(scale))

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        return F.cross_entropy(model(x), (x @ TEACHER).argmax(1))

    assert "identical_units" not in names(tmp_path / "a", loss, Bayesian(random=True))
    assert "identical_units" in names(tmp_path / "b", loss, Bayesian(random=False))


@pytest.mark.slow
def test_the_first_backward_need_not_be_that_of_the_loss(tmp_path: Path) -> None:
    frozen = mlp(4, 3).requires_grad_(False)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        shifted = x.clone().requires_grad_()
        (frozen(shifted).logsumexp(1).sum() + 100).backward()
        assert shifted.grad is not None
        return F.cross_entropy(model(x + 0.1 * shifted.grad), (x @ TEACHER).argmax(1))

    assert "initial_loss" not in names(tmp_path, loss, mlp(4, 3))


@pytest.mark.slow
def test_a_weight_that_separately_called_modules_share_is_trained(tmp_path: Path) -> None:
    embedding, middle, head = nn.Embedding(6, 8), mlp(8, 8), nn.Linear(8, 6, bias=False)
    head.weight = embedding.weight
    optimizer = torch.optim.Adam([*embedding.parameters(), *middle.parameters()], 0.01)

    def train() -> None:
        for _ in range(12):
            tokens = torch.randint(0, 6, (N,))
            optimizer.zero_grad()
            F.cross_entropy(head(middle(embedding(tokens))), (tokens + 1) % 6).backward()
            optimizer.step()

    assert "untrained_parameter" not in found(tmp_path, train)


@pytest.mark.slow
def test_filters_of_channels_may_begin_alike(tmp_path: Path) -> None:
    """Each of them receives a channel of its own, as a moving average does."""

    class Averages(nn.Module):
        def __init__(self, *, dense: bool) -> None:
            super().__init__()
            self.dense, self.head = dense, nn.Linear(6, 3)
            self.filters = nn.Parameter(torch.full((6, 6 if dense else 1, 5), 0.2))
            self.layer = nn.Conv1d(6, 6, 3, padding=1, groups=6)
            nn.init.constant_(self.layer.weight, 1 / 3)

        def forward(self, x: Tensor) -> Tensor:
            groups = 1 if self.dense else 6
            out: Tensor = self.head(F.conv1d(self.layer(x), self.filters, groups=groups).mean(-1))
            return out

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 6, 16)
        return F.cross_entropy(model(x), x[:, :3].mean(-1).argmax(1))

    assert "identical_units" not in names(tmp_path / "a", loss, Averages(dense=False))
    assert "identical_units" in names(tmp_path / "b", loss, Averages(dense=True))


@pytest.mark.slow
def test_frozen_weights_may_be_replaced_by_generated_ones(tmp_path: Path) -> None:
    core = nn.Linear(8, 4).requires_grad_(False)

    def loss(generator: nn.Module) -> Tensor:
        made = generator(torch.randn(1, 4))[0]
        weights = {"weight": made[:32].view(4, 8), "bias": made[32:]}
        return F.mse_loss(
            torch.func.functional_call(core, weights, torch.randn(N, 8)), torch.ones(N, 4)
        )

    assert "large_update" not in names(tmp_path, loss, mlp(4, 36), steps=12)


# -- pairs -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_samples_may_be_compared_with_each_datum(tmp_path: Path) -> None:
    """An energy distance between two sets of numbers, one of them generated."""

    def loss(model: nn.Module) -> Tensor:
        data, one, two = torch.randn(N), model(torch.randn(N, 4)), model(torch.randn(N, 4))
        return 2 * (one - data).abs().mean() - (one - two.T).abs().mean()

    assert "silent_broadcasting" not in names(tmp_path, loss, mlp(4, 1))


@pytest.mark.slow
def test_a_diagonal_may_be_cut_off_by_views(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        z = F.normalize(model(torch.randn(N, 4)), dim=1)
        scores = (z @ z.T).flatten()[1:].view(N - 1, N + 1)[:, :-1].reshape(N, N - 1)
        return F.cross_entropy(scores / 0.2, torch.arange(N) % (N - 1))

    assert "view_for_permute" not in names(tmp_path, loss, mlp(4, 8))


@pytest.mark.parametrize("policy", [True, False])
@pytest.mark.slow
def test_a_policy_may_be_called_twice_with_the_same_states(policy: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x, actions = torch.randn(N, 4), torch.randint(0, 3, (N, 1))
        one, two = model(x).log_softmax(1), model(x.clone()).log_softmax(1)
        if not policy:
            return -(F.normalize(one) * F.normalize(two)).sum(1).mean() - one.std() - two.std()
        entropy = -(two.exp() * two).sum(1).mean()
        return -(one.gather(1, actions)[:, 0] * torch.randn(N)).mean() - 0.02 * entropy

    findings = found(tmp_path, lambda: fit(mlp(4, 3), loss, steps=8))
    assert findings["identical_views"].severity == ("hint" if policy else "warning")


@pytest.mark.slow
def test_noisy_targets_of_a_bounded_answer_are_a_warning(tmp_path: Path) -> None:
    def severity(noise: float, spread: float) -> str:
        def loss(model: nn.Module) -> Tensor:
            x = torch.randn(N, 4)
            y = (spread * x).sigmoid() if spread else 2 * x.clamp(-1, 1)
            return F.mse_loss(model(x), y + noise * torch.randn(N, 4))

        root = tmp_path / f"{noise} {spread}"
        model = nn.Sequential(mlp(4, 4), nn.Sigmoid())
        return found(root, lambda: fit(model, loss, steps=8))["bounded_answer"].severity

    assert severity(0.15, 0.7) == "warning"
    assert severity(0.0, 0.0) == "error"


# -- losses of rates and alignments ----------------------------------------------------------------


class Rates(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = mlp(4, 1), last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(x))[:, 0]
        return out


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


@pytest.mark.parametrize(
    ("last", "log_input", "wrong"),
    [
        pytest.param(Exponential(), True, True, marks=pytest.mark.slow),
        (nn.Softplus(), True, True),
        pytest.param(Exponential(), False, False, marks=pytest.mark.slow),
        (nn.Identity(), True, False),
    ],
)
def test_a_rate_in_place_of_its_logarithm(
    last: nn.Module, log_input: bool, wrong: bool, tmp_path: Path
) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        return F.poisson_nll_loss(model(x), torch.poisson(x[:, 0].exp()), log_input=log_input)

    assert ("rate_as_log" in names(tmp_path, loss, Rates(last))) is wrong


@pytest.mark.parametrize("log_input", [True, False])
@pytest.mark.parametrize("column", [True, False])
@pytest.mark.slow
def test_counts_that_are_broadcast_in_a_loss_of_rates(
    column: bool, log_input: bool, tmp_path: Path
) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        counts = torch.poisson(x[:, :1].exp())
        target = counts if column else counts[:, 0]
        return F.poisson_nll_loss(model(x), target, log_input=log_input)

    last = nn.Identity() if log_input else Exponential()
    assert ("silent_broadcasting" in names(tmp_path, loss, Rates(last))) is column


@pytest.mark.slow
def test_a_mask_of_pairs_is_no_broadcast_target(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        scores = model(torch.randn(N, 4))[:, 0]
        pairs = (torch.rand(N, N) < 0.5).float()
        return (pairs * scores).sum() / pairs.sum() + scores.square().mean()

    assert "silent_broadcasting" not in names(tmp_path, loss, mlp(4, 1))


@pytest.mark.parametrize(("dim", "wrong"), [(-1, False), (2, False), (1, True), (0, True)])
@pytest.mark.slow
def test_the_softmax_before_an_alignment(dim: int, wrong: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        scores = model(torch.randn(12, N, 4)).log_softmax(dim)
        lengths = torch.full((N,), 12), torch.full((N,), 4)
        return F.ctc_loss(scores, torch.randint(1, 5, (N, 4)), *lengths)

    assert ("batch_mixing" in names(tmp_path, loss, mlp(4, 5))) is wrong


# -- sequences -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.slow
def test_inputs_and_targets_of_different_lengths_show_the_batch(
    batch_first: bool, tmp_path: Path
) -> None:
    class Forecaster(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 8, batch_first=batch_first)
            self.head = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x)[0][:, -1])
            return out

    def loss(model: nn.Module) -> Tensor:
        return F.mse_loss(model(torch.randn(16, 12, 3)), torch.randn(16, 6))

    assert ("batch_as_time" in names(tmp_path, loss, Forecaster())) is not batch_first


@pytest.mark.slow
def test_a_mask_beside_sequences_with_time_first_is_no_batch(tmp_path: Path) -> None:
    """As in the tutorial of nn.Transformer: tokens [time, batch] and a mask [time, time]."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(12, 16), nn.Linear(16, 12)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32)

        def forward(self, source: Tensor, mask: Tensor, places: Tensor) -> Tensor:
            x = self.embed(source) + places[:, None]
            out: Tensor = self.head(self.layer(x, mask))
            return out

    def loss(model: nn.Module) -> Tensor:
        ids = torch.randint(0, 12, (15, 8))
        mask = nn.Transformer.generate_square_subsequent_mask(14)
        out = model(ids[:-1], mask, torch.randn(14, 16) * 0.1)
        return F.cross_entropy(out.flatten(0, 1), ids[1:].flatten())

    assert "batch_as_time" not in names(tmp_path, loss, Language())


@pytest.mark.parametrize("features", [3, 6])
@pytest.mark.slow
def test_sequences_and_targets_with_time_first(features: int, tmp_path: Path) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(features, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x + places[:, None])[0])
            return out

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(12, 16, features)
        return F.mse_loss(model(x, torch.randn(12, features)), torch.randn(12, 16, 3))

    assert "batch_as_time" not in names(tmp_path, loss, Tagger())


class Melody(nn.Module):
    """Attention over tokens, with a mask that may show the next one."""

    def __init__(self, *, shows: int) -> None:
        super().__init__()
        self.shows, self.embed, self.head = shows, nn.Embedding(12, 16), nn.Linear(16, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + torch.arange(ids.shape[1])[:, None] / 10
        mask = torch.ones(ids.shape[1], ids.shape[1]).tril(self.shows) > 0
        scores = (x @ x.mT / 4).masked_fill(~mask, -1e9)
        out: Tensor = self.head(x + scores.softmax(-1) @ x)
        return out


@pytest.mark.parametrize(
    ("shift", "shows", "rule"),
    [(1, 0, ""), (0, 0, "target_among_inputs"), (1, 1, "future_visible")],
)
@pytest.mark.parametrize("skipped", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_tokens_of_which_some_are_not_predicted(
    shift: int, shows: int, rule: str, skipped: int, tmp_path: Path
) -> None:
    """The first positions of a sequence may be left out of the loss."""

    def loss(model: nn.Module) -> Tensor:
        ids = torch.randint(0, 12, (8, 21))
        logits, target = model(ids[:, :-1]), ids[:, shift : 20 + shift]
        return F.cross_entropy(logits[:, skipped:].flatten(0, 1), target[:, skipped:].flatten())

    model = Melody(shows=shows)
    seen = {*found(tmp_path, lambda: fit(model, loss, steps=8), perturbations=True)}
    assert seen & {"target_among_inputs", "future_visible", "wrong_shift"} == {rule} - {""}


# -- samples and masks -----------------------------------------------------------------------------


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.slow
def test_identical_samples_are_told_from_an_ignored_input(same: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(1, 4).expand(N, 4).clone() if same else torch.randn(N, 4)
        return F.cross_entropy(model(x if same else 0 * x), torch.randint(0, 3, (N,)))

    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x if same else x * 0)
            return out

    def blind(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(torch.randn(N, 4)), torch.randint(0, 3, (N,)))

    findings = found(tmp_path, lambda: fit(Blind(), loss if same else blind, steps=8))
    message = findings["input_independence"].message
    assert ("inputs of all samples are identical" in message) is same


@pytest.mark.parametrize("form", shortened(["float", "bool", "where", "fill", "write"], tried=1))
@pytest.mark.parametrize("inverted", [True, False])
def test_a_mask_of_ended_episodes_may_be_inverted(
    inverted: bool, form: str, tmp_path: Path
) -> None:
    model = mlp(4, 3)
    target = deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module) -> Tensor:
        x, after = torch.randn(64, 4), torch.randn(64, 4)
        done = torch.rand(64) < 0.1
        goes_on = done if inverted else ~done
        with torch.no_grad():
            value = target(after).amax(1)
            if form in ("float", "bool"):
                value = (goes_on.float() if form == "float" else goes_on) * value
            elif form == "where":
                value = torch.where(goes_on, value, torch.zeros_like(value))
            elif form == "fill":
                value = value.masked_fill(~goes_on, 0.0)
            else:
                value[~goes_on] = 0
            y = torch.randn(64) + 0.9 * value
        return F.mse_loss(model(x).gather(1, torch.randint(0, 3, (64, 1)))[:, 0], y)

    assert ("inverted_end" in names(tmp_path, loss, model)) is inverted


@pytest.mark.parametrize("inverted", [True, False])
@pytest.mark.slow
def test_returns_over_several_steps_have_powers_of_a_discount(
    inverted: bool, tmp_path: Path
) -> None:
    model = mlp(4, 3)
    target = deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module) -> Tensor:
        end = (torch.rand(64) < 0.1).float()
        discount = 0.9 ** torch.randint(1, 4, (64,))
        with torch.no_grad():
            value = target(torch.randn(64, 4)).amax(1)
            y = torch.randn(64) + discount * (end if inverted else 1 - end) * value
        chosen = model(torch.randn(64, 4)).gather(1, torch.randint(0, 3, (64, 1)))[:, 0]
        return (chosen - y).pow(2).mean()

    assert ("inverted_end" in names(tmp_path, loss, model)) is inverted


@pytest.mark.slow
def test_observations_of_one_array_are_a_cause_and_no_consequence(tmp_path: Path) -> None:
    """Dead units cannot explain that all samples are the same."""

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(1, 4).expand(N, 4).clone()
        return F.cross_entropy(model(x), torch.randint(0, 3, (N,)))

    model = mlp(4, 3)
    with torch.no_grad():
        [*model.parameters()][1].fill_(-9.0)
    findings = found(tmp_path, lambda: fit(model, loss, steps=20))
    assert findings["input_independence"].because is None


@pytest.mark.slow
def test_a_task_may_have_no_input(tmp_path: Path) -> None:
    """A bandit without context receives the same constant in every step."""

    def loss(model: nn.Module) -> Tensor:
        chosen = Categorical(logits=model(torch.ones(N, 1)))
        actions = chosen.sample()
        reward = actions.float() + torch.randn(N)
        return -(chosen.log_prob(actions) * (reward - reward.mean())).mean()

    findings = found(tmp_path, lambda: fit(mlp(1, 3), loss, steps=8))
    assert findings["input_independence"].severity == "hint"


@pytest.mark.parametrize("name", ["transitions", "weight"])
@pytest.mark.slow
def test_only_weights_must_differ_at_the_start(name: str, tmp_path: Path) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emissions = nn.Linear(3, 4)
            setattr(self, name, nn.Parameter(torch.full((4, 4), 0.1)))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.emissions(x)
            state = scores[:, 0]
            for t in range(1, x.shape[1]):
                state = (state[:, :, None] + getattr(self, name)).logsumexp(1) + scores[:, t]
            return state

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(torch.randn(16, 5, 3)), torch.randint(0, 4, (16,)))

    severity = found(tmp_path, lambda: fit(Chain(), loss))["identical_units"].severity
    assert severity == ("error" if name == "weight" else "hint")


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.slow
def test_gradients_of_two_losses_are_cleared_between_them(between: bool, tmp_path: Path) -> None:
    one, two = nn.Linear(4, 3), nn.Linear(4, 1)
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (one, two)]

    def clear() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    def train() -> None:
        for _ in range(5):
            x = torch.randn(N, 4)
            if not between:
                clear()
            F.cross_entropy(one(x), x[:, :3].argmax(1)).backward()
            if between:
                clear()
            F.mse_loss(two(x), x[:, :1]).backward()
            for optimizer in optimizers:
                optimizer.step()

    rules = found(tmp_path, train)
    assert ("cleared_gradient" in rules) is between


@pytest.mark.parametrize("ends", [True, False], ids=["loop that holds its state", "loop"])
@pytest.mark.slow
def test_a_loop_may_hold_its_state_on_padding(ends: bool, tmp_path: Path) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.cell = nn.Embedding(12, 8), nn.GRUCell(8, 8)
            self.out = nn.Linear(8, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            state, states = torch.zeros(len(tokens), 8), []
            for t in range(tokens.shape[1]):
                new = self.cell(self.table(tokens[:, t]), state)
                state = torch.where((tokens[:, t] > 0)[:, None], new, state) if ends else new
                states.append(state)
            out: Tensor = self.out(torch.stack(states, 1)[:, -1])
            return out

    def loss(model: nn.Module) -> Tensor:
        lengths = torch.randint(3, 9, (N, 1))
        tokens = torch.randint(1, 12, (N, 9)) * (torch.arange(9) < lengths)
        return F.cross_entropy(model(tokens), torch.randint(0, 2, (N,)))

    assert found(tmp_path, lambda: fit(Reader(), loss))["padded_last_step"].severity == "hint"


@pytest.mark.parametrize("time_first", [True, False])
@pytest.mark.slow
def test_the_last_position_is_read_wherever_the_positions_are(
    time_first: bool, tmp_path: Path
) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(12, 8)
            self.cell = nn.GRU(8, 8, batch_first=not time_first)
            self.out = nn.Linear(8, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            given = self.table(tokens.T if time_first else tokens)
            states = self.cell(given)[0]
            out: Tensor = self.out(states[-1] if time_first else states[:, -1])
            return out

    def loss(model: nn.Module) -> Tensor:
        lengths = torch.randint(3, 9, (N, 1))
        tokens = torch.randint(1, 12, (N, 9)) * (torch.arange(9) < lengths)
        return F.cross_entropy(model(tokens), torch.randint(0, 2, (N,)))

    assert found(tmp_path, lambda: fit(Reader(), loss))["padded_last_step"].severity == "warning"


@pytest.mark.slow
def test_samples_of_a_group_may_depend_on_each_other(tmp_path: Path) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, group: Tensor) -> Tensor:
            h = self.inner(x)
            mean = torch.zeros(8, 8).index_add(0, group, h) / 6
            out: Tensor = self.out((h - mean[group]).relu())
            return out

    def loss(model: nn.Module) -> Tensor:
        group = torch.arange(8).repeat_interleave(6)
        return F.cross_entropy(model(torch.randn(48, 4), group), torch.randint(0, 2, (48,)))

    rules = found(tmp_path, lambda: fit(Centred(), loss, steps=12), perturbations=True)
    assert "samples_mixed" not in rules


@pytest.mark.parametrize(("lead", "wrong"), [(2, False), (0, True)])
@pytest.mark.slow
def test_a_second_head_may_predict_two_tokens_ahead(lead: int, wrong: bool, tmp_path: Path) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body = nn.Embedding(11, 16), nn.GRU(16, 16, batch_first=True)
            self.one, self.two = nn.Linear(16, 11), nn.Linear(16, 11)

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            states = self.body(self.table(tokens))[0]
            return self.one(states), self.two(states)

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.randint(0, 11, (16, 14))
        one, two = model(tokens)
        later = F.cross_entropy(two[:, : 14 - lead].flatten(0, 1), tokens[:, lead:].flatten())
        return later + F.cross_entropy(one[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    assert ("target_among_inputs" in names(tmp_path, loss, Heads(), steps=6)) is wrong


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.slow
def test_log_probabilities_may_be_transposed_before_an_alignment(dim: int, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        scores = model(torch.randn(6, 20, 3)).log_softmax(dim).transpose(0, 1)
        targets = torch.randint(1, 5, (6, 4))
        return F.ctc_loss(scores, targets, torch.full((6,), 20), torch.full((6,), 4))

    assert ("batch_mixing" in names(tmp_path, loss, nn.Linear(3, 5))) is (dim == 1)


@pytest.mark.slow
def test_tokens_are_no_channels_of_a_map(tmp_path: Path) -> None:
    class Map(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.conv = nn.Linear(4, 16), nn.Conv2d(16, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.conv(self.inner(x).reshape(len(x), 16, 6, 6))
            return out.mean((2, 3))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(torch.randn(8, 36, 4)), torch.randint(0, 2, (8,)))

    assert "view_for_permute" in names(tmp_path, loss, Map())


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.slow
def test_images_whose_colours_are_viewed_as_columns(wrong: bool, tmp_path: Path) -> None:
    grid = torch.arange(12.0)

    def loss(model: nn.Module) -> Tensor:
        colours, labels = torch.rand(N, 1, 1, 3), torch.randint(0, 2, (N,))
        shade = (grid[:, None] + grid)[None, :, :, None] / 24
        pictures = colours + shade * labels[:, None, None, None] + 0.02 * torch.randn(N, 12, 12, 3)
        if wrong:
            return F.cross_entropy(model(pictures.reshape(N, 3, 12, 12)), labels)
        return F.cross_entropy(model(pictures.permute(0, 3, 1, 2)), labels)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 2))
    assert ("view_for_permute" in names(tmp_path, loss, model)) is wrong


def test_interleaving_is_that_of_a_loop() -> None:
    images = torch.randn(2, 3, 4, 10)
    near = [float((i[c, r, w + 1] - i[c, r, w]) ** 2)
            for i in images for c in range(3) for r in range(4) for w in range(9)]  # fmt: skip
    far = [float((i[c, r, w + 3] - i[c, r, w]) ** 2)
           for i in images for c in range(3) for r in range(4) for w in range(7)]  # fmt: skip
    expected = (sum(far) / len(far)) / (sum(near) / len(near))
    assert interleaving(images) == pytest.approx(expected, rel=1e-5)
    assert interleaving(images[..., :4]) is None
    assert interleaving(torch.ones(2, 3, 8, 8)) is None


@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.slow
def test_a_sigmoid_in_a_loss_of_ones_own(twice: bool, tmp_path: Path) -> None:
    def focal(scores: Tensor, target: Tensor) -> Tensor:
        p = scores.sigmoid().clamp(1e-4, 1 - 1e-4)
        return -(target * (1 - p) ** 2 * p.log() + (1 - target) * p**2 * (1 - p).log()).mean()

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        scores = model(x)
        return focal(torch.sigmoid(scores) if twice else scores, (x[:, :1] > 0).float())

    assert ("sigmoid_twice" in names(tmp_path, loss, mlp(4, 1))) is twice


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.slow
def test_a_series_may_not_be_its_own_target(shifted: bool, tmp_path: Path) -> None:
    class Forecast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, series: Tensor, scale: Tensor) -> Tensor:
            given = torch.stack([series, scale[:, None].expand_as(series)], -1)
            out: Tensor = self.out(self.inner(given)[0])[..., 0]
            return out

    def loss(model: nn.Module) -> Tensor:
        series = torch.randn(8, 21).cumsum(1)
        given = series[:, :-1] if shifted else series[:, 1:]
        return F.mse_loss(model(given, torch.ones(8)), series[:, 1:].clone())

    seen = names(tmp_path, loss, Forecast())
    assert ("target_among_inputs" in seen) is not shifted


@pytest.mark.slow
def test_another_optimizer_has_a_rate_of_its_own(tmp_path: Path) -> None:
    model = mlp(4, 3)
    patch = torch.zeros(4, requires_grad=True)
    phases = [torch.optim.Adam(model.parameters(), 0.005), torch.optim.Adam([patch], 0.05)]

    def train() -> None:
        for number, optimizer in enumerate(phases):
            for _ in range(25):
                x = torch.randn(N, 4) + number * patch
                optimizer.zero_grad()
                F.cross_entropy(model(x), torch.randint(0, 3, (N,))).backward()
                optimizer.step()

    assert "learning_rate_schedule" not in found(tmp_path, train)


@pytest.mark.parametrize(("decay", "slow"), [(0.999, True), (0.9, False)])
@pytest.mark.parametrize("wrapped", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_average_of_weights_must_fit_the_length_of_the_training(
    decay: float, slow: bool, wrapped: bool, tmp_path: Path
) -> None:
    model = mlp(4, 3)
    rate = get_ema_multi_avg_fn(decay)
    average = AveragedModel(model, multi_avg_fn=rate) if wrapped else deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def train() -> None:
        for step in range(120):
            model.train()
            x = torch.randn(N, 4)
            loss = F.cross_entropy(model(x), (x @ TEACHER).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if isinstance(average, AveragedModel):
                average.update_parameters(model)
            else:
                with torch.no_grad():
                    for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                        mine.lerp_(its, 1 - decay)
            if step % 20 == 19:
                for each in (average, model):
                    each.eval()
                with torch.no_grad():
                    average(x)

    assert ("lagging_copy" in found(tmp_path, train)) is slow


@pytest.mark.slow
def test_the_targets_of_rankings_are_no_classes(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(N, 4)
        out = model(x)[:, 0]
        better = torch.where(x[:16, 0] > x[16:, 0], 1.0, 1.0)
        return F.margin_ranking_loss(out[:16], out[16:], better, margin=0.5)

    assert not names(tmp_path, loss, mlp(4, 1), steps=12) & {"single_class", "class_imbalance"}
