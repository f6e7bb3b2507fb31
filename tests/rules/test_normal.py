"""Behaviour of healthy training runs is not reported; a similar but harmful variant is."""

from __future__ import annotations

import numpy as np
import pytest

from comgra_decl.rules.activations.dead import DeadUnits
from comgra_decl.rules.activations.spread import ActivationDrift, PoorInitialisation
from comgra_decl.rules.data.evaluation import EvaluationGap
from comgra_decl.rules.data.targets import Unshuffled
from comgra_decl.rules.gradients.exploding import ExplodingGradient
from comgra_decl.rules.loss.diverging import NegativeLoss
from comgra_decl.rules.loss.initial import InitialLoss
from comgra_decl.rules.loss.spike import LossSpike
from comgra_decl.rules.parameters.growing import GrowingWeight
from comgra_decl.rules.parameters.update_ratio import LargeUpdate
from comgra_decl.rules.values.collapsing import CollapsingOutput
from tests.rules.tape import Tape

RNG = np.random.default_rng(6)
WINDOWS = pytest.mark.parametrize("window", [1, 7, 100])


@WINDOWS
@pytest.mark.parametrize(("first", "explodes"), [(1.0, False), (5000.0, True)])
def test_a_part_of_the_loss_that_weighs_little_makes_no_gradient_explode(
    first: float, explodes: bool, window: int
) -> None:
    """A network runs twice per step; the second time, almost nothing of the loss depends on it."""
    tape = Tape()
    forward = [tape.slot(f"l{i}", (2, 4), iteration=k) for k in range(2) for i in range(3)]
    target = tape.slot("target", (2, 4), role="target", kind="target")
    loss = tape.slot("loss", (), kind="loss")
    backward = [
        tape.slot(f"l{i}", (2, 4), iteration=k, pass_="grad") for k in range(2) for i in range(3)
    ]
    edges = [(0, 1), (1, 2), (3, 4), (4, 5), (2, loss), (5, loss), (target, loss)]
    tape.graph(edges)
    sizes = [first, 1.0, 1.0, 1e-5, 1e-5, 1e-5]
    for _ in range(6):
        values = {**dict.fromkeys(forward, np.ones((2, 4))), target: np.ones((2, 4)), loss: 1.0}
        tape.record(values | {g: np.full((2, 4), s) for g, s in zip(backward, sizes, strict=True)})
    places = [str(f.place) for f in tape.findings(ExplodingGradient(), window=window)]
    assert places == ["l0 (grad)"] * explodes


@WINDOWS
@pytest.mark.parametrize(("growth", "collapses"), [(1.0, False), (-1.0, True)])
def test_a_tensor_that_gains_an_offset_tells_samples_apart_as_before(
    growth: float, collapses: bool, window: int
) -> None:
    """Like the scales and shifts of a normalizing flow, which start at zero."""
    tape = Tape()
    slot = tape.slot("shift", (8, 1))
    wave = 0.01 * RNG.normal(size=(8, 1))
    for record in range(30):
        spread = 1.1 ** (growth * record)
        tape.record({slot: spread * wave + (0.2 * record if record > 9 else 0)})
    assert len(tape.findings(CollapsingOutput(), window=window)) == collapses


@WINDOWS
@pytest.mark.parametrize(("momentum", "found"), [(0.1, 0), (0.001, 1)])
def test_running_statistics_that_catch_up_are_no_gap(
    momentum: float, found: int, window: int
) -> None:
    """A BatchNorm of values with a variance of 0.004, evaluated every 25 steps."""
    tape = Tape()
    slot = tape.slot("bn", (4, 10))
    tape.documents["modules"] = [{"path": "", "node": "bn", "class": "BatchNorm1d"}]
    wave = RNG.normal(size=(4, 10))
    for step in range(0, 200, 25):
        old = (1 - momentum) ** (step + 1)
        tape.record({slot: wave}, step=step)
        tape.record({slot: wave * np.sqrt(0.004 / (0.004 + old))}, step=step + 1, mode="eval")
    tape.record({slot: wave}, step=200)
    assert len(tape.findings(EvaluationGap(), window=window)) == found


@pytest.mark.parametrize("learned", [True, False])
def test_a_learned_weight_of_the_loss_may_make_it_negative(learned: bool) -> None:
    tape = Tape()
    logits = tape.slot("head", (8, 10))
    weight = tape.slot("net", (2,), role="log_var", kind="parameter")
    target = tape.slot("target", (8,), role="target", kind="target", dtype="int64")
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(logits, loss), (target, loss), *([(weight, loss)] if learned else [])])
    tape.loss_call("cross_entropy", logits, target)
    for _ in range(5):
        tape.record({logits: RNG.normal(size=(8, 10)), target: np.arange(8), loss: 1.0})
    tape.losses((2.3 - 0.1 * np.arange(100)).tolist())
    assert len(tape.findings(NegativeLoss())) == (not learned)


@WINDOWS
@pytest.mark.parametrize("alternate", [True, False])
def test_tasks_that_take_turns_are_shuffled_each(alternate: bool, window: int) -> None:
    tape = Tape()
    logits = tape.slot("head", (32, 10))
    target = tape.slot("target", (32,), role="target", kind="target", dtype="int64")
    for step in range(40):
        parity = step % 2
        tape.calls.clear()
        own = "binary_cross_entropy_with_logits" if parity and alternate else "cross_entropy"
        tape.loss_call(own, logits, target)
        high = 2 if parity else 10
        tape.record({logits: np.zeros((32, 10)), target: RNG.integers(0, high, 32)}, step=step)
    assert len(tape.findings(Unshuffled(), window=window)) == (not alternate)


@pytest.mark.parametrize(("logit", "scale", "found"), [(0.0, 1024, 0), (60.0, 1, 1), (60.0, 8, 1)])
def test_a_loss_that_is_scaled_by_hand_is_that_of_guessing(
    logit: float, scale: float, found: int
) -> None:
    tape = Tape()
    logits = tape.slot("head", (8, 10))
    target = tape.slot("target", (8,), role="target", kind="target", dtype="int64")
    loss = tape.slot("loss", (), kind="loss")
    gradient = tape.slot("head", (8, 10), pass_="grad")
    tape.graph([(logits, loss), (target, loss)])
    tape.loss_call("cross_entropy", logits, target)
    values, labels = np.zeros((8, 10)), np.arange(8)
    values[:, 9] = logit
    chances = np.exp(values) / np.exp(values).sum(1, keepdims=True)
    first = float(-np.log(chances[range(8), labels]).mean())
    slope = (chances - np.eye(10)[labels]) / 8
    tape.record({logits: values, target: labels, loss: first, gradient: scale * slope})
    tape.losses([scale * first, scale * first])
    assert len(tape.findings(InitialLoss())) == found


@pytest.mark.parametrize("frozen", [True, False])
def test_a_pretrained_network_need_not_start_by_guessing(frozen: bool) -> None:
    tape = Tape()
    logits = tape.slot("head", (8, 10))
    target = tape.slot("target", (8,), role="target", kind="target", dtype="int64")
    tape.loss_call("cross_entropy", logits, target)
    body = {"weight": {"shape": [64, 64], "trainable": not frozen}}
    head = {"weight": {"shape": [64, 10], "trainable": True}}
    tape.documents["modules"] = [
        {"path": "", "node": "Net", "parameters": {}},
        {"path": "body", "node": "body", "parameters": body},
        {"path": "head", "node": "head", "parameters": head},
    ]
    tape.record({logits: np.zeros((8, 10)), target: np.arange(8)})
    tape.losses([9.0, 8.0])
    assert len(tape.findings(InitialLoss())) == (not frozen)


@WINDOWS
@pytest.mark.parametrize(("step_size", "found"), [(0.001, 0), (0.1, 1)])
def test_small_weights_may_change_by_much_of_themselves(
    step_size: float, found: int, window: int
) -> None:
    """A policy's last layer starts within 3e-3; by default it would start within 0.18."""
    tape = Tape()
    weight = tape.slot("head", (2, 32), role="weight", kind="parameter")
    start = RNG.uniform(-3e-3, 3e-3, (2, 32))
    for step in range(20):
        tape.record({weight: start + step_size * step}, step=step)
    assert len(tape.findings(LargeUpdate(), window=window)) == found


@pytest.mark.parametrize(("size", "found"), [(5.0, 0), (12.0, 1)])
def test_small_embeddings_may_grow_to_the_usual_size(size: float, found: int) -> None:
    tape = Tape()
    table = tape.slot("words", (30, 8), role="weight", kind="parameter", class_="Embedding")
    wave = RNG.choice([-1.0, 1.0], (30, 8))
    for step in range(20):
        tape.record({table: wave * (0.1 if step < 10 else size)})
    assert len(tape.findings(GrowingWeight())) == found


@WINDOWS
@pytest.mark.parametrize("revives", [True, False])
def test_units_that_revive_are_not_dead_although_later_records_are_rare(
    revives: bool, window: int
) -> None:
    tape = Tape()
    bias = tape.slot("layer", (8,), role="bias", kind="parameter", pass_="grad")
    other = tape.slot("head", (8,), role="bias", kind="parameter", pass_="grad")
    steps = [*range(30), 60, 100, 150, 200, 300, 400]
    for step in steps:
        dead = not revives or step < 50
        gradient = np.r_[np.zeros(6), 1, 1] if dead else np.ones(8)
        tape.record({bias: gradient, other: np.ones(8)}, step=step)
    assert len(tape.findings(DeadUnits(), window=window)) == (not revives)


@WINDOWS
@pytest.mark.parametrize(("following", "severity"), [(0.3, "hint"), (1.5, "warning")])
def test_a_jump_that_is_over_at_the_next_step_is_that_of_a_batch(
    following: float, severity: str, window: int
) -> None:
    """As for a last batch of four samples; a jump of the network persists."""
    values = 0.3 + 0.02 * RNG.normal(size=200)
    values[120], values[121:] = 3.0, following * np.ones(79)
    tape = Tape()
    tape.losses(values.tolist())
    (found,) = tape.findings(LossSpike(), window=window)
    assert (found.severity, found.first_step) == (severity, 120)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_large_layer_may_reach_its_normalization_through_a_container(normalized: bool) -> None:
    """Like vision transformers, whose patch embedding contains the layer and reshapes it."""
    tape = Tape()
    names = ["patches.projection", "patches", "norm", "a", "b", "c"]
    kinds = ["Linear", "Patches", "LayerNorm" if normalized else "Identity", *["Linear"] * 3]
    slots = [tape.slot(n, (8, 6), class_=c) for n, c in zip(names, kinds, strict=True)]
    for name in ("patches.projection", "a", "b", "c"):
        tape.slot(name, (6, 6), role="weight", kind="parameter")
    tape.graph([(k, k + 1) for k in range(5)])
    wave = RNG.normal(size=(8, 6))
    for _ in range(5):
        tape.record({s: wave * (50 if s < 2 else 1) for s in slots})
    assert len(tape.findings(PoorInitialisation())) == (not normalized)
    for step in range(16):
        tape.record({s: wave * (2**step if s < 2 else 1) for s in slots})
    assert len(tape.findings(ActivationDrift())) == (not normalized)
