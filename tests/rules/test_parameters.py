"""Rules about parameters, on parameters written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from comgra_decl.rules.parameters.frozen import FrozenMoves
from comgra_decl.rules.parameters.growing import GrowingWeight
from comgra_decl.rules.parameters.untrained import Untrained
from comgra_decl.rules.parameters.update_ratio import LargeUpdate, SmallUpdate
from tests.rules.tape import Tape

WEIGHT = np.full((4, 4), 0.5)  # l2 norm 2


def network(*, trainable: tuple[bool, bool] = (True, True)) -> tuple[Tape, int, int]:
    tape = Tape()
    a = tape.slot("a", (4, 4), role="weight", kind="parameter")
    b = tape.slot("b", (4, 4), role="weight", kind="parameter")
    tape.documents["modules"] = [
        {"node": name, "parameters": {"weight": {"trainable": can, "tied_to": None}}}
        for name, can in zip("ab", trainable, strict=True)
    ]
    return tape, a, b


def gradients(tape: Tape, *nodes: str) -> list[int]:
    return [tape.slot(n, (4, 4), role="weight", kind="parameter", pass_="grad") for n in nodes]


def test_a_parameter_without_any_gradient_is_untrained() -> None:
    tape, a, b = network()
    (grad,) = gradients(tape, "b")
    for _ in range(6):
        tape.record({a: WEIGHT, b: WEIGHT, grad: WEIGHT})
    (found,) = tape.findings(Untrained())
    assert found.place is not None
    assert (found.place.node, found.place.role, found.first_step) == ("a", "weight", 0)


def test_a_gradient_of_exactly_zero_trains_nothing() -> None:
    tape, a, b = network()
    first, second = gradients(tape, "a", "b")
    for _ in range(6):
        tape.record({a: WEIGHT, b: WEIGHT, first: WEIGHT, second: 0 * WEIGHT})
    (found,) = tape.findings(Untrained())
    assert found.place is not None
    assert found.place.node == "b"


def test_what_is_frozen_need_not_be_trained_and_must_not_move() -> None:
    tape, a, b = network(trainable=(False, True))
    (grad,) = gradients(tape, "b")
    for step in range(6):
        tape.record({a: WEIGHT * 1.01**step, b: 2 * WEIGHT * 1.01**step, grad: WEIGHT})
    assert not tape.findings(Untrained())
    (found,) = tape.findings(FrozenMoves())
    assert found.place is not None
    assert (found.place.node, found.also) == ("a", 0)
    assert found.evidence["relative change"] == pytest.approx(0.01, rel=1e-3)


def test_an_update_of_a_third_of_the_weight_is_large() -> None:
    tape, a, b = network()
    update = tape.slot("a", (4, 4), role="weight", kind="parameter", pass_="update")
    for step in range(8):
        tape.record({a: WEIGHT, b: WEIGHT, update: WEIGHT * (0.3 if step > 3 else 0.1)})
    (found,) = tape.findings(LargeUpdate())
    assert found.first_step == 4
    assert found.evidence["update / weight"] == pytest.approx(0.3, rel=1e-5)


def test_without_updates_the_change_of_the_norm_stands_for_them() -> None:
    tape, a, b = network()
    for step in range(5):
        tape.record({a: WEIGHT, b: WEIGHT * 1.5**step})
    (found,) = tape.findings(LargeUpdate())
    assert found.place is not None
    assert (found.place.node, found.first_step) == ("b", 1)
    sparse, a, b = network()
    for step in range(5):
        sparse.record({a: WEIGHT, b: WEIGHT * 1.5**step}, step=10 * step)
    assert not sparse.findings(LargeUpdate())


@pytest.mark.parametrize(("ratio", "found"), [(1e-7, 1), (1e-4, 0)])
def test_updates_of_a_ten_millionth_change_nothing(ratio: float, found: int) -> None:
    tape, a, b = network()
    update = tape.slot("a", (4, 4), role="weight", kind="parameter", pass_="update")
    for _ in range(10):
        tape.record({a: WEIGHT, b: WEIGHT, update: WEIGHT * ratio})
    findings = tape.findings(SmallUpdate())
    assert [f.evidence["update / weight"] for f in findings] == pytest.approx(
        [ratio] * found, rel=1e-4
    )


@pytest.mark.parametrize(("size", "found"), [(0.0, 0), (2.9e-3, 0), (3.1e-3, 1)])
def test_a_weight_that_begins_near_zero_may_grow(size: float, found: int) -> None:
    """Like LoRA's B, gates and zero-initialised residual branches."""
    tape, a, b = network()
    for step in range(10):
        grown = np.full((4, 4), size if step < 6 else max(1000 * size, 1.0))
        tape.record({a: WEIGHT, b: grown})
    assert len(tape.findings(GrowingWeight())) == found


def test_a_weight_that_grows_to_twelve_times_its_size_grows_without_end() -> None:
    tape, a, b = network()
    for step in range(10):
        tape.record({a: WEIGHT, b: WEIGHT * (12 if step > 5 else 1)})
    (found,) = tape.findings(GrowingWeight())
    assert (found.first_step, found.evidence["times its initial or usual size"]) == (6, 12)
