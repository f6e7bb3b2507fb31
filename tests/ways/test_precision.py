"""Mixed precision: values in the dtype in which they were computed, gradients unscaled."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.support.shortened import shortened
from tests.ways.models import Net, batches
from tests.ways.proof import Outcome, Told, outcome, prove


def test_autocast_to_bfloat16() -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for x, y in batches(4):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(x)
                loss = F.cross_entropy(output, y)
            assert output.dtype is torch.bfloat16
            told("head", output)
            told.gradient("head", output)
            optimizer.zero_grad()
            loss.backward()
            told.parameters(model)
            optimizer.step()
            told.end()
            losses.append(loss.item())
        return outcome(losses, model, optimizers=[optimizer])

    prove(training)


def test_a_model_in_bfloat16_throughout() -> None:
    def training(told: Told) -> Outcome:
        model = Net().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x, y in batches(4):
            output = model(x.bfloat16())
            told("head", output)
            loss = F.cross_entropy(output.float(), y)
            optimizer.zero_grad()
            loss.backward()
            told.parameters(model)
            told("stem", model.stem.weight, "weight")
            optimizer.step()
            told.end()
            losses.append(loss.item())
        return outcome(losses, model)

    prove(training)


def scaled(
    told: Told, *, unscale: bool, overflows: tuple[int, ...], fused: bool = False
) -> Outcome:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    losses = []
    for number, (x, y) in enumerate(batches(6)):
        before = model.head.weight.detach().clone()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            loss = F.cross_entropy(output, y)
        if number in overflows:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        told.parameters(model, "grad:raw")
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            told.parameters(model)
        scaler.step(optimizer)
        if not unscale and not fused:
            told.parameters(model)
        if number not in overflows:
            told("head", model.head.weight.detach() - before, "weight", pass_="update")
        told.end()
        scaler.update()
        losses += [loss.item(), scaler.get_scale()]
    return outcome(losses, model, optimizers=[optimizer])


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("fused", shortened([True, False], tried=1))
def test_a_gradient_scale(unscale: bool, fused: bool) -> None:
    prove(lambda told: scaled(told, unscale=unscale, overflows=(), fused=fused))


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("overflows", shortened([(0, 1), (2,), (5,)], tried=1))
def test_a_step_that_is_skipped_because_of_an_overflow_is_a_step(
    unscale: bool, overflows: tuple[int, ...]
) -> None:
    """The optimizer does not step, but the gradients that overflowed are recorded."""
    traced = prove(lambda told: scaled(told, unscale=unscale, overflows=overflows))
    assert [s.info.step for s in traced.steps] == [*range(6)]
