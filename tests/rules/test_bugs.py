"""Rules motivated by the benchmark of bugs, on tensors written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.bugs import healthy
from benchmarks.bugs.collection import cases
from benchmarks.bugs.play import play
from comgra_decl.rules.data.repeated import RepeatedBatch
from comgra_decl.rules.loss.diverging import NegativeLoss
from comgra_decl.rules.parameters.many_frozen import ManyFrozen
from comgra_decl.rules.parameters.shrinking import ShrinkingWeight
from comgra_decl.rules.structure.small_batch import SmallBatchNorm
from comgra_decl.rules.values.collapsing import CollapsingOutput
from comgra_decl.rules.values.identical import IdenticalUnits
from tests.rules.tape import Tape

RNG = np.random.default_rng(3)


@pytest.mark.parametrize(("size", "found"), [(0.11, 0), (0.09, 1)])
def test_a_weight_that_fades_below_a_tenth_is_shrinking(size: float, found: int) -> None:
    tape = Tape()
    weight = tape.slot("a", (4, 6), role="weight", kind="parameter")
    for step in range(10):
        tape.record({weight: np.ones((4, 6)) * (1.0 if step < 5 else size)})
    findings = tape.findings(ShrinkingWeight())
    assert len(findings) == found
    assert [f.first_step for f in findings] == [5] * found


def test_a_weight_that_begins_constant_breaks_no_symmetry() -> None:
    tape = Tape()
    same = tape.slot("a", (4, 6), role="weight", kind="parameter")
    drawn = tape.slot("b", (4, 6), role="weight", kind="parameter")
    for _ in range(4):
        tape.record({same: np.full((4, 6), 0.1), drawn: RNG.normal(0, 1, (4, 6))})
    (found,) = tape.findings(IdenticalUnits())
    assert found.place is not None
    assert (found.place.node, found.also) == ("a", 0)


def test_a_zero_weight_is_another_matter() -> None:
    tape = Tape()
    weight = tape.slot("a", (4, 6), role="weight", kind="parameter")
    for _ in range(4):
        tape.record({weight: np.zeros((4, 6))})
    assert not tape.findings(IdenticalUnits())


@pytest.mark.parametrize(("share", "found"), [(0.2, 0), (0.05, 1)])
def test_samples_that_become_alike_collapse(share: float, found: int) -> None:
    tape = Tape()
    out = tape.slot("a", (4, 6))
    apart = np.linspace(-1, 1, 4)[:, None]
    for step in range(16):
        tape.record({out: 10 + np.arange(6) + apart * (1.0 if step < 6 else share)})
    assert len(tape.findings(CollapsingOutput())) == found


@pytest.mark.parametrize(("batch", "found"), [(7, 1), (8, 0)])
def test_batchnorm_wants_eight_values(batch: int, found: int) -> None:
    tape = Tape()
    norm = tape.slot("n", (batch, 3), class_="BatchNorm1d")
    for _ in range(4):
        tape.record({norm: RNG.normal(0, 1, (batch, 3))})
    assert len(tape.findings(SmallBatchNorm())) == found


@pytest.mark.parametrize(("repeats", "found"), [(True, 1), (False, 0)])
def test_the_same_batch_again_is_a_hint(repeats: bool, found: int) -> None:
    tape = Tape()
    given = tape.slot("input", (4, 6), role="input", kind="input", class_="")
    batch = RNG.normal(0, 1, (4, 6))
    for _ in range(12):
        tape.record({given: batch if repeats else RNG.normal(0, 1, (4, 6))})
    findings = tape.findings(RepeatedBatch())
    assert [f.severity for f in findings] == ["hint"] * found


@pytest.mark.parametrize(("frozen", "found"), [(2, 0), (3, 1)])
def test_more_than_a_tenth_frozen_is_a_hint(frozen: int, found: int) -> None:
    tape = Tape()
    weight = tape.slot("a", (frozen,), role="weight", kind="parameter")
    facts = {"weight": {"trainable": False, "shape": [frozen]}}
    rest = {"weight": {"trainable": True, "shape": [24 - frozen]}}
    tape.documents["modules"] = [
        {"path": "a", "node": "a", "class": "Linear", "parameters": facts},
        {"path": "b", "node": "b", "class": "Linear", "parameters": rest},
    ]
    for _ in range(3):
        tape.record({weight: np.ones(frozen)})
    assert len(tape.findings(ManyFrozen())) == found


@pytest.mark.parametrize(("end", "found"), [(-9.0, 0), (-40.0, 1)])
def test_a_negative_loss_of_numbers_may_not_fall_without_end(end: float, found: int) -> None:
    tape = Tape()
    tape.losses(np.linspace(-1.0, end, 100).tolist())
    assert len(tape.findings(NegativeLoss())) == found


SHORT = ("layer_too_large", "zero_grad_missing", "sigmoid_twice", "detached_features")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHORT, "mlp", "batchnorm"])
def test_the_benchmark_of_bugs_in_short(name: str) -> None:
    case = next(case for case in cases() if case.name == name)
    outcome = play(case, "tune")
    assert outcome.right if name in SHORT else not outcome.alarms, outcome.said


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "generative.hinge_gan",
        "generative.spline_like_flow",
        "kinds.large_targets",
        "reinforcement.actor_critic",
        "schedules.curriculum_of_lengths",
        "transfer.new_labels_midway",
    ],
)
def test_healthy_trainings_in_other_styles_raise_no_alarm(name: str) -> None:
    outcome = healthy.train(f"styles/{name}")
    assert outcome.learns, outcome
    assert not outcome.alarms, outcome.alarms
