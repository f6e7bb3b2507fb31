"""Codes that collapse, networks that are overpowered, and inputs that are drowned out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comgra_decl.rules.gradients.vanishing import VanishingGradient
from comgra_decl.rules.structure.branches import BranchIgnored
from comgra_decl.rules.values.collapsing import CollapsingOutput
from tests.rules.tape import Tape
from tests.rules.trainings import by_rule, fit, found, mlp
from tests.support.shortened import shortened

RNG = np.random.default_rng(0)
WAVE = RNG.normal(size=(8, 6))


def code(left: float, *, compared: bool) -> Tape:
    """An output next to others that keeps this share of its magnitude, after five records."""
    tape = Tape()
    mean = tape.slot("VAE", (8, 6), role="output[1]")
    goal = tape.slot("target", (8, 6), kind="target", role="target")
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(mean, loss)], cut=[(goal, loss)] if compared else [])
    for record in range(20):
        tape.record({mean: WAVE * (1 if record < 5 else left), goal: WAVE})
    return tape


@pytest.mark.parametrize("window", [1, 7])
@pytest.mark.parametrize(("left", "found_"), [(0.11, 0), (0.09, 1)])
def test_a_code_that_shrinks_to_a_tenth_has_collapsed(
    left: float, found_: int, window: int
) -> None:
    findings = code(left, compared=False).findings(CollapsingOutput(), window=window)
    assert [f.evidence["share of its initial variation"] for f in findings] == pytest.approx(
        [left] * found_, rel=1e-5
    )
    assert [f.first_step for f in findings] == [5] * found_


def test_a_prediction_may_be_small() -> None:
    assert code(0.09, compared=True).findings(CollapsingOutput()) == []


def autoencoder(prior: float) -> None:
    """A variational autoencoder of two numbers, repeated, with a prior of this weight."""

    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = mlp(8, 16, 4), mlp(2, 16, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            mean, log_var = self.encode(x).chunk(2, 1)
            noise = torch.randn_like(mean)
            return self.decode(mean + noise * (log_var / 2).exp()), mean, log_var

    def loss_of(model: nn.Module) -> torch.Tensor:
        x = torch.randn(32, 2).repeat(1, 4)
        out, mean, log_var = model(x)
        divergence = 0.5 * (mean**2 + log_var.exp() - log_var - 1).sum(1).mean()
        return F.mse_loss(out, x, reduction="sum") / 32 + prior * divergence

    fit(VAE(), loss_of, steps=60)


@pytest.mark.parametrize(
    ("prior", "collapses"), shortened([(100.0, True), (0.1, False)], tried=1, several=True)
)
def test_a_prior_that_is_too_strong_collapses_the_posterior(
    prior: float, collapses: bool, tmp_path: Path
) -> None:
    findings = by_rule(found(tmp_path, lambda: autoencoder(prior)))
    assert ("collapsing_output" in findings) is collapses
    if collapses:
        assert str(findings["collapsing_output"].place) == "VAE output[1]"


def contest(loss: float, gradient: float, *, losses: int = 2) -> Tape:
    """Two networks; the last one's loss falls to this share, as does the first one's gradient."""
    tape = Tape()
    weights = [
        tape.slot(f"{name}.0", (4, 4), role="weight", kind="parameter", pass_="grad")
        for name in ("Generator", "Critic")
    ]
    for record in range(40):
        late = record >= 20
        first = np.full((4, 4), gradient if late else 1.0)
        tape.record({weights[0]: first, weights[1]: np.ones((4, 4))})
    for number in range(losses):
        end = loss if number == losses - 1 else 1.0
        tape.losses([1.0] * 20 + [end] * 20, name=f"loss[{number}]" if number else "loss")
    return tape


@pytest.mark.parametrize("window", [1, 7, 100])
@pytest.mark.parametrize(
    ("loss", "gradient", "found_"), [(0.04, 0.29, 1), (0.06, 0.29, 0), (0.04, 0.31, 0)]
)
def test_a_network_whose_opponent_has_won_learns_nothing(
    loss: float, gradient: float, found_: int, window: int
) -> None:
    findings = contest(loss, gradient).findings(VanishingGradient(), window=window)
    assert [str(f.place) for f in findings] == ["Generator.0 weight (grad)"] * found_
    assert [f.evidence["gradient"] for f in findings] == pytest.approx([gradient] * found_)


def test_a_single_loss_that_is_solved_is_nobodys_victory() -> None:
    assert contest(0.01, 0.01, losses=1).findings(VanishingGradient()) == []


@pytest.mark.slow
def test_a_critic_that_is_too_strong(tmp_path: Path) -> None:
    def training() -> None:
        generator, critic = mlp(4, 8, 4), mlp(4, 16, 1)
        slow = torch.optim.SGD(generator.parameters(), 1e-3)
        fast = torch.optim.Adam(critic.parameters(), 0.05)
        yes, no = torch.ones(16, 1), torch.zeros(16, 1)
        for _ in range(40):
            fake, real = generator(torch.randn(16, 4)), torch.randn(16, 4) + 6
            fast.zero_grad()
            loss = F.binary_cross_entropy_with_logits(critic(fake.detach()), no)
            (loss + F.binary_cross_entropy_with_logits(critic(real), yes)).backward()
            fast.step()
            slow.zero_grad()
            doubt = 1 - critic(generator(torch.randn(16, 4))).sigmoid()
            doubt.clamp_min(1e-9).log().mean().backward()  # saturates where the critic is confident
            slow.step()

    finding = by_rule(found(tmp_path, training))["vanishing_gradient"]
    assert "One of the competing models has won" in finding.message


def embedded(ratio: float, *, records: int = 12, shape: tuple[int, ...] = (1, 5, 6)) -> Tape:
    """A module that receives an embedding of magnitude 1, and positions of another magnitude."""
    tape = Tape()
    embedding = tape.slot("embed", (8, 5, 6))
    positions = tape.slot("Net", shape, role="positions", kind="parameter")
    block = tape.slot("block", (8, 5, 3))
    tape.graph([(embedding, block), (positions, block)])
    for _ in range(records):
        signs = np.sign(RNG.normal(size=(8, 5, 6)))
        tape.record(
            {embedding: signs, positions: np.full(shape, ratio), block: RNG.normal(size=(8, 5, 3))}
        )
    return tape


@pytest.mark.parametrize("window", [1, 7])
@pytest.mark.parametrize(("ratio", "found_"), [(7.9, 0), (8.1, 1)])
def test_positions_eight_times_as_large_drown_what_they_are_added_to(
    ratio: float, found_: int, window: int
) -> None:
    findings = embedded(ratio).findings(BranchIgnored(), window=window)
    assert [str(f.place) for f in findings] == ["embed"] * found_
    assert [f.evidence["ratio"] for f in findings] == pytest.approx([ratio] * found_, rel=1e-5)


def test_positions_that_became_small_drown_nothing() -> None:
    tape = embedded(20.0)
    for row in tape.rows[6:]:
        row[1] = np.ones((1, 5, 6))
    assert tape.findings(BranchIgnored()) == []


@pytest.mark.slow
def test_positions_that_drown_the_embedding_of_a_real_net(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
            self.positions = nn.Parameter(scale * torch.randn(1, 5, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed = self.block(self.embed(x) + self.positions).tanh()
            out: torch.Tensor = self.head(mixed.mean(1))
            return out

    def loss_of(model: nn.Module) -> torch.Tensor:
        x = torch.randn(16, 5, 4)
        y = x.sum((1, 2))
        return F.mse_loss(model(x)[:, 0], y)

    findings = by_rule(found(tmp_path / "a", lambda: fit(Net(30.0), loss_of)))
    assert str(findings["branch_ignored"].place) == "embed"
    small = by_rule(found(tmp_path / "b", lambda: fit(Net(0.02), loss_of)))
    assert "branch_ignored" not in small
