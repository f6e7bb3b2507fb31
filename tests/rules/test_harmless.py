"""What does not impair training is at most a hint; its harmful twin is a warning or an error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from comgra_decl.records import OPTIMIZERS
from comgra_decl.rules.activations.dead import DeadUnits
from comgra_decl.rules.data.inputs import InputScale
from comgra_decl.rules.data.targets import SingleClass
from comgra_decl.rules.gradients.exploding import ExplodingGradient
from comgra_decl.rules.gradients.vanishing import VanishingGradient
from comgra_decl.rules.loss.diverging import LossDiverges
from comgra_decl.rules.loss.flat import LossNotFalling
from comgra_decl.rules.loss.spike import LossSpike
from comgra_decl.rules.parameters.competing import CompetingOptimizers
from comgra_decl.rules.parameters.growing import GrowingWeight
from comgra_decl.rules.parameters.untrained import Untrained
from comgra_decl.rules.phases import Phases
from comgra_decl.rules.precision.nonfinite import Nonfinite
from comgra_decl.rules.structure.batch_mixing import BatchMixing
from comgra_decl.rules.values.collapsing import CollapsingOutput
from comgra_decl.rules.values.independent import InputIndependence
from tests.rules.tape import Tape

RNG = np.random.default_rng(7)
WINDOWS = pytest.mark.parametrize("window", [1, 7, 100])


def noisy(levels: Sequence[float]) -> list[float]:
    return [level * (1 + 0.05 * float(RNG.normal())) for level in levels]


@pytest.mark.parametrize(
    ("after", "severity"),
    [
        (np.linspace(4.0, 0.3, 60), "hint"),  # recovers
        (np.linspace(4.0, 3.0, 60), "warning"),  # does not
    ],
)
def test_a_spike_from_which_training_recovers_is_a_hint(after: np.ndarray, severity: str) -> None:
    tape = Tape()
    tape.losses(noisy([*np.linspace(2.0, 0.3, 80), *[0.3] * 40, *after]))
    (found,) = tape.findings(LossSpike())
    assert found.severity == severity
    assert 115 <= found.first_step <= 120


@WINDOWS
@pytest.mark.parametrize(
    ("clipped", "last", "severity"),
    [
        (True, 1.9, "warning"),
        (True, 2.1, "error"),  # the loss rises
        (False, 1.9, "error"),
    ],
)
def test_clipping_limits_what_an_exploding_gradient_does(
    clipped: bool, last: float, severity: str, window: int
) -> None:
    tape = Tape()
    outputs = [tape.slot(f"rnn{i}", (4, 2), pass_="grad") for i in range(6)]
    weights = [
        tape.slot("rnn", (2,), role=role, pass_="grad", kind="parameter")
        for role in ("weight", "bias")
    ]
    tape.losses(np.linspace(2.0, last, 40).tolist())
    for record in range(40):
        size = 1.0 if record < 10 else 300.0
        angle = record  # so that the shares of the two parameters differ between steps
        length = 0.25 if clipped else size * (1 + 0.1 * (record % 3))
        row = {slot: np.full((4, 2), size) for slot in outputs}
        row[weights[0]] = np.array([length * np.cos(angle), 0.0])
        row[weights[1]] = np.array([length * np.sin(angle), 0.0])
        tape.record(row)
    (found,) = tape.findings(ExplodingGradient(), window=window)
    assert (found.severity, found.first_step) == (severity, 10)


@WINDOWS
@pytest.mark.parametrize(
    ("left", "dtype", "collapses"),
    [
        (1.0, "float32", True),  # the targets differ as much as before
        (0.05, "float32", False),  # they become similar as well
        (0.05, "int64", True),  # classes are not in the units of the prediction
    ],
)
def test_a_prediction_that_varies_as_much_as_its_target_has_not_collapsed(
    left: float, dtype: str, collapses: bool, window: int
) -> None:
    tape = Tape()
    value = tape.slot("critic", (8, 1))
    returns = tape.slot("returns", (8, 1), kind="target", role="target", dtype=dtype)
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(value, loss)], cut=[(returns, loss)])
    wave = 5 + RNG.normal(size=(8, 1))
    for record in range(20):
        mine, theirs = (0.05, left) if record >= 6 else (1.0, 1.0)
        tape.record({value: 5 + (wave - 5) * mine, returns: 5 + (wave - 5) * theirs})
    found = tape.findings(CollapsingOutput(), window=window)
    assert bool(found) is collapses


@WINDOWS
@pytest.mark.parametrize(
    ("length", "rate", "severity"),
    [(4, 0.1, "warning"), (9, 0.1, "hint"), (4, 1.0, "hint")],
)
def test_a_spike_after_a_change_of_the_data_or_the_rate_is_a_hint(
    length: int, rate: float, severity: str, window: int
) -> None:
    """A curriculum with longer sequences, and a schedule that restarts."""
    tape = Tape()
    given = tape.slot("input", (8, 4), role="input", kind="input", class_="")
    tape.losses(noisy([0.3] * 120 + [4.0] * 60))
    wave = RNG.normal(size=(8, 16))
    for step in range(0, 180, 10):
        late = step >= 120
        group = {"lr": rate if late else 0.1}
        facts = {OPTIMIZERS: [{"class": "SGD", "groups": [group]}]}
        tape.record({given: wave[:, : length if late else 4]}, step=step, facts=facts)
    (found,) = tape.findings(LossSpike(), window=window)
    assert found.severity == severity


@pytest.mark.parametrize(
    ("function", "changes", "several", "severity"),
    [
        ("mse_loss", False, False, "error"),
        ("cross_entropy", False, False, "error"),
        ("gather", False, False, "hint"),
        ("mse_loss", True, False, "hint"),
        ("mse_loss", False, True, "hint"),
    ],
)
def test_only_the_loss_of_a_prediction_must_not_rise(
    function: str, changes: bool, several: bool, severity: str
) -> None:
    """The objective of a policy, a curriculum, and a game between two networks may."""
    tape = Tape()
    answer = tape.slot("net", (8, 10))
    given = tape.slot("input", (8, 4), role="input", kind="input", class_="")
    whole = function != "mse_loss"
    target = tape.slot(
        "target",
        (8,) if whole else (8, 10),
        role="target",
        kind="target",
        dtype="int64" if whole else "float32",
    )
    tape.loss_call(function, answer, target)
    labels = np.arange(8) if whole else np.ones((8, 10))
    wave = RNG.normal(size=(8, 4))
    for step in range(0, 200, 10):
        size = 3.0 if changes and step > 100 else 1.0
        tape.record({answer: np.ones((8, 10)), target: labels, given: size * wave}, step=step)
    tape.losses(noisy([*np.linspace(1, 0.5, 100), *np.linspace(0.5, 4, 100)]))
    if several:
        tape.losses([1.0] * 200, name="loss[1]")
    (found,) = tape.findings(LossDiverges())
    assert found.severity == severity


@WINDOWS
@pytest.mark.parametrize(("share", "severity"), [(0.6, "hint"), (0.85, "hint"), (0.95, "warning")])
def test_dead_units_beside_others_that_are_alive(share: float, severity: str, window: int) -> None:
    tape = Tape()
    roles = [("bias", (20,)), ("weight", (20, 4))]
    bias, weight = (
        tape.slot("layer", shape, role=role, kind="parameter", pass_="grad")
        for role, shape in roles
    )
    other = tape.slot("head", (8,), role="bias", kind="parameter", pass_="grad")
    for step in range(30):
        alive = (np.arange(20) >= 20 * share).astype(float)
        values = {bias: alive, weight: np.outer(alive, np.ones(4)), other: np.ones(8)}
        tape.record(values, step=step)
    (found,) = tape.findings(DeadUnits(), window=window)
    assert found.severity == severity


@pytest.mark.parametrize(("rectified", "found"), [(False, 0), (True, 1)])
def test_a_bias_alone_does_not_show_dead_units(rectified: bool, found: int) -> None:
    """With a hinge loss, gradients of real and generated samples cancel exactly."""
    tape = Tape()
    bias = tape.slot("layer", (20,), role="bias", kind="parameter", pass_="grad")
    name = "layer.parametrizations.weight"
    weight = tape.slot(name, (20, 4), role="original", kind="parameter", pass_="grad")
    other = tape.slot("head", (8,), role="bias", kind="parameter", pass_="grad")
    alive = np.r_[np.zeros(15), np.ones(5)]
    for step in range(20):
        rows = alive if rectified and step > 2 else np.ones(20)
        values = {bias: alive, weight: np.outer(rows, np.ones(4)), other: np.ones(8)}
        tape.record(values, step=step)
    assert len(tape.findings(DeadUnits())) == found


@pytest.mark.parametrize(("cancels", "found"), [(True, 0), (False, 1)])
def test_a_bias_that_cancels_beside_a_computed_weight(cancels: bool, found: int) -> None:
    tape = Tape()
    bias = tape.slot("layer", (1,), role="bias", kind="parameter", pass_="grad")
    name = "layer.parametrizations.weight"
    weight = tape.slot(name, (1, 4), role="original", kind="parameter", pass_="grad")
    other = tape.slot("head", (8,), role="bias", kind="parameter", pass_="grad")
    facts = {"trainable": True, "optimized": True, "shape": [1]}
    tape.documents["modules"] = [
        {"path": "layer", "node": "layer", "class": "Linear", "parameters": {"bias": facts}}
    ]
    for step in range(20):
        size = 1.0 if cancels else 0.0
        values = {bias: np.zeros(1), weight: np.full((1, 4), size), other: np.ones(8)}
        tape.record(values, step=step)
    assert len([f for f in tape.findings(Untrained()) if f.severity == "error"]) == found


@pytest.mark.parametrize(("size", "severity"), [(0.5, "hint"), (300.0, "warning")])
def test_inputs_that_the_first_layer_normalizes(size: float, severity: str) -> None:
    tape = Tape()
    given = tape.slot("input", (8, 4), role="input", kind="input", class_="")
    layer = tape.slot("norm", (8, 4))
    whole = tape.slot("model", (8, 4), class_="Model")
    tape.graph([(given, layer), (given, whole), (layer, whole)])
    tape.documents["modules"] = [
        {"path": "norm", "node": "norm", "class": "Linear", "parameters": {"weight": {}}}
    ]
    wave = RNG.normal(size=(8, 4))
    for step in range(6):
        tape.record({given: 300 + 100 * wave, layer: size * wave, whole: 300 + wave}, step=step)
    (found,) = tape.findings(InputScale())
    assert found.severity == severity


@pytest.mark.parametrize(("size", "found"), [(1.0, 0), (5e-4, 1)])
def test_words_as_zeros_and_ones_are_no_small_inputs(size: float, found: int) -> None:
    tape = Tape()
    given = tape.slot("input", (4, 3000), role="input", kind="input", class_="")
    for step in range(6):
        words = np.zeros((4, 3000))
        words[range(4), RNG.integers(0, 3000, 4)] = size
        tape.record({given: words}, step=step)
    assert len(tape.findings(InputScale())) == found


@pytest.mark.parametrize(("end", "severity"), [(0.1, "hint"), (0.9, "warning")])
def test_weights_may_grow_while_the_loss_keeps_falling(end: float, severity: str) -> None:
    tape = Tape()
    weight = tape.slot("layer", (30, 8), role="weight", kind="parameter")
    wave = RNG.choice([-1.0, 1.0], (30, 8))
    for step in range(40):
        tape.record({weight: wave * (0.2 if step < 10 else 6.0)}, step=step)
    tape.losses(np.linspace(1.0, end, 40).tolist())
    (found,) = tape.findings(GrowingWeight())
    assert found.severity == severity


@pytest.mark.parametrize(("several", "severity"), [(True, "hint"), (False, "warning")])
def test_a_judge_that_cannot_tell_has_not_collapsed(several: bool, severity: str) -> None:
    """At the end of a game, a discriminator gives the same output for all samples."""
    tape = Tape()
    made, told = tape.slot("generator.out", (8, 4)), tape.slot("judge.out", (8, 1))
    target = tape.slot("target", (8, 1), role="target", kind="target")
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(made, told), (told, loss), (target, loss)])
    wave = RNG.normal(size=(8, 4))
    for step in range(30):
        spread = 1.0 if step < 10 else 0.01
        values = {made: wave, told: 1 + spread * wave[:, :1], target: np.ones((8, 1)), loss: 1.0}
        tape.record(values, step=step)
    tape.losses([1.0] * 30)
    if several:
        tape.losses([1.0] * 30, name="loss[1]")
    (found,) = tape.findings(CollapsingOutput())
    assert found.severity == severity


@pytest.mark.parametrize(("others", "found"), [(True, 0), (False, 1)])
def test_what_only_parameters_determine_need_not_depend_on_the_input(
    others: bool, found: int
) -> None:
    """The log-determinant of a scaling is the same for all samples."""
    tape = Tape()
    given = tape.slot("input", (8, 4), role="input", kind="input", class_="")
    scale = tape.slot("norm", (4,), role="log_scale", kind="parameter")
    y, log_det = (
        tape.slot("norm", (8, 4), role="output[0]"),
        tape.slot("norm", (8,), role="output[1]"),
    )
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(given, y), (scale, log_det), (y, loss), (log_det, loss)])
    wave = RNG.normal(size=(8, 4))
    for step in range(12):
        values = {given: wave, scale: np.ones(4), log_det: np.full(8, 0.3), loss: 1.0}
        tape.record(values | {y: wave if others else np.ones((8, 4))}, step=step)
    assert len(tape.findings(InputIndependence())) == found


@pytest.mark.parametrize(("varies", "severity"), [(True, "hint"), (False, "error")])
def test_one_of_two_outputs_may_be_the_same_for_every_sample(varies: bool, severity: str) -> None:
    """The log-determinant of a flow whose first steps hardly scale anything."""
    tape = Tape()
    given = tape.slot("input", (8, 4), role="input", kind="input", class_="")
    y = tape.slot("flow", (8, 4), role="output[0]")
    log_det = tape.slot("flow", (8,), role="output[1]")
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(given, y), (given, log_det), (y, loss), (log_det, loss)])
    wave = RNG.normal(size=(8, 4))
    for step in range(12):
        values = {given: wave, log_det: 0.3 + 1e-6 * wave[:, 0], loss: 1.0}
        tape.record(values | {y: wave if varies else np.ones((8, 4))}, step=step)
    (found,) = tape.findings(InputIndependence())
    assert found.severity == severity


@WINDOWS
@pytest.mark.parametrize(
    ("filled", "loss", "severity"),
    [(True, 1.0, "hint"), (True, np.nan, "error"), (False, 1.0, "error")],
)
def test_missing_values_that_the_model_fills_in(
    filled: bool, loss: float, severity: str, window: int
) -> None:
    tape = Tape()
    given = tape.slot("input", (4, 3), role="input", kind="input", class_="")
    layer = tape.slot("layer", (4, 3))
    rows = RNG.normal(size=(4, 3))
    gaps = np.where(np.eye(4, 3) > 0, np.nan, rows)
    for step in range(6):
        tape.record({given: gaps, layer: rows if filled else gaps}, step=step)
    tape.losses([1.0] * 5 + [loss])
    (found,) = tape.findings(Nonfinite(), window=window)
    assert (found.severity, found.place and found.place.node) == (severity, "input")


@pytest.mark.parametrize(
    ("function", "acts", "moves", "severity"),
    [
        ("mse_loss", False, False, "warning"),
        ("mul", False, False, "hint"),
        ("mse_loss", True, False, "hint"),
        ("mse_loss", False, True, "hint"),
    ],
)
def test_only_the_loss_of_a_prediction_must_fall(
    function: str, acts: bool, moves: bool, severity: str
) -> None:
    tape = Tape()
    answer = tape.slot("net", (8, 1))
    target = tape.slot("target", (8, 1), role="target", kind="target")
    action = tape.slot("target", (8, 1), role="target", kind="target", dtype="int64", iteration=1)
    tape.loss_call(function, answer, target)
    if acts:
        tape.loss_call("gather", answer, action)
    value, loss = tape.slot("critic", (8, 1), pass_="no_grad"), tape.slot("loss", (), kind="loss")
    tape.graph([(answer, loss), (target, loss)], cut=[(value, loss)] if moves else [])
    ones = np.ones((8, 1))
    for step in range(6):
        tape.record({answer: ones, target: ones, action: ones, value: ones, loss: 1.0}, step=step)
    tape.losses([1.0] * 100)
    (found,) = tape.findings(LossNotFalling())
    assert found.severity == severity


@pytest.mark.parametrize(
    ("node", "label", "found"), [("prediction", 0, 0), ("head", 0, 1), ("prediction", 1, 1)]
)
def test_the_first_similarity_is_the_right_one_in_contrastive_losses(
    node: str, label: int, found: int
) -> None:
    tape = Tape()
    logits = tape.slot(node, (16, 10))
    target = tape.slot("target", (16,), role="target", kind="target", dtype="int64")
    tape.loss_call("cross_entropy", logits, target)
    for step in range(12):
        tape.record({logits: RNG.normal(size=(16, 10)), target: np.full(16, label)}, step=step)
    assert len(tape.findings(SingleClass())) == found


@pytest.mark.parametrize(("end", "found"), [(0.1, 0), (2.7, 1)])
def test_a_first_loss_may_be_that_of_guessing_a_sample_by_chance(end: float, found: int) -> None:
    tape = Tape()
    logits = tape.slot("head", (16, 7))
    target = tape.slot("target", (16,), role="target", kind="target", dtype="int64")
    tape.loss_call("nll_loss", logits, target)
    for step in range(6):
        values = {logits: RNG.normal(size=(16, 7)), target: np.arange(16) % 7}
        tape.record(values, step=step)
    tape.losses(np.linspace(np.log(16), end, 60).tolist())
    assert len(tape.findings(BatchMixing())) == found


@pytest.mark.parametrize(("count", "found"), [(1, 0), (8, 1)])
def test_a_single_sample_has_no_known_deviation(count: int, found: int) -> None:
    tape = Tape()
    given = tape.slot("input", (count, 2), role="input", kind="input", class_="")
    for step in range(6):
        tape.record({given: 0.5 + 0.01 * RNG.normal(size=(count, 2))}, step=step)
    assert len(tape.findings(InputScale())) == found


@pytest.mark.parametrize(("share", "because"), [(0.6, None), (0.95, "dead_units")])
def test_what_impairs_nothing_explains_no_warning(share: float, because: str | None) -> None:
    """A gradient that vanishes while enough units are alive is a separate finding."""
    tape = Tape()
    names = [f"l{i}" for i in range(5)]
    layers = [tape.slot(name, (4, 6)) for name in names]
    backward = [tape.slot(name, (4, 6), pass_="grad") for name in names]
    bias, weight, other = (
        tape.slot(node, shape, role=role, kind="parameter", pass_="grad")
        for node, role, shape in (
            ("l4", "bias", (20,)),
            ("l4", "weight", (20, 4)),
            ("l3", "bias", (8,)),
        )
    )
    tape.graph([*pairwise(layers)])
    for step in range(40):
        alive = (np.arange(20) >= 20 * share).astype(float)
        sizes = [1e-6, *[1.0] * 4]
        values: dict[int, np.ndarray] = {
            slot: np.full((4, 6), size) for slot, size in zip(backward, sizes, strict=True)
        }
        values |= dict.fromkeys(layers, np.ones((4, 6)))
        values |= {bias: alive, weight: np.outer(alive, np.ones(4)), other: np.ones(8)}
        tape.record(values, step=step)
    findings = {f.rule: f for f in tape.play(DeadUnits(), VanishingGradient()).findings()}
    assert findings["vanishing_gradient"].because == because
    assert findings["dead_units"].severity == ("hint" if because is None else "warning")


def test_optimizers_that_share_a_model_are_a_hint() -> None:
    """As in an adversarial autoencoder, whose encoder is trained on two losses."""
    tape = Tape()
    facts = {"trainable": True, "optimized": True}
    both, one = {**facts, "holders": [0, 1]}, {**facts, "holders": [0]}
    tape.documents["modules"] = [
        {"path": "", "node": "encoder", "parameters": {"weight": both}},
        {"path": "", "node": "decoder", "parameters": {"weight": one}},
    ]
    (found,) = tape.findings(CompetingOptimizers())
    assert found.severity == "hint"


@WINDOWS
def test_phases_are_found_between_the_records_that_enclose_them(window: int) -> None:
    tape = Tape()
    given = tape.slot("input", (8, 4), role="input", kind="input", class_="")
    wave = RNG.normal(size=(8, 4))
    for step in range(0, 200, 10):
        tape.record({given: (2 if step >= 100 else 1) * wave * (1 + 0.01 * step % 3)}, step=step)
    phases = tape.play(window=window).scene.phases
    assert isinstance(phases, Phases)
    assert phases.data_changed(94, 95)
    assert phases.data_changed(0, 200)
    assert not phases.data_changed(0, 90)
    assert not phases.data_changed(100, 200)
    assert not phases.rate_rose(0, 200)
