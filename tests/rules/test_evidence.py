"""A question is ticked only if numbers were checked and agree with the tick."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comgra_decl.rules import diagnose, health
from comgra_decl.rules.health import Check
from tests.rules.tape import Tape
from tests.support.shortened import shortened
from tests.support.traced import traced

NODES = {
    "all": {"select": "**", "capture": ["input", "output", "output_grad"]},
    "weights": {"select": "**", "capture": ["parameter", "parameter_grad"]},
}


def answers(root: Path, model: nn.Module, loss_of: Callable[[int], Tensor]) -> dict[str, Check]:
    """Trains a model for 40 steps and returns the checklist, by question."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def training() -> None:
        for step in range(40):
            optimizer.zero_grad()
            loss_of(step).backward()
            optimizer.step()

    found = health(diagnose(traced(root, NODES, training)))
    for check in found:
        assert check.numbers or check.colour not in ("green", "partly")
    return {check.question.text: check for check in found}


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))


def of_classes(model: nn.Module) -> Tensor:
    x = torch.randn(32, 5)
    return F.cross_entropy(model(x), x[:, :3].argmax(1))


def test_nothing_about_values_is_ticked_once_weights_are_not_finite(tmp_path: Path) -> None:
    model = classifier()
    found = answers(tmp_path, model, lambda s: of_classes(model) * (nan if s == 20 else 1))
    for question in (
        "Is the loss steady?",
        "Are update sizes healthy?",
        "Do predictions depend on the input?",
        "Are gradients cleared?",
        "Are units alive?",
        "Are labels predictable from inputs?",
    ):
        assert found[question].colour in ("amber", "unchecked"), question
    assert "20 of 40 losses are NaN or infinite" in found["Is the loss steady?"].numbers


@pytest.mark.slow
def test_questions_about_tensors_that_the_model_lacks_do_not_apply(tmp_path: Path) -> None:
    model = classifier()
    found = answers(tmp_path, model, lambda _: of_classes(model))
    absent = {text for text, check in found.items() if check.colour == "absent"}
    assert absent == {
        "Is half precision sufficient?",
        "Are units unsaturated?",
        "Does every branch contribute?",
        "Is attention spread out?",
    }


class Functional(nn.Module):
    """A model that applies ReLU as a function, so that only its input is recorded."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 16), nn.Linear(16, 3)
        nn.init.constant_(self.a.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(F.relu(self.a(x)))
        return out


@pytest.mark.parametrize(
    ("bias", "colour"), shortened([(-30.0, "unchecked"), (0.0, "green")], tried=1, several=True)
)
def test_units_before_a_functional_rectifier_are_judged_by_gradients_of_biases(
    bias: float, colour: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Functional(bias)
    check = answers(tmp_path, model, lambda _: of_classes(model))["Are units alive?"]
    assert check.colour == colour
    assert "zeros in bias gradients" in check.numbers


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.probs, self.head = nn.Embedding(9, 16), nn.Softmax(-1), nn.Linear(16, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        out: Tensor = self.head(x + self.probs(x @ x.transpose(1, 2) / 4) @ x)
        return out


@pytest.mark.slow
def test_predictions_that_are_flattened_are_judged_before_that(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Attending()

    def loss_of(_: int) -> Tensor:
        tokens = torch.randint(9, (8, 6))
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    found = answers(tmp_path, model, loss_of)
    assert "vary by 0 " not in found["Do predictions depend on the input?"].numbers
    assert found["Do predictions depend on the input?"].colour == "green"
    assert found["Is attention spread out?"].numbers.startswith("spread over ")


def test_the_spread_of_attention_is_that_of_its_rows() -> None:
    """Rows that are uniform over 2 of 8 tokens are spread over 2 tokens."""
    tape = Tape()
    rows = np.zeros((4, 8, 8), np.float32)
    rows[..., :2] = 0.5
    slot = tape.slot("probs", (4, 8, 8))
    for _ in range(6):
        tape.record({slot: rows})
    assert tape.play().readings()["attention"].text == "spread over 2 (probs) tokens"
