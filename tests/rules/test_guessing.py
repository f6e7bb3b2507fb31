"""The loss of guessing, computed by hand: the entropy of the labels, and losses close to it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from comgra_decl.rules.loss.guessing import NoBetterThanGuessing
from tests.rules.tape import Tape

RNG = np.random.default_rng(8)
LABELS = np.array([0] * 8 + [1] * 4 + [2] * 2 + [3] * 2)  # 1/2, 1/4, 1/8, 1/8
ENTROPY = 1.75 * np.log(2)  # 1/2 * 1 + 1/4 * 2 + 2 * 1/8 * 3 bits
FIRST = float(np.log(4))


def training(losses: NDArray[np.float64], validation: list[float], records: int = 15) -> Tape:
    tape = Tape()
    said = tape.slot("net", (16, 4))
    goal = tape.slot("target", (16,), kind="target", role="target", dtype="int64")
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(said, loss)], cut=[(goal, loss)])
    for _ in range(records):
        tape.record({said: RNG.normal(size=(16, 4)), goal: LABELS, loss: 1.0})
    tape.losses(losses.tolist())
    tape.losses(validation, name="val_loss", type_="eval")
    return tape


def towards(end: float, count: int = 200) -> NDArray[np.float64]:
    """Losses that fall from a beginner's to `end` within a few steps, with noise."""
    way = np.exp(-np.arange(count) / 8)
    noise = np.random.default_rng(8).normal(0, 0.02, count)  # whichever test runs first
    return end + (FIRST - end) * way + noise


@pytest.mark.parametrize(
    ("end", "found"), [(1.0, 1), (0.98, 1), (0.96, 0), (0.5, 0), (1.08, 1), (1.12, 0)]
)
def test_a_loss_that_stays_at_the_entropy_of_the_labels(end: float, found: int) -> None:
    findings = training(towards(end * ENTROPY), []).findings(NoBetterThanGuessing())
    assert len(findings) == found
    for finding in findings:
        assert finding.evidence["guessing"] == pytest.approx(ENTROPY)
        assert finding.evidence["loss"] == pytest.approx(end * ENTROPY, rel=0.01)


def test_a_loss_that_is_on_its_way_may_pass_there() -> None:
    falling = np.linspace(FIRST, 0.98 * ENTROPY, 200)
    assert not training(falling, []).findings(NoBetterThanGuessing())


@pytest.mark.parametrize(
    ("train", "validation", "found"),
    [
        (0.3, [1.4, 1.25, 1.6, 2.0], 1),  # never below 1.213
        (0.3, [1.4, 1.1, 1.6, 2.0], 0),  # there was something to learn
        (0.3, [1.4, 1.25], 0),  # too few
        (0.9 * ENTROPY, [1.4, 1.25, 1.6, 2.0], 0),  # hardly anything was learned
    ],
)
def test_what_is_learned_by_heart_does_not_carry_over(
    train: float, validation: list[float], found: int
) -> None:
    findings = training(towards(train), validation).findings(NoBetterThanGuessing())
    assert [f.first_step for f in findings] == [1] * found


def test_another_loss_is_not_compared_with_an_entropy() -> None:
    assert not training(towards(ENTROPY) * 3, []).findings(NoBetterThanGuessing())
    assert not training(towards(ENTROPY), [], records=12).findings(NoBetterThanGuessing())
