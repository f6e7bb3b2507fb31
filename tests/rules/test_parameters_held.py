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


def network(*, left_out: str, moves: bool = False, gradient: bool = True, records: int = 6) -> Tape:
    """Three layers that run in turn; one is in no optimizer."""
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
        for name, weight in zip(LAYERS, weights, strict=True):
            still = name == left_out and not moves
            tensors[weight] = WEIGHT * (1 if still else 1.01**record)
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
