"""What an optimizer holds determines which parameters may change, and which should."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from comgra_decl.rules.activations.dead import DeadUnits
from comgra_decl.rules.parameters.frozen import FrozenMoves
from comgra_decl.rules.parameters.many_frozen import ManyFrozen
from comgra_decl.rules.parameters.untrained import Untrained
from tests.rules.tape import Tape

WEIGHT = np.full((4, 4), 0.5)
LAYERS = ("a", "b", "c")


def network(
    *,
    left_out: str,
    moves: bool = False,
    gradient: bool = True,
    records: int = 6,
    copied: bool = False,
) -> Tape:
    """Three layers that run in turn; one is in no optimizer and may be a copy of another."""
    tape = Tape()
    tape.documents["modules"] = [
        {
            "path": name,
            "node": name,
            "class": "Linear",
            "parameters": {"weight": {"shape": [4, 4], "trainable": True,
                                      "optimized": name != left_out, "tied_to": None}},
        }
        for name in LAYERS
    ]  # fmt: skip
    outputs = [tape.slot(name, (8, 4)) for name in LAYERS]
    weights = [tape.slot(name, (4, 4), role="weight", kind="parameter") for name in LAYERS]
    backward = [
        tape.slot(name, (4, 4), role="weight", kind="parameter", pass_="grad")
        for name in LAYERS
        if name != left_out or gradient
    ]
    loss = tape.slot("loss", (), kind="loss")
    tape.graph(
        [*zip(weights, outputs, strict=True), *zip(outputs, [*outputs[1:], loss], strict=True)]
    )
    for record in range(records):
        tensors = dict.fromkeys(outputs, np.ones((8, 4))) | dict.fromkeys(backward, WEIGHT)
        for number, (name, weight) in enumerate(zip(LAYERS, weights, strict=True)):
            still = name == left_out and not moves
            tensors[weight] = (
                WEIGHT * (1 if still else 1.01**record) * (1 if copied else 1 + number)
            )
        tape.record(tensors)
    return tape


@pytest.mark.parametrize("window", [1, 4, 100])
@pytest.mark.parametrize(
    ("left_out", "severity"), [("c", "error"), ("b", "warning"), ("a", "hint")]
)
def test_a_layer_in_no_optimizer_is_the_worse_the_nearer_to_the_loss(
    left_out: str, severity: str, window: int
) -> None:
    (finding,) = network(left_out=left_out).findings(Untrained(), window=window)
    assert (str(finding.place), finding.severity) == (f"{left_out} weight", severity)


def test_what_begins_as_a_copy_of_trained_weights_may_be_a_target_network() -> None:
    (finding,) = network(left_out="c", copied=True).findings(Untrained())
    assert finding.severity == "hint"


@pytest.mark.parametrize(
    "tape",
    [
        network(left_out="c", moves=True),  # the program updates it itself
        network(left_out="c", gradient=False, moves=True),
        network(left_out="c", gradient=False),  # a teacher
        network(left_out="c", records=2),  # too few to tell
        network(left_out=""),
    ],
)
def test_what_moves_or_is_held_is_trained(tape: Tape) -> None:
    assert tape.findings(Untrained()) == []


@pytest.mark.parametrize("optimized", [True, False])
def test_a_frozen_parameter_that_moves_is_wrong_only_in_an_optimizer(optimized: bool) -> None:
    tape = Tape()
    weight = tape.slot("a", (4, 4), role="weight", kind="parameter")
    facts = {"shape": [4, 4], "trainable": False, "optimized": optimized}
    tape.documents["modules"] = [{"path": "", "node": "a", "parameters": {"weight": facts}}]
    for record in range(6):
        tape.record({weight: WEIGHT * 1.01**record})
    assert len(tape.findings(FrozenMoves())) == optimized


@pytest.mark.parametrize(("began", "found"), [(1.0, 0), (1.1, 1)])
def test_a_moving_average_in_an_optimizer_is_no_frozen_parameter(began: float, found: int) -> None:
    tape = Tape()
    names = ("online", "target")
    online, target = (tape.slot(n, (4, 4), role="weight", kind="parameter") for n in names)
    tape.documents["modules"] = [
        {
            "path": name,
            "node": name,
            "parameters": {
                "weight": {"shape": [4, 4], "trainable": name == "online", "optimized": True}
            },
        }
        for name in names
    ]
    for record in range(6):
        tape.record({online: WEIGHT * 1.1**record, target: WEIGHT * began * 1.01**record})
    assert len(tape.findings(FrozenMoves())) == found


@pytest.mark.parametrize(("scaled", "found"), [(True, 0), (False, 1)])
def test_the_bias_of_a_normalization_may_cancel_out_in_a_difference(
    scaled: bool, found: int
) -> None:
    tape = Tape()
    facts = {"shape": [4], "trainable": True, "optimized": True}
    tape.documents["modules"] = [
        {"path": "norm", "node": "norm", "parameters": {"weight": facts, "bias": facts}},
        {"path": "out", "node": "out", "parameters": {"bias": facts}},
    ]
    gradients = [
        tape.slot(node, (4,), role=role, kind="parameter", pass_="grad")
        for node, role in (("norm", "weight"), ("norm", "bias"), ("out", "bias"))
    ]
    for _ in range(30):
        sizes = (float(scaled), 0.0, 1.0)
        tape.record({slot: np.full(4, size) for slot, size in zip(gradients, sizes, strict=True)})
    assert len(tape.findings(Untrained())) == found


def models(*parts: Sequence[tuple[int, bool]]) -> Tape:
    """Models, each with parameters of these sizes, some of which can be trained."""
    tape = Tape()
    tape.documents["modules"] = [
        {
            "path": "" if number == 0 else str(number),
            "node": f"{model}.{number}",
            "class": "Linear",
            "parameters": {"weight": {"shape": [size], "trainable": trainable}},
        }
        for model, sizes in enumerate(parts)
        for number, (size, trainable) in enumerate(sizes)
    ]
    for _ in range(3):
        tape.record({})
    return tape


@pytest.mark.parametrize(
    ("tape", "evidence"),
    [
        (models([(10, False), (90, True)]), []),
        (models([(11, False), (89, True)]), [{"frozen": 11, "all": 100}]),
        (models([(100, True)], [(100, False)]), []),  # an average, or a teacher
        (models([(100, True)], [(50, False), (50, True)]), [{"frozen": 50, "all": 200}]),
    ],
)
def test_frozen_parameters_count_in_models_that_are_trained(
    tape: Tape, evidence: list[dict[str, int]]
) -> None:
    assert [finding.evidence for finding in tape.findings(ManyFrozen())] == evidence


@pytest.mark.parametrize(("weight_zeros", "found"), [(0, 0), (3, 1), (4, 0)])
def test_units_are_dead_if_neither_bias_nor_weight_has_a_gradient(
    weight_zeros: int, found: int
) -> None:
    """A bias alone cancels out behind its layer; and where everything is zero, nothing trains."""
    tape = Tape()
    bias = tape.slot("a", (4,), role="bias", kind="parameter", pass_="grad")
    weight = tape.slot("a", (4, 5), role="weight", kind="parameter", pass_="grad")
    zeros = 3 if weight_zeros < 4 else 4
    for _ in range(12):
        rows = np.ones((4, 5))
        rows[:weight_zeros] = 0
        tape.record({bias: (np.arange(4) >= zeros).astype(float), weight: rows})
    findings = tape.findings(DeadUnits())
    assert [finding.evidence["share of zeros"] for finding in findings] == [0.75] * found
