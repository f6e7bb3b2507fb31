"""Where a bug began, in recorded training runs with a known origin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import comgra_decl as comgra
from comgra_decl.rules import Diagnosis, Finding, diagnose

Change = Callable[[int, nn.Module], None]


def nothing(step: int, model: nn.Module) -> None:
    """Changes nothing."""


def trained(root: Path, model: nn.Module, x: Callable[[int], Tensor], change: Change) -> Diagnosis:
    """Twenty recorded steps; `change` runs before each of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with comgra.trace("debug", root=root, overrides=["schedule.first=100"]) as session:
        for step in range(20):
            change(step, model)
            optimizer.zero_grad()
            given = x(step)
            answer = model(given)
            nn.functional.mse_loss(answer, given.flatten(1)[:, : answer.shape[1]]).backward()
            optimizer.step()
    assert session.path is not None
    return diagnose(comgra.open_run(session.path))


def first(diagnosis: Diagnosis, rule: str) -> Finding:
    (found,) = [finding for finding in diagnosis.findings if finding.rule == rule]
    assert found.because is None
    return found


def chain(finding: Finding) -> list[str]:
    return [str(link.place) for link in finding.chain]


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Loop(nn.Module):
    """Runs the same modules four times; a sample may make the third run take log(0)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.log, self.last = nn.Linear(4, 4), Log(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, :4]
        for turn in range(4):
            state = torch.sigmoid(self.cell(state))
            state = state * (x[:, 4:] != turn)
            state = -0.1 * self.log(state + (x[:, 4:] == turn) * (turn != 2))
        out: Tensor = self.last(state)
        return out


def looped(step: int) -> Tensor:
    """Five numbers for each of eight samples; the last one says in which pass a zero appears."""
    x = torch.rand(8, 5, generator=torch.Generator().manual_seed(step))
    x[:, 4] = 9.0
    if step == 12:
        x[5, 4] = 2.0
    return x


def test_an_infinity_is_found_at_its_tensor_sample_iteration_and_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = first(trained(tmp_path, Loop(), looped, nothing), "nonfinite")
    assert (str(found.place), found.first_step, found.sample) == ("log, iteration 2", 12, 5)
    assert chain(found) == []  # the inputs were finite, and what comes later is not a cause
    assert "loss_diverges" not in found.rule


def images(step: int) -> Tensor:
    return torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(step))


def test_a_dead_rectifier_began_at_the_bias_before_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (2, 6, 6, 6):
        layers += [nn.Conv2d(channels, 6, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))
    with torch.no_grad():
        layers[4].bias.fill_(-100)  # type: ignore[operator]
    diagnosis = trained(tmp_path, model, images, nothing)
    assert chain(first(diagnosis, "dead_units")) == ["4 bias", "4", "5"]
    explained = {finding.rule for finding in diagnosis.findings if finding.because is not None}
    assert explained >= {"untrained_parameter", "all_zero"}


def numbers(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def blown_up(step: int, model: nn.Module) -> None:
    """Before step 9, one weight becomes a thousand times as large."""
    if step == 9:
        with torch.no_grad():
            model.get_parameter("4.weight").mul_(1000)


@pytest.mark.slow
def test_activations_that_blow_up_follow_from_the_weight_that_did(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(6, 6), nn.GELU())]
    diagnosis = trained(tmp_path, nn.Sequential(*layers, nn.Linear(6, 2)), numbers, blown_up)
    found = {finding.rule: finding for finding in diagnosis.findings}
    grown = found["growing_weight"]
    assert (str(grown.place), grown.first_step) == ("4 weight", 9)
    drift = found["activation_drift"]
    assert (drift.because, drift.first_step) == ("growing_weight", 9)
    assert chain(drift) == ["4 weight", "4"]


@pytest.mark.parametrize("cut", [True, False])
def test_a_gradient_dies_where_it_is_made_small(tmp_path: Path, cut: bool) -> None:
    class Faint(nn.Module):
        """Passes its values on unchanged, and almost none of their gradient."""

        def forward(self, x: Tensor) -> Tensor:
            return x.detach() + 1e-6 * (x - x.detach()) if cut else x

    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, 6) for _ in range(6)]
    diagnosis = trained(
        tmp_path, nn.Sequential(*layers[:3], Faint(), *layers[3:]), numbers, nothing
    )
    vanished = [f for f in diagnosis.findings if f.rule == "vanishing_gradient"]
    assert [str(f.place) for f in vanished] == ["2 (grad)"] * cut
