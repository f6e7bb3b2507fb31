"""A loss is judged by the tensors that its call receives, whatever happened to them before."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.rules.trainings import (
    BATCH,
    alarms,
    by_rule,
    classification,
    fit,
    found,
    mlp,
    regression,
)
from tests.support.shortened import shortened

Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SAME_SHAPE: dict[str, Form] = {
    "squeeze": lambda p, y: F.mse_loss(p.squeeze(-1), y),
    "view": lambda p, y: F.mse_loss(p.view(-1), y),
    "index": lambda p, y: F.mse_loss(p[:, 0], y),
    "target unsqueezed": lambda p, y: F.mse_loss(p, y[:, None]),
    "by hand": lambda p, y: (p.squeeze() - y).pow(2).mean(),
    "binary, logits": lambda p, y: F.binary_cross_entropy_with_logits(p[:, 0], (y > 0).float()),
    "binary": lambda p, y: F.binary_cross_entropy(p.sigmoid().squeeze(), (y > 0).float()),
}


@pytest.mark.parametrize("form", shortened(SAME_SHAPE, tried=3))
def test_shapes_made_the_same_before_the_loss_do_not_broadcast(form: str, tmp_path: Path) -> None:
    assert alarms(found(tmp_path, lambda: fit(mlp(4, 8, 1), regression(SAME_SHAPE[form])))) == []


BROADCAST: dict[str, Form] = {
    "function": lambda p, y: F.mse_loss(p, y),
    "by hand": lambda p, y: (p - y).abs().mean(),
    "target": lambda p, y: F.l1_loss(p.squeeze(), y[:, None]),
    "after choosing": lambda p, y: F.smooth_l1_loss(p.gather(1, torch.zeros(BATCH, 1).long()), y),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("form", shortened(BROADCAST, tried=2))
def test_each_prediction_compared_with_each_target_is_an_error(form: str, tmp_path: Path) -> None:
    findings = found(tmp_path, lambda: fit(mlp(4, 8, 1), regression(BROADCAST[form])))
    assert (findings[0].rule, findings[0].severity) == ("silent_broadcasting", "error")
    assert findings[0].evidence["result"] == "[16, 16]"
    assert (findings[0].first_step, findings[0].last_step) == (0, 19)


def pixels(model: nn.Module) -> torch.Tensor:
    """A mask for each of 36 pixels, compared by a loss on logits."""
    x = torch.randn(8, 3, 6, 6)
    mask = (x.sum(1) > 0).float()
    return F.binary_cross_entropy_with_logits(model(x)[:, 0], mask)


def tokens(model: nn.Module) -> torch.Tensor:
    """One of five classes for each of six tokens."""
    x = torch.randn(8, 6, 4)
    y = (x[..., 0] > 0).long()
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def conv(*end: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 1, 3, padding=1), *end)


@pytest.mark.parametrize("twice", [True, False])
def test_a_sigmoid_before_a_loss_of_logits(twice: bool, tmp_path: Path) -> None:
    model = conv(nn.Sigmoid()) if twice else conv()
    findings = found(tmp_path, lambda: fit(model, pixels))
    if twice:
        assert (findings[0].rule, findings[0].severity) == ("sigmoid_twice", "error")
    else:
        assert alarms(findings) == []


@pytest.mark.parametrize("twice", [True, False])
def test_a_softmax_before_a_loss_of_logits_of_tokens(twice: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5), *[nn.Softmax(-1)] * twice)
    findings = found(tmp_path, lambda: fit(model, tokens))
    if twice:
        assert (findings[0].rule, findings[0].severity) == ("probabilities_as_logits", "error")
        assert "below 0.905" in findings[0].message  # ln(1 + 4 / e)
    else:
        assert alarms(findings) == []


def nll_of_tokens(model: nn.Module) -> torch.Tensor:
    x = torch.randn(8, 6, 4)
    y = (x[..., 0] > 0).long()
    return F.nll_loss(model(x).transpose(1, 2), y)


LOGARITHMS: dict[str, Callable[[], None]] = {
    "log-softmax": lambda: fit(mlp(4, 8, 3, nn.LogSoftmax(-1)), classification(F.nll_loss)),
    "softmax, then the logarithm, as skorch does": lambda: fit(
        mlp(4, 8, 3, nn.Softmax(-1)),
        classification(lambda p, y: nn.NLLLoss()(torch.log(p + 1e-8), y)),
    ),
    "log-softmax of tokens, turned": lambda: fit(mlp(4, 8, 3, nn.LogSoftmax(-1)), nll_of_tokens),
}


@pytest.mark.parametrize("form", shortened(LOGARITHMS, tried=1))
def test_logarithms_of_probabilities_are_right_for_a_likelihood(form: str, tmp_path: Path) -> None:
    assert alarms(found(tmp_path, LOGARITHMS[form])) == []


def test_a_likelihood_of_logits_is_an_error(tmp_path: Path) -> None:
    findings = found(tmp_path, lambda: fit(mlp(4, 8, 3), classification(F.nll_loss)))
    assert (findings[0].rule, findings[0].severity) == ("logits_as_log_probabilities", "error")


def ctc(model: nn.Module) -> torch.Tensor:
    lengths = torch.full((4,), 3)
    targets = torch.randint(1, 3, (4, 3))
    output = model(torch.randn(8, 4, 4))  # [times, samples, symbols]
    return F.ctc_loss(output, targets, torch.full((4,), 8), lengths)


@pytest.mark.parametrize(
    ("end", "reported"),
    shortened(
        [(nn.LogSoftmax(-1), False), (nn.Softmax(-1), True), (nn.ReLU(), True)],
        tried=2,
        several=True,
    ),
)
def test_ctc_expects_logarithms_of_probabilities(
    end: nn.Module, reported: bool, tmp_path: Path
) -> None:
    findings = found(tmp_path, lambda: fit(mlp(4, 8, 3, end), ctc))
    assert ("logits_as_log_probabilities" in by_rule(findings)) is reported


@pytest.mark.parametrize(
    ("labels", "reported"),
    shortened(
        [
            (lambda: (torch.rand(16, 3) < 0.5).float(), True),
            (lambda: F.one_hot(torch.randint(0, 3, (16,)), 3).float(), False),
            (lambda: torch.softmax(torch.randn(16, 3), -1), False),
            (lambda: 0.9 * F.one_hot(torch.randint(0, 3, (16,)), 3).float() + 0.1 / 3, False),
        ],
        tried=2,
        several=True,
    ),
    ids=["several labels", "one label", "soft labels", "smoothed labels"],
)
def test_a_cross_entropy_of_samples_with_several_labels(
    labels: Any, reported: bool, tmp_path: Path
) -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(torch.randn(16, 4)), labels())

    findings = found(tmp_path, lambda: fit(mlp(4, 8, 3), loss))
    assert ("several_labels" in by_rule(findings)) is reported


@pytest.mark.parametrize(
    ("end", "form", "severity"),
    shortened(
        [
            (nn.LogSoftmax(0), F.nll_loss, "error"),
            (nn.Softmax(0), lambda p, y: F.nll_loss(p.log(), y), "warning"),
        ],
        tried=1,
        several=True,
    ),
)
def test_a_softmax_over_the_batch_mixes_samples(
    end: nn.Module, form: Any, severity: str, tmp_path: Path
) -> None:
    findings = found(tmp_path, lambda: fit(mlp(4, 8, 3, end), classification(form)))
    assert by_rule(findings)["batch_mixing"].severity == severity
    assert findings[0].rule == "batch_mixing"


def test_logits_whose_first_loss_happens_to_be_that_of_guessing_in_the_batch(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, 4), torch.randint(0, 3, (BATCH,))
    model = nn.Linear(4, 3)
    scales = torch.linspace(0, 30, 3000)[1:]
    with torch.no_grad():
        losses = torch.stack([F.cross_entropy(s * model(x), y) for s in scales])
        scale = scales[(losses - math.log(BATCH)).abs().argmin()]
        model.weight.mul_(scale)
        model.bias.mul_(scale)
        assert F.cross_entropy(model(x), y).item() == pytest.approx(math.log(BATCH), rel=0.01)
    rules = by_rule(found(tmp_path, lambda: fit(model, lambda m: F.cross_entropy(m(x), y))))
    assert "batch_mixing" not in rules


def contrast(model: nn.Module) -> torch.Tensor:
    """Each sample is its own class, as in contrastive learning."""
    x = torch.randn(BATCH, 4)
    a, b = (F.normalize(model(x + 0.1 * torch.randn(BATCH, 4))) for _ in range(2))
    y = torch.arange(BATCH)
    return F.cross_entropy(a @ b.T / 0.2, y)


def test_samples_that_are_their_own_classes_are_no_classes_of_the_data(tmp_path: Path) -> None:
    rules = by_rule(found(tmp_path, lambda: fit(mlp(4, 8, 6), contrast, steps=40)))
    assert not {"class_imbalance", "single_class", "one_answer", "initial_loss"} & set(rules)


def surprise(model: nn.Module) -> torch.Tensor:
    """A policy gradient whose advantages are all negative, so the loss is negative, too."""
    state = torch.randn(BATCH, 4)
    log_p = model(state).log_softmax(1)
    action = log_p.detach().exp().multinomial(1)
    return (log_p.gather(1, action).squeeze(1) * (state[:, 0].abs() + 0.5)).mean()


def test_a_policy_gradient_may_be_negative(tmp_path: Path) -> None:
    assert "negative_loss" not in by_rule(found(tmp_path, lambda: fit(mlp(4, 8, 3), surprise)))


class Mixture(nn.Module):
    """Four experts that a router weights, for six classes."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(4, 4), nn.Linear(8, 6)
        self.experts = nn.ModuleList(nn.Linear(4, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = self.router(x).softmax(1)
        parts = [share[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)]
        return self.head(torch.stack(parts).sum(0).tanh()), share


def balanced(model: nn.Module) -> torch.Tensor:
    x = torch.randn(BATCH, 4)
    y = ((2 * x[:, 0]).long() + 2).clamp(0, 5)
    out, share = model(x)
    load = F.one_hot(share.argmax(1), 4).float().mean(0)
    return F.cross_entropy(out, y) + 0.1 * (load * share.mean(0)).sum()


def test_a_router_is_not_the_answer(tmp_path: Path) -> None:
    assert alarms(found(tmp_path, lambda: fit(Mixture(), balanced))) == []
