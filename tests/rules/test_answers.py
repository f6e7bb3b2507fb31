"""Rules about a network's predictions, and about dropout, on hand-computed cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from comgra_decl.rules.activations.dropout import HeavyDropout
from comgra_decl.rules.activations.spread import ActivationDrift
from comgra_decl.rules.structure.probabilities import SigmoidTwice
from comgra_decl.rules.values.one_answer import OneAnswer
from tests.rules.tape import Tape

RNG = np.random.default_rng(6)
CLASSES = np.arange(8) % 3


def classified(answer: NDArray[np.float64], target: NDArray[np.int64], records: int = 15) -> Tape:
    tape = Tape()
    said = tape.slot("net", answer.shape)
    goal = tape.slot("target", target.shape, kind="target", role="target", dtype="int64")
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(said, loss)], cut=[(goal, loss)])
    for _ in range(records):
        tape.record({said: answer, goal: target})
    return tape


def logits(times: float) -> NDArray[np.float64]:
    """Predictions that make class 1 this many times as likely as each of the two others."""
    return np.tile([0.0, np.log(times), 0.0], (8, 1))


@pytest.mark.parametrize(("times", "found"), [(3.9, 0), (4.1, 1)])  # 4 / 6 is halfway to 1
def test_one_answer_must_be_a_sure_one(times: float, found: int) -> None:
    findings = classified(logits(times), CLASSES).findings(OneAnswer())
    assert [f.evidence["class"] for f in findings] == [1.0] * found
    shares = np.exp(logits(times))
    shares /= shares.sum(1, keepdims=True)
    assert len(classified(shares, CLASSES).findings(OneAnswer())) == found


def test_one_answer_is_right_where_there_is_one_class_and_takes_fifteen_records() -> None:
    assert not classified(logits(1e6), np.ones(8, np.int64)).findings(OneAnswer())
    assert not classified(logits(1e6), CLASSES, records=14).findings(OneAnswer())


def test_two_answers_are_not_one() -> None:
    two = logits(1e6)
    two[5] = [20.0, 0.0, 0.0]
    assert not classified(two, CLASSES).findings(OneAnswer())


def judged(made_by: str, *batches: NDArray[np.float64], calls: int = 1) -> Tape:
    """A binary cross-entropy of logits with these predictions."""
    tape = Tape()
    predictions = [tape.slot("net", (8, 2), iteration=i) for i in range(calls)]
    goals = [
        tape.slot("target", (8, 2), kind="target", role="target", iteration=i) for i in range(calls)
    ]
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(p, loss) for p in predictions], cut=[(goal, loss) for goal in goals])
    if calls > 1:  # each call has its own loss module
        parts = [tape.slot("bce", (), iteration=i) for i in range(calls)]
        pairs = [*zip(predictions, parts, strict=True), *((part, loss) for part in parts)]
        tape.graph(pairs, cut=[*zip(goals, parts, strict=True)])
    for prediction, goal in zip(predictions, goals, strict=True):
        tape.loss_call("binary_cross_entropy_with_logits", prediction, goal, made_by=made_by)
    y = np.tile([0.0, 1.0], (8, 1))
    for batch in batches:
        parts_of_it = np.split(batch, calls)
        tape.record({**dict(zip(predictions, parts_of_it, strict=True)), **dict.fromkeys(goals, y)})
    return tape


SURE = np.tile([0.02, 0.98], (8, 1))  # comes within 0.05 of both ends


@pytest.mark.parametrize(("made_by", "found"), [("Sigmoid", 1), ("Softmax", 1), ("Addmm", 0)])
def test_a_sigmoid_of_probabilities_is_told_by_what_computed_them(made_by: str, found: int) -> None:
    """Logits in 0 .. 1, from a discriminator that is sure of nothing, are not probabilities."""
    findings = judged(made_by, *[SURE] * 6).findings(SigmoidTwice())
    assert [finding.evidence["made_by"] for finding in findings] == [made_by.lower()] * found


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ([SURE] * 6, 1),
        ([SURE] * 11 + [SURE - 1], 0),  # once it is outside
        ([np.tile([0.06, 0.94], (8, 1))] * 6, 0),  # away from both ends
    ],
)
@pytest.mark.parametrize("window", [1, 7])
def test_numbers_of_unknown_origin_are_probabilities_if_they_always_are(
    batches: list[NDArray[np.float64]], found: int, window: int
) -> None:
    assert len(judged("", *batches).findings(SigmoidTwice(), window=window)) == found


@pytest.mark.parametrize(("fake", "found"), [(SURE, 1), (SURE - 1, 0)])
def test_numbers_of_unknown_origin_are_judged_by_all_calls_of_a_model(
    fake: NDArray[np.float64], found: int
) -> None:
    """A discriminator outputs logits of 0 .. 1 for real samples, and others for fake ones."""
    both = np.concatenate((SURE, fake))
    assert len(judged("", *[both] * 6, calls=2).findings(SigmoidTwice())) == found


@pytest.mark.parametrize(
    ("before", "left", "found"), [(25, 4, 0), (25, 3, 1), (10, 2, 0), (10, 1, 1)]
)
def test_dropout_should_leave_a_seventh_of_what_enters(before: int, left: int, found: int) -> None:
    tape = Tape()
    act, drop = tape.slot("act", (4, 25)), tape.slot("drop", (4, 25), class_="Dropout")
    tape.graph([(act, drop)])
    for _ in range(5):
        at = np.arange(25)
        tape.record({act: np.ones((4, 1)) * (at < before), drop: np.ones((4, 1)) * (at < left)})
    findings = tape.findings(HeavyDropout())
    shares = [finding.evidence["share that remains"] for finding in findings]
    assert shares == pytest.approx([left / before] * found, rel=1e-5)


@pytest.mark.parametrize(("grows", "found"), [("hidden", 1), ("head", 0), ("last", 0), ("net", 0)])
def test_logits_may_become_as_large_as_they_like(grows: str, found: int) -> None:
    tape = Tape()
    slots = {name: tape.slot(name, (4, 6)) for name in ("hidden", "head", "last", "net")}
    weight = tape.slot("head", (6, 6), role="weight", kind="parameter")
    goal = tape.slot("target", (4, 6), kind="target", role="target")
    loss = tape.slot("loss", (), kind="loss")
    path = [*slots.values(), loss]
    tape.graph([*itertools.pairwise(path), (weight, slots["head"])], cut=[(goal, loss)])
    for step in range(12):
        wave = RNG.normal(size=(4, 6))
        tensors = {
            slot: wave * (200.0 if name == grows and step > 6 else 1.0)
            for name, slot in slots.items()
        }
        tape.record({**tensors, weight: np.ones((6, 6)), goal: wave, loss: 1.0})
    assert len(tape.findings(ActivationDrift())) == found
