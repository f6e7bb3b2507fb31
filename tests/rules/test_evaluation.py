"""Networks that are others in evaluation, and trainings that stay in it, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from comgra_decl.rules.data.evaluation import EvaluationGap
from comgra_decl.rules.structure.evaluation_mode import TrainingInEvaluationMode
from tests.rules.tape import Tape

RNG = np.random.default_rng(5)
WAVE = RNG.normal(size=(4, 10))


def phases(sizes: Sequence[tuple[str, float]]) -> Tape:
    """One tensor of these sizes in these modes."""
    tape = Tape()
    slot = tape.slot("bn", (4, 10))
    for step, (mode, size) in enumerate(sizes):
        tape.record({slot: size * WAVE}, step=step, mode=mode)
    return tape


@pytest.mark.parametrize("window", [1, 2, 3, 100])
def test_an_evaluation_is_compared_with_its_neighbours_wherever_windows_end(window: int) -> None:
    growing = [pair for k in range(6) for pair in (("train", 2.0**k), ("eval", 2.0**k))]
    assert not phases(growing).findings(EvaluationGap(), window=window)
    apart = [pair for k in range(6) for pair in (("train", 2.0**k), ("eval", 8 * 2.0**k))]
    (found,) = phases(apart).findings(EvaluationGap(), window=window)
    assert found.first_step == 1
    assert found.evidence["factor"] == pytest.approx(4, rel=1e-5)  # the step after is twice as far


@pytest.mark.parametrize("window", [1, 100])
def test_a_training_that_goes_on_between_rare_records_is_no_gap(window: int) -> None:
    rare = [pair for k in range(4) for pair in (("train", 10.0**k), ("eval", 5 * 10.0**k))]
    assert not phases(rare).findings(EvaluationGap(), window=window)


@pytest.mark.parametrize(("factor", "found"), [(2.9, 0), (3.1, 1), (1 / 2.9, 0), (1 / 3.1, 1)])
def test_three_times_or_a_third_is_another_one(factor: float, found: int) -> None:
    steady = [("train", 1.0), ("eval", factor)] * 3 + [("train", 1.0)]
    assert len(phases(steady).findings(EvaluationGap())) == found


def test_an_evaluation_counts_when_the_training_goes_on() -> None:
    short = [("train", 1.0), ("eval", 9.0), ("train", 1.0), ("eval", 9.0)]
    (unchecked,) = phases(short).play(EvaluationGap()).unchecked()
    assert "the run has 1" in unchecked.reason
    assert len(phases([*short, ("train", 1.0)]).findings(EvaluationGap())) == 1


def test_evaluations_without_end_cost_no_memory_without_end() -> None:
    tape = phases([("train", 1.0)] + [("eval", 1.0)] * 200)
    rule = EvaluationGap()
    tape.play(rule)
    assert len(rule._waiting) == 64


def dropping(modes: str) -> Tape:
    """A Dropout: d drops a quarter, p passes on what it is given."""
    tape = Tape()
    before, drop = tape.slot("act", (4, 8)), tape.slot("drop", (4, 8), class_="Dropout")
    tape.graph([(before, drop)])
    for mode in modes:
        x = RNG.normal(size=(4, 8))
        mask = np.arange(8) >= 2
        tape.record({before: x, drop: x * mask * 4 / 3 if mode == "d" else x})
    return tape


@pytest.mark.parametrize(
    ("modes", "steps"), [("ddppppp", [2]), ("ddpppp", []), ("pppppppp", []), ("dpdpdpdpdp", [])]
)
def test_a_dropout_that_stops_dropping_is_in_evaluation_mode(modes: str, steps: list[int]) -> None:
    found = dropping(modes).findings(TrainingInEvaluationMode())
    assert [finding.first_step for finding in found] == steps


@pytest.mark.parametrize(("off", "found"), [(0.0, 0), (0.001, 0), (0.01, 1)])
def test_a_batchnorm_whose_mean_leaves_its_bias_is_in_evaluation_mode(
    off: float, found: int
) -> None:
    tape = Tape()
    norm = tape.slot("n", (64, 5), class_="BatchNorm1d")
    bias = tape.slot("n", (5,), role="bias", kind="parameter")
    beta = np.linspace(-0.1, 0.3, 5)
    for step in range(10):
        x = RNG.normal(size=(64, 5))
        y = (x - x.mean(0)) / x.std(0) + beta
        tape.record({norm: y if step < 3 else y + off, bias: beta})
    findings = tape.findings(TrainingInEvaluationMode())
    assert [finding.first_step for finding in findings] == [3] * found
