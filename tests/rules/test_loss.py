"""Rules about the loss, on losses written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from comgra_decl.rules import Rule
from comgra_decl.rules.curve import BLOCKS, Curve
from comgra_decl.rules.loss.diverging import LossDiverges, NegativeLoss
from comgra_decl.rules.loss.flat import LossNotFalling
from comgra_decl.rules.loss.initial import InitialLoss
from comgra_decl.rules.loss.oscillating import LossOscillates
from comgra_decl.rules.loss.overfit import Overfitting
from comgra_decl.rules.loss.spike import LossSpike
from tests.rules.tape import Tape

NOISE = np.random.default_rng(0).normal(0, 0.05, 400)
FALLING = 2.3 * np.exp(-np.arange(400) / 100) + 0.3 + NOISE


def told(values: object, *, classes: int = 0, function: str = "cross_entropy") -> Tape:
    tape = Tape()
    tape.losses(list(np.asarray(values, float)))
    if classes:
        answer = tape.slot("net", (8, classes))
        target = tape.slot("target", (8,), kind="target", dtype="int64")
        loss = tape.slot("loss", (), kind="loss")
        tape.graph([(answer, loss)], cut=[(target, loss)])
        tape.loss_call(function, answer, target)
        tape.record({answer: np.zeros((8, classes)), target: np.arange(8)})
    return tape


@pytest.mark.parametrize(
    "rule", [LossNotFalling, LossDiverges, LossSpike, LossOscillates, NegativeLoss, InitialLoss]
)
def test_a_loss_that_falls_is_fine(rule: type[Rule]) -> None:
    assert not told(FALLING, classes=14).findings(rule())


def test_a_curve_has_the_means_of_its_values_however_they_come() -> None:
    values = np.random.default_rng(1).normal(size=5 * BLOCKS)
    whole, parts = Curve(), Curve()
    whole.add(np.arange(len(values)), values)
    for i in range(0, len(values), 7):
        parts.add(np.arange(i, min(i + 7, len(values))), values[i : i + 7])
    assert whole.size == parts.size == 4
    assert whole.steps == parts.steps
    np.testing.assert_allclose(whole.means, values.reshape(-1, 4).mean(1))
    np.testing.assert_array_equal(whole.table, parts.table)


@pytest.mark.parametrize("window", [1, 7, 5 * BLOCKS])
def test_all_rules_share_one_curve_of_each_type(window: int) -> None:
    random, tape, alone = np.random.default_rng(2), Tape(), {}
    for type_ in ("train", "eval"):
        values = random.normal(size=3 * BLOCKS)
        values[5] = np.nan
        tape.losses(list(values), type_=type_)
        tape.losses(list(values), name="val_loss", type_=type_)
        alone[type_] = Curve()
        alone[type_].add(np.arange(len(values)), values)
    rules = [LossNotFalling(), LossDiverges(), NegativeLoss()]
    shared = tape.play(*rules, window=window).scene.curves
    assert [*shared] == [*alone]
    for type_, curve in alone.items():
        assert (shared[type_].count, shared[type_].first) == (curve.count, curve.first)
        assert shared[type_].steps == curve.steps
        np.testing.assert_array_equal(shared[type_].table, curve.table)
        assert {id(rule.curves[type_]) for rule in rules} == {id(shared[type_])}


def test_a_loss_that_stays_does_not_fall() -> None:
    (found,) = told(2.3 + NOISE).findings(LossNotFalling())
    assert found.evidence["first"] == pytest.approx(2.3, abs=0.05)


def test_a_loss_that_rises_to_three_times_its_best_diverges_from_there() -> None:
    rising = np.concatenate((FALLING[:100], np.linspace(FALLING[99], 6.0, 300)))
    (found,) = told(rising).findings(LossDiverges())
    assert 80 <= found.first_step <= 120
    (found,) = told([1.0, 0.9, np.nan, 0.8] * 6).findings(LossDiverges())
    assert found.first_step == 2


def test_one_jump_is_one_spike_at_its_step() -> None:
    values = FALLING.copy()
    values[200] = 9.0
    (found,) = told(values).findings(LossSpike())
    assert (found.first_step, found.last_step, found.evidence["spikes"]) == (200, 200, 1)
    assert found.evidence["highest"] == 9.0


def test_a_loss_that_jumps_to_and_fro_oscillates_and_noise_does_not() -> None:
    swing = 1 + 0.5 * (-1.0) ** np.arange(100)
    (found,) = told(np.concatenate((np.ones(50), swing))).findings(LossOscillates())
    assert found.first_step == 50
    assert found.evidence["correlation"] == pytest.approx(-0.98, abs=0.03)
    rng = np.random.default_rng(3)
    assert not told(rng.uniform(0.5, 1.5, 2000)).findings(LossOscillates())


def test_the_first_loss_is_compared_with_guessing() -> None:
    (found,) = told([50.0, 3.0], classes=10).findings(InitialLoss())
    assert found.evidence["guessing"] == pytest.approx(np.log(10))
    assert not told([2.5, 3.0], classes=10).findings(InitialLoss())
    assert not told([50.0, 3.0]).findings(InitialLoss())  # the loss of guessing is unknown


def test_a_likelihood_is_not_negative() -> None:
    falling = 2.3 - 0.1 * np.arange(100)
    (found,) = told(falling, classes=10).findings(NegativeLoss())
    assert found.first_step == 24
    assert not told(falling).findings(NegativeLoss())


@pytest.mark.parametrize("function", ["__getitem__", "gather"])
def test_a_loss_of_actions_may_be_negative(function: str) -> None:
    """A policy gradient, -(log p * advantage), indexes by actions, which are integers."""
    falling = 2.3 - 0.1 * np.arange(100)
    assert not told(falling, classes=10, function=function).findings(NegativeLoss())


def test_a_validation_loss_that_rises_alone_is_overfitting() -> None:
    tape = told(2 * np.exp(-np.arange(100) / 20))
    tape.losses([1.5, 1.0, 0.8, 1.0, 1.1, 1.2, 1.3], name="val_loss", type_="eval")
    (found,) = tape.findings(Overfitting())
    assert (found.first_step, found.evidence["best"]) == (2, 0.8)
    tape.losses([0.7], name="val_loss", type_="eval")
    assert not tape.findings(Overfitting())


@pytest.mark.parametrize("lasts", [False, True])
def test_a_small_jump_that_is_back_at_once_is_no_spike(lasts: bool) -> None:
    """The first ten losses have a median of about 0.4; a quarter of the first loss is 0.28."""
    fall = [1.11 * 0.8**i for i in range(10)]
    low = [1e-4 * (1 + i % 2) for i in range(70)]
    values = [*fall, *low, 0.137, *([0.13] if lasts else []), *low]
    assert len(told(values).findings(LossSpike())) == lasts
