"""Rules about data and about a network's structure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from comgra_decl.rules.data.evaluation import EvaluationGap
from comgra_decl.rules.data.inputs import InputScale
from comgra_decl.rules.data.targets import ClassImbalance, SingleClass, Unshuffled
from comgra_decl.rules.structure.branches import BranchIgnored, GradientImbalance
from comgra_decl.rules.structure.broadcasting import SilentBroadcasting
from comgra_decl.rules.structure.detached import Detached
from comgra_decl.rules.structure.probabilities import (
    LogitsAsLogProbabilities,
    ProbabilitiesAsLogits,
)
from comgra_decl.rules.structure.rectified import RectifiedAnswer
from tests.rules.tape import Tape


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        (np.linspace(0, 255, 40), True),  # pixels
        (np.linspace(0, 1, 40), False),
        (np.linspace(-2, 2, 40), False),
        (np.linspace(19, 21, 40), True),  # far from zero relative to its spread
        (np.linspace(-1e-4, 1e-4, 40), True),
    ],
)
def test_inputs_that_are_not_normalised(values: np.ndarray, wrong: bool) -> None:
    tape = Tape()
    slot = tape.slot("input", (4, 10), kind="input", role="input")
    for _ in range(3):
        tape.record({slot: values.reshape(10, 4).T})
    assert bool(tape.findings(InputScale())) is wrong


def labels(batches: np.ndarray) -> Tape:
    tape = Tape()
    slot = tape.slot("target", (batches.shape[1],), kind="target", role="target", dtype="int64")
    for batch in batches:
        tape.record({slot: batch})
    return tape


def test_batches_of_one_class_each() -> None:
    batches = np.repeat(np.arange(20) % 10, 32).reshape(20, 32)
    (found,) = labels(batches).findings(SingleClass())
    assert found.first_step == 0
    batches[:, 7] += 1  # one sample in 32 is different
    assert not labels(batches).findings(SingleClass())


@pytest.mark.parametrize(("fake", "found"), [(0.0, False), (1.0, True)])
def test_batches_of_real_and_of_generated_samples(fake: float, found: bool) -> None:
    """Each loss of a discriminator has one class, as in DCGAN."""
    tape = Tape()
    real, generated = (
        tape.slot("target", (16,), kind="target", role="target", iteration=i) for i in range(2)
    )
    for _ in range(10):
        tape.record({real: np.ones(16), generated: np.full(16, fake)})
    assert bool(tape.findings(SingleClass())) is found


def test_sorted_batches_are_not_shuffled_and_shuffled_ones_are() -> None:
    rng = np.random.default_rng(0)
    data = np.repeat(np.arange(10), 100)
    (found,) = labels(data[:992].reshape(31, 32)).findings(Unshuffled())
    assert float(found.evidence["ratio"]) > 100
    for _ in range(20):
        assert not labels(rng.permutation(data)[:992].reshape(31, 32)).findings(Unshuffled())


def test_a_curriculum_of_lengths_is_shuffled_within_each_length() -> None:
    """Longer sequences have fewer positions with a class other than 0."""
    rng = np.random.default_rng(0)

    def stages(order: Callable[[np.ndarray], np.ndarray]) -> Tape:
        tape = Tape()
        slot = tape.slot("target", (32, 6), kind="target", role="target", dtype="int64")
        for length in (6, 9, 13):
            classes = np.zeros((12 * 32, length), np.int64)
            classes[:, -2:] = order(rng.integers(0, 8, (12 * 32, 1)))
            for batch in np.split(classes, 12):
                tape.record({slot: batch})
        return tape

    assert not stages(rng.permutation).findings(Unshuffled())
    (found,) = stages(lambda classes: np.sort(classes, axis=0)).findings(Unshuffled())
    assert found.evidence["batches"] == 36


def test_a_class_twenty_times_as_frequent_is_out_of_balance() -> None:
    rng = np.random.default_rng(0)
    data = rng.permutation(np.repeat([0, 1, 2], [600, 320, 30]))[:928]
    (found,) = labels(data.reshape(29, 32)).findings(ClassImbalance())
    counts = np.bincount(data)
    assert found.evidence["ratio"] == pytest.approx(counts[0] / counts[2])
    assert not labels(rng.integers(0, 3, (29, 32))).findings(ClassImbalance())


def test_activations_that_are_others_in_evaluation() -> None:
    tape = Tape()
    slot = tape.slot("bn", (4, 10))
    wave = np.random.default_rng(0).normal(size=(4, 10))
    for step in range(4):
        tape.record({slot: wave}, step=step)
        tape.record({slot: wave * 5}, step=step, mode="eval")
    (found,) = tape.findings(EvaluationGap())
    assert found.evidence["factor"] == pytest.approx(5, rel=1e-4)


def branches(size: float, records: int = 30) -> Tape:
    tape = Tape()
    skip, branch = tape.slot("x", (4, 6)), tape.slot("mlp", (4, 6))
    out = tape.slot("block", (4, 6))
    backward = [tape.slot(n, (4, 6), pass_="grad") for n in ("x", "mlp")]
    tape.graph([(skip, branch), (skip, out), (branch, out)])
    ones = np.ones((4, 6))
    for _ in range(records):
        tape.record(
            {
                skip: ones,
                branch: size * ones,
                out: ones,
                backward[0]: ones,
                backward[1]: size * ones,
            }
        )
    return tape


def test_a_branch_of_a_ten_thousandth_does_not_count() -> None:
    (found,) = branches(1e-4).findings(BranchIgnored())
    assert found.place is not None
    assert (found.place.node, found.first_step) == ("mlp", 10)
    (found,) = branches(1e-4).findings(GradientImbalance())
    assert found.place is not None
    assert (found.place.node, found.place.pass_) == ("mlp", "grad")
    assert not branches(1e-2).findings(BranchIgnored())
    assert not branches(1e-2).findings(GradientImbalance())
    assert not branches(1e-4, records=15).findings(BranchIgnored())


@pytest.mark.parametrize(
    ("function", "prediction", "target", "result"),
    [
        ("mse_loss", (64, 1), (64,), "[64, 64]"),
        ("mse_loss", (64,), (64, 1), "[64, 64]"),
        ("huber_loss", (5, 5, 1), (5, 5), "[5, 5, 5]"),
        ("sub", (64, 1), (64,), "[64, 64]"),
        ("__rsub__", (64, 1), (64,), "[64, 64]"),
        ("mse_loss", (64, 1), (64, 1), None),
        ("mse_loss", (64,), (64,), None),
        ("mse_loss", (64, 3), (3,), None),  # one target for all
        ("mse_loss", (1, 64), (64,), None),  # as many elements as either has
        ("sub", (8, 1, 16), (5, 16), None),  # all pairwise distances
        ("cross_entropy", (64, 1), (64,), None),
    ],
)
def test_shapes_that_broadcast(
    function: str, prediction: tuple[int, ...], target: tuple[int, ...], result: str | None
) -> None:
    tape = Tape()
    tape.loss_call(function, prediction, target)
    tape.record({})
    found = [finding.evidence["result"] for finding in tape.findings(SilentBroadcasting())]
    assert found == ([] if result is None else [result])


def classified(values: np.ndarray, *, function: str, made_by: str = "") -> Tape:
    """Returns what a classification loss receives in six records."""
    tape = Tape()
    answer = tape.slot("net", values.shape)
    labels = (len(values), *values.shape[2:])
    goal = tape.slot("target", labels, kind="target", role="target", dtype="int64")
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(answer, loss)], cut=[(goal, loss)])
    tape.loss_call(function, answer, goal, made_by=made_by)
    for _ in range(6):
        tape.record({answer: values, goal: np.zeros(labels)})
    return tape


LOGITS = np.random.default_rng(0).normal(size=(8, 10))
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
MAPS = np.repeat(PROBABILITIES[:, :, None], 4, 2).reshape(8, 10, 2, 2)


@pytest.mark.parametrize(
    ("values", "made_by", "wrong"),
    [
        (LOGITS, "Softmax", True),  # what computed them is enough
        (LOGITS, "Addmm", False),
        (PROBABILITIES, "", True),
        (MAPS, "", True),
        (LOGITS, "", False),
        (np.log(PROBABILITIES), "LogSoftmax", False),
    ],
)
@pytest.mark.parametrize("window", [1, 7])
def test_probabilities_where_logits_should_be(
    values: np.ndarray, made_by: str, wrong: bool, window: int
) -> None:
    tape = classified(values, function="cross_entropy", made_by=made_by)
    found = tape.findings(ProbabilitiesAsLogits(), window=window)
    assert [finding.evidence["classes"] for finding in found] == [10] * wrong
    assert all("cannot fall below 1.46" in finding.message for finding in found)  # ln(1 + 9 / e)


@pytest.mark.parametrize(
    ("values", "made_by", "wrong"),
    [
        (LOGITS, "Addmm", True),
        (LOGITS, "", True),
        (PROBABILITIES, "Softmax", True),
        (np.log(PROBABILITIES), "LogSoftmax", False),
        (np.log(PROBABILITIES), "Log", False),  # as skorch expects it
        (np.log(PROBABILITIES), "", False),
    ],
)
def test_logits_where_logarithms_should_be(values: np.ndarray, made_by: str, wrong: bool) -> None:
    tape = classified(values, function="nll_loss", made_by=made_by)
    assert bool(tape.findings(LogitsAsLogProbabilities())) is wrong


@pytest.mark.parametrize(("slope", "wrong"), [(0.0, True), (0.01, True), (1.0, False)])
def test_a_rectifier_behind_the_last_layer(slope: float, wrong: bool) -> None:
    tape = Tape()
    hidden, out = tape.slot("last", (8, 3)), tape.slot("out", (8, 3))
    answer = tape.slot("sigmoid", (8, 3), class_="Sigmoid")
    target = tape.slot("target", (8, 3), kind="target", role="target")
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(hidden, out), (out, answer), (answer, loss)], cut=[(target, loss)])
    rng = np.random.default_rng(0)
    for _ in range(6):
        x = rng.normal(size=(8, 3))
        y = np.where(x > 0, x, slope * x)
        goal = (rng.random((8, 3)) > 0.5).astype(float)
        tape.record({hidden: x, out: y, answer: 1 / (1 + np.exp(-y)), target: goal})
    found = tape.findings(RectifiedAnswer())
    assert bool(found) is wrong
    if wrong:
        assert found[0].place is not None
        assert found[0].place.node == "out"
        left = found[0].evidence["share of negative values that remains"]
        assert left == pytest.approx(slope, abs=1e-6)


def test_a_net_without_anything_like_a_rectifier_is_not_judged() -> None:
    tape = Tape()
    a, b, out = (tape.slot(name, (8, 3)) for name in ("a", "b", "out"))
    target = tape.slot("target", (8, 3), kind="target", role="target")
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(a, out), (b, out), (out, loss)], cut=[(target, loss)])
    for _ in range(6):
        tape.record(dict.fromkeys((a, b, out, target), np.ones((8, 3))))
    assert tape.findings(RectifiedAnswer()) == []


@pytest.mark.parametrize("cut", [True, False])
def test_a_branch_that_is_cut_off_is_named(cut: bool) -> None:
    tape = Tape()
    w1 = tape.slot("a", (4, 4), role="weight", kind="parameter")
    w2 = tape.slot("b", (4, 4), role="weight", kind="parameter")
    a, b = tape.slot("a", (8, 4)), tape.slot("b", (8, 4))
    loss = tape.slot("loss", (), kind="loss")
    gradient = tape.slot("b", (4, 4), role="weight", kind="parameter", pass_="grad")
    whole = [(w1, a), (w2, b), (b, loss), *([] if cut else [(a, b)])]
    tape.graph(whole, cut=[(a, b)] if cut else [])
    tape.documents["modules"] = [
        {"node": name, "parameters": {"weight": {"trainable": True, "tied_to": None}}}
        for name in "ab"
    ]
    for _ in range(3):
        tape.record({i: np.ones(tape.slots[i].shape) for i in (w1, w2, a, b, gradient)})
    assert [str(found.place) for found in tape.findings(Detached())] == ["a"] * cut


@pytest.mark.parametrize(("target", "found"), [("Net#2", 0), ("Other", 1)])
def test_a_target_network_need_not_be_trained(target: str, found: int) -> None:
    tape = Tape()
    names = ("Net", target)
    weights = [tape.slot(n, (4, 4), role="weight", kind="parameter") for n in names]
    answer = tape.slot("Net", (8, 4))
    wanted = tape.slot(target, (8, 4), pass_="no_grad")
    loss = tape.slot("loss", (), kind="loss")
    gradient = tape.slot("Net", (4, 4), role="weight", kind="parameter", pass_="grad")
    tape.graph([(weights[0], answer), (answer, loss)], cut=[(weights[1], wanted), (wanted, loss)])
    tape.documents["modules"] = [
        {"node": name, "parameters": {"weight": {"trainable": True, "tied_to": None}}}
        for name in names
    ]
    for _ in range(3):
        tape.record({i: np.ones(tape.slots[i].shape) for i in (*weights, answer, wanted, gradient)})
    assert len(tape.findings(Detached())) == found


def test_a_term_of_a_loss_written_by_hand_is_no_target() -> None:
    """The log determinants of a flow that starts as the identity are zero."""
    for function, alarms in (("add", 0), ("__sub__", 0), ("mse_loss", 1)):
        tape = Tape()
        density = tape.slot("flow", (32,))
        term = tape.slot("target", (32,), kind="target", role="target")
        tape.loss_call(function, density, term)
        for step in range(30):
            tape.record({density: np.linspace(0, step, 32), term: np.zeros(32)})
        assert len(tape.findings(SingleClass())) == alarms
