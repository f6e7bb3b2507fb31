"""Losses whose structure reveals a mistake: signs, sides with gradients, and stale gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from comgra_decl.hooks.tensors.objective import objective_of
from comgra_decl.rules.gradients.clearing import ClearedGradient, StaleGradient
from comgra_decl.rules.loss.bootstrapped import GradientOfTarget, LargestAsPrediction
from comgra_decl.rules.loss.objective import NoStopGradient, WrongLogScale
from tests.rules.programs import BATCH, Tensor, findings, train

Loss = Callable[[nn.Module], Tensor]


def net(out: int, inner: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, inner), nn.Tanh(), nn.Linear(inner, out))


def trained(loss_of: Loss, out: int = 4) -> Callable[[], None]:
    return lambda: train(net(out), loss_of)


# -- scales --------------------------------------------------------------------------------------


def flow(sign: float) -> Loss:
    def loss_of(model: nn.Module) -> Tensor:
        x, condition = torch.randn(BATCH, 2), torch.randn(BATCH, 4)
        s, t = model(condition).chunk(2, 1)
        s = 2 * torch.tanh(s)
        z = x * torch.exp(s) + t
        log_p = -0.5 * (z**2).sum(1) - math.log(2 * math.pi)
        return -(log_p + sign * s.sum(1)).mean()

    return loss_of


def autoencoder(sign: float) -> Loss:
    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(BATCH, 4)
        mu, logvar = model(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return F.mse_loss(z, x[:, :2], reduction="sum") + sign * kl

    return loss_of


def gaussian(sign: float) -> Loss:
    def loss_of(model: nn.Module) -> Tensor:
        mu, raw = model(torch.randn(BATCH, 4)).chunk(2, 1)
        sigma = F.softplus(raw) + 0.1
        return (0.5 * ((torch.randn(BATCH, 2) - mu) / sigma) ** 2 + sign * sigma.log()).mean()

    return loss_of


def distribution(model: nn.Module) -> Tensor:
    mu, log_sigma = model(torch.randn(BATCH, 4)).chunk(2, 1)
    return -torch.distributions.Normal(mu, log_sigma.exp()).log_prob(torch.randn(BATCH, 2)).mean()


def sampled(model: nn.Module) -> Tensor:
    """The log-probability of a sample, whose scale multiplies noise and divides it again."""
    mu, log_sigma = model(torch.randn(BATCH, 4)).chunk(2, 1)
    policy = torch.distributions.Normal(mu, log_sigma.exp())
    action = policy.rsample()
    return (0.2 * policy.log_prob(action) + action.square()).mean()


@pytest.mark.parametrize("kind", [flow, autoencoder, gaussian])
def test_a_log_scale_of_the_wrong_sign_is_found(kind: Callable[[float], Loss]) -> None:
    assert len(findings(WrongLogScale(), trained(kind(-1)))) == 1
    assert not findings(WrongLogScale(), trained(kind(1)))


def clipped(model: nn.Module) -> Tensor:
    """The loss of PPO: its entropy pushes a log-scale that its probabilities divide by."""
    mu, log_sigma = model(torch.randn(BATCH, 4)).chunk(2, 1)
    policy = torch.distributions.Normal(mu, log_sigma.exp())
    ratio = torch.exp(policy.log_prob(torch.randn(BATCH, 2)).sum(1) - torch.randn(BATCH))
    gain = torch.randn(BATCH)
    surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return -surrogate.mean() - 0.01 * policy.entropy().mean()


@pytest.mark.parametrize("loss_of", [distribution, sampled, clipped])
def test_likelihoods_of_distributions_have_the_right_sign(loss_of: Loss) -> None:
    assert not findings(WrongLogScale(), trained(loss_of))


def test_scales_are_counted_by_hand() -> None:
    """(exp(w) x)^2 + w falls with w twice; in (exp(w) x)^2 - w and (x / exp(w))^2 + w, once."""
    x = torch.tensor([1.0, -2.0, 3.0])
    for of, direction, term in (
        (torch.mul, "along", 1),
        (torch.mul, "against", -1),
        (torch.div, "against", 1),
        (torch.div, "along", -1),
    ):
        w = torch.zeros(3, requires_grad=True)
        loss = of(x, w.exp()).square().sum() + (term * w).sum()
        assert objective_of(loss) == {direction: 1, "others": 2}
        assert objective_of(3 * loss.mean() / 2) == {direction: 1, "others": 2}
        assert objective_of(loss - (2 * term * w).sum()) == {"others": 2}  # of both signs


def test_a_checkpointed_part_is_not_computed_for_it() -> None:
    """Unpacking what a checkpoint saved would run its part a third time, or more."""
    runs = 0

    def scaled(s: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return torch.ones(BATCH, 2) * torch.exp(s * torch.tensor([1.0, 2.0])) + s

    def loss_of(model: nn.Module) -> Tensor:
        s = model(torch.randn(BATCH, 4))
        return (torch.utils.checkpoint.checkpoint(scaled, s, use_reentrant=False) + s).sum()

    findings(WrongLogScale(), trained(loss_of, 2))
    assert runs == 3 * 2  # forward and backward, in three steps


# -- pairs ---------------------------------------------------------------------------------------


class Twins(nn.Module):
    """An encoder and a predictor, as in SimSiam."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = net(4), net(4)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        za, zb = self.encoder(a), self.encoder(b)
        return self.predictor(za), self.predictor(zb), za, zb


def twins(
    compare: Callable[[Tensor, Tensor], Tensor], *, beside: bool = False
) -> Callable[[], None]:
    def loss_of(model: nn.Module) -> Tensor:
        pa, pb, za, zb = model(torch.randn(BATCH, 4), torch.randn(BATCH, 4))
        loss = 0.5 * (compare(pa, zb) + compare(pb, za))
        if beside:  # as in VICReg: the spread of each unit
            loss = loss + F.relu(1 - za.std(0)).mean() + F.relu(1 - zb.std(0)).mean()
        return loss

    return lambda: train(Twins(), loss_of)


def cosine(p: Tensor, z: Tensor) -> Tensor:
    return -F.cosine_similarity(p, z, dim=-1).mean()


def normalized(p: Tensor, z: Tensor) -> Tensor:
    return (2 - 2 * (F.normalize(p, dim=-1) * F.normalize(z, dim=-1)).sum(-1)).mean()


def contrasted(a: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(a @ b.T, torch.arange(BATCH))


def triplet(model: nn.Module) -> Tensor:
    a, b, c = (model(torch.randn(BATCH, 4)) for _ in range(3))
    return F.triplet_margin_loss(a, b, c)


def focal(model: nn.Module) -> Tensor:
    cost = F.cross_entropy(
        model(torch.randn(BATCH, 4)), torch.randint(4, (BATCH,)), reduction="none"
    )
    return ((1 - torch.exp(-cost)) ** 2 * cost).mean()


@pytest.mark.parametrize("compare", [cosine, normalized, F.mse_loss])
def test_pairs_whose_sides_both_carry_gradients_can_collapse(
    compare: Callable[[Tensor, Tensor], Tensor],
) -> None:
    (found,) = findings(NoStopGradient(), twins(compare))
    assert found.evidence == {"pairs": 2, "with a predictor": 2}


@pytest.mark.parametrize(
    "program",
    [
        twins(lambda p, z: cosine(p, z.detach())),
        twins(F.mse_loss, beside=True),
        twins(contrasted),
        trained(triplet),
        trained(focal),
        trained(lambda model: F.mse_loss(model(torch.randn(BATCH, 4)), torch.randn(BATCH, 4))),
        trained(lambda model: (model(torch.randn(BATCH, 4)) ** 2).mean()),
    ],
    ids=["detached", "variance", "contrastive", "triplet", "focal", "regression", "norm"],
)
def test_pairs_with_other_terms_cannot(program: Callable[[], None]) -> None:
    assert not findings(NoStopGradient(), program)


# -- bootstrapped targets --------------------------------------------------------------------------


def critic(detach: str) -> Loss:
    def loss_of(model: nn.Module) -> Tensor:
        value, following = (model(torch.randn(BATCH, 4)).squeeze(1) for _ in range(2))
        target = torch.randn(BATCH) + 0.9 * torch.ones(BATCH) * following
        if detach == "target":
            target = target.detach()
        if detach == "prediction":
            value = value.detach()
        return F.mse_loss(value, target)

    return loss_of


def by_hand(model: nn.Module) -> Tensor:
    value, following = (model(torch.randn(BATCH, 4)).squeeze(1) for _ in range(2))
    return (torch.randn(BATCH) + 0.9 * following - value).pow(2).mean()


@pytest.mark.parametrize(
    ("loss_of", "severity"),
    [(critic("neither"), "warning"), (by_hand, "warning"), (critic("prediction"), "error")],
)
def test_a_bootstrapped_target_with_a_gradient_is_found(loss_of: Loss, severity: str) -> None:
    (found,) = findings(GradientOfTarget(), trained(loss_of, 1))
    assert found.severity == severity


def step_of_euler(model: nn.Module) -> Tensor:
    """A prediction that is data plus a multiple of an output, given as the second argument."""
    x = torch.randn(BATCH, 4)
    return F.mse_loss(torch.randn(BATCH, 4), x + 0.1 * model(x))


def codebook(model: nn.Module) -> Tensor:
    """The losses of a vector-quantized autoencoder, each of which detaches one side."""
    z = model(torch.randn(BATCH, 4))
    code = model(torch.randn(BATCH, 4))
    return F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(code.detach(), z)


@pytest.mark.parametrize("loss_of", [step_of_euler, codebook])
def test_other_targets_with_gradients_are_not(loss_of: Loss) -> None:
    assert not findings(GradientOfTarget(), trained(loss_of))


def test_a_detached_bootstrapped_target_is_right() -> None:
    assert not findings(GradientOfTarget(), trained(critic("target"), 1))


def q_learning(choose: Callable[[Tensor], Tensor], *, copy: bool = True) -> Callable[[], None]:
    def program() -> None:
        target = net(3)

        def loss_of(model: nn.Module) -> Tensor:
            value = torch.randn(BATCH)
            if copy:
                with torch.no_grad():
                    value = value + 0.9 * target(torch.randn(BATCH, 4)).max(1).values
            return F.smooth_l1_loss(choose(model(torch.randn(BATCH, 4))), value)

        train(net(3), loss_of)

    return program


def taken(q: Tensor) -> Tensor:
    return q.gather(1, torch.randint(3, (BATCH, 1))).squeeze(1)


def test_the_maximum_in_place_of_the_action_taken_is_found() -> None:
    for largest in (lambda q: q.max(1).values, lambda q: q.amax(1), lambda q: q.max(1)[0]):
        assert len(findings(LargestAsPrediction(), q_learning(largest))) == 1
    assert not findings(LargestAsPrediction(), q_learning(taken))
    assert not findings(LargestAsPrediction(), q_learning(lambda q: q.mean(1)))
    bags = q_learning(lambda q: q.max(1).values, copy=False)  # of instances, each with a target
    assert not findings(LargestAsPrediction(), bags)


# -- old gradients -------------------------------------------------------------------------------


def adversaries(*, clear_d: bool = True, clear_g: bool = True) -> Callable[[], None]:
    def program() -> None:
        g, d = net(4), net(1)
        of_g, of_d = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (g, d))
        for _ in range(3):
            fake = g(torch.randn(BATCH, 4))
            if clear_d:
                of_d.zero_grad()
            (d(fake.detach()).mean() - d(torch.randn(BATCH, 4)).mean()).backward()
            of_d.step()
            if clear_g:
                of_g.zero_grad()
            (-d(fake).mean()).backward()
            of_g.step()

    return program


def accumulating(every: int, *, clear: bool = True) -> Callable[[], None]:
    def program() -> None:
        model = net(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in range(4 * every):
            model(torch.randn(BATCH, 4)).square().mean().backward()
            if batch % every == every - 1:
                optimizer.step()
                if clear:
                    optimizer.zero_grad(set_to_none=False)

    return program


def two_losses() -> None:
    """Two optimizers for two parts, which step after two backward passes."""
    body, head = net(4), net(4)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (body, head)]
    for _ in range(3):
        out = head(body(torch.randn(BATCH, 4)))
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "program",
    [adversaries(clear_d=False), adversaries(clear_g=False), accumulating(1, clear=False)],
)
def test_gradients_from_before_the_previous_step_are_found(program: Callable[[], None]) -> None:
    (found,) = findings(StaleGradient(), program)
    assert (found.severity, found.first_step) == ("error", 1)


@pytest.mark.parametrize("program", [adversaries(), accumulating(1), accumulating(3), two_losses])
def test_gradients_that_accumulate_within_a_step_are_not(program: Callable[[], None]) -> None:
    assert not findings(StaleGradient(), program)


# -- gradients that are cleared too early ----------------------------------------------------------


def clearing(when: str, *, set_to_none: bool = True) -> Callable[[], None]:
    def program() -> None:
        model = net(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            loss = model(torch.randn(BATCH, 4)).square().mean()
            if when == "before backward":
                optimizer.zero_grad(set_to_none=set_to_none)
            loss.backward()
            if when == "before the step":
                optimizer.zero_grad(set_to_none=set_to_none)
            elif when == "by the model":
                model.zero_grad(set_to_none=set_to_none)
            optimizer.step()

    return program


def in_backward() -> None:
    """The optimizer steps and clears the gradient of each parameter as soon as it is there."""
    model = net(4)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01)

        def step(_: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(4):
        model(torch.randn(BATCH, 4)).square().mean().backward()


def without_effect() -> None:
    """A loss whose gradient is zero."""
    train(net(4), lambda model: model(torch.randn(BATCH, 4)).clamp(7, 8).mean())


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["before the step", "by the model"])
def test_gradients_that_are_cleared_before_the_step_are_found(when: str, set_to_none: bool) -> None:
    (found,) = findings(ClearedGradient(), clearing(when, set_to_none=set_to_none))
    assert found.severity == "error"
    assert found.message.startswith("SGD steps without gradients")


@pytest.mark.parametrize(
    "program",
    [
        clearing("before backward"),
        clearing("before backward", set_to_none=False),
        adversaries(),
        accumulating(3),
        two_losses,
        in_backward,
        without_effect,
    ],
)
def test_gradients_that_optimizers_use_are_not_cleared(program: Callable[[], None]) -> None:
    assert not findings(ClearedGradient(), program)
