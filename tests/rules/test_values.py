"""Rules about values, activations, attention and precision, on tensors written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from comgra_decl.records import STATISTICS
from comgra_decl.rules.activations.dead import DeadUnits
from comgra_decl.rules.activations.rank import RankCollapse
from comgra_decl.rules.activations.saturated import Saturated
from comgra_decl.rules.activations.spread import ActivationDrift, PoorInitialisation
from comgra_decl.rules.precision.half import HalfOverflow, HalfUnderflow
from comgra_decl.rules.precision.nonfinite import Nonfinite
from comgra_decl.rules.values.independent import InputIndependence
from comgra_decl.rules.values.zero import AllZero
from tests.rules.tape import Tape

ONES = np.ones((4, 6))


def network() -> tuple[Tape, list[int]]:
    tape = Tape()
    slots = [tape.slot(name, (4, 6)) for name in ("a", "b", "c")]
    tape.graph([(0, 1), (1, 2)])
    return tape, slots


def test_nan_is_found_at_its_origin_with_its_sample() -> None:
    tape, (a, b, c) = network()
    bad = ONES.copy()
    bad[2, 1] = np.nan
    for step in range(5):
        tape.record({a: ONES, b: bad if step > 2 else ONES, c: bad * 2 if step > 2 else ONES})
    (found,) = tape.findings(Nonfinite())
    assert found.place is not None
    assert (found.place.node, found.first_step, found.sample, found.also) == ("b", 3, 2, 1)


def test_a_nan_in_the_backward_is_later_in_the_step_than_one_in_the_forward() -> None:
    tape, (a, b, c) = network()
    gradient = tape.slot("a", (4, 6), pass_="grad")
    tape.record({a: ONES, b: ONES, c: ONES * np.inf, gradient: ONES * np.nan})
    (found,) = tape.findings(Nonfinite())
    assert found.place is not None
    assert (found.place.node, found.place.pass_) == ("c", "forward")


def test_a_mask_is_not_wrong() -> None:
    tape, (a, b, c) = network()
    mask = ONES.copy()
    mask[:, 3] = -np.inf
    for _ in range(5):
        tape.record({a: mask, b: ONES, c: ONES})
    assert not tape.findings(Nonfinite())


def test_half_precision_overflow_and_underflow() -> None:
    tape = Tape()
    value = tape.slot("a", (4, 6), dtype="float16")
    gradient = tape.slot("a", (4, 6), dtype="float16", pass_="grad")
    for step in range(6):
        tape.record({value: ONES * (40_000 if step == 3 else 30_000), gradient: ONES * 1e-6})
    (over,) = tape.findings(HalfOverflow())
    assert (over.first_step, over.last_step) == (3, 3)
    assert over.evidence["largest magnitude"] == 40_000
    (under,) = tape.findings(HalfUnderflow())
    assert under.first_step == 0


def dead(zeros: int, *, other: float = 1.0) -> Tape:
    tape = Tape()
    first = tape.slot("a", (10,), role="bias", pass_="grad", kind="parameter")
    second = tape.slot("b", (10,), role="bias", pass_="grad", kind="parameter")
    gradient = np.ones(10)
    gradient[:zeros] = 0
    for _ in range(6):
        tape.record({first: gradient, second: np.full(10, other)})
    return tape


def test_units_whose_bias_has_no_gradient_are_dead() -> None:
    (found,) = dead(6).findings(DeadUnits())
    assert found.evidence["share of zeros"] == pytest.approx(0.6)
    assert "60% of the units of a" in found.message


def test_half_of_the_units_may_be_inactive_and_nothing_trained_is_another_matter() -> None:
    assert not dead(5).findings(DeadUnits())
    assert not dead(10, other=0.0).findings(DeadUnits())


def test_a_rectifier_that_returns_zeros_is_dead() -> None:
    tape = Tape()
    relu = tape.slot("act", (4, 100), class_="ReLU")
    sparse, gone = np.ones((4, 100)), np.zeros((4, 100))
    sparse[:, 10:] = 0
    gone[0, 0] = 1
    for step in range(12):
        tape.record({relu: sparse if step < 5 else gone})
    (found,) = tape.findings(DeadUnits())
    assert found.first_step == 5


def test_a_rectifier_that_is_given_zeros_is_not_to_blame() -> None:
    tape = Tape()
    before, relu = tape.slot("lin", (4, 6)), tape.slot("act", (4, 6), class_="ReLU")
    tape.graph([(before, relu)])
    for _ in range(8):
        tape.record({before: 0 * ONES, relu: 0 * ONES})
    assert not tape.findings(DeadUnits())
    (zero,) = tape.findings(AllZero())
    assert str(zero.place) == "lin"


@pytest.mark.parametrize(
    ("class_", "value", "slope"), [("Tanh", 0.99, 1 - 0.99**2), ("Sigmoid", 0.999, 4 * 0.000999)]
)
def test_saturation_is_a_flat_slope(class_: str, value: float, slope: float) -> None:
    tape = Tape()
    act = tape.slot("act", (4, 6), class_=class_)
    half_way = tape.slot("half", (4, 6), class_=class_)
    for step in range(9):
        tape.record({act: ONES * (0.5 if step < 3 else value), half_way: ONES * 0.9})
    (found,) = tape.findings(Saturated())
    assert (found.first_step, found.also) == (3, 0)
    assert found.evidence["relative slope"] == pytest.approx(slope, rel=1e-3)


def spread(sizes: Sequence[Sequence[float]]) -> Tape:
    tape = Tape()
    rng = np.random.default_rng(1)
    wave = rng.normal(0, 1, (4, 50))
    slots = [tape.slot(f"l{i}", (4, 50)) for i in range(len(sizes[0]))]
    for i in range(len(slots)):
        tape.slot(f"l{i}", (50, 50), role="weight", kind="parameter")
    for line in sizes:
        tape.record({slot: size * wave for slot, size in zip(slots, line, strict=True)})
    return tape


def test_a_layer_that_grows_after_the_first_record_is_not_poorly_initialised() -> None:
    lines: list[list[float]] = [[1, 1, 1, 1, 1], *[[1, 1, 10.0**n, 1, 1] for n in range(3, 8)]]
    assert not spread(lines).findings(PoorInitialisation())
    (found,) = spread([[1, 1, 100, 1, 1], *lines[1:]]).findings(PoorInitialisation())
    assert found.evidence["times too large"] == pytest.approx(100, rel=0.05)


def test_a_layer_that_begins_far_too_large_is_poorly_initialised() -> None:
    (found,) = spread([[1, 1, 100, 1, 1]] * 4).findings(PoorInitialisation())
    assert found.place is not None
    assert found.place.node == "l2"
    assert found.evidence["times too large"] == pytest.approx(100, rel=1e-3)


def test_a_signal_that_dies_with_depth_is_poorly_initialised() -> None:
    falling = [1.0, 1.0, 1.0, 1e-2, 1e-4]  # the limit is 1 / 900 of the median, 1
    (found,) = spread([falling] * 4).findings(PoorInitialisation())
    assert found.place is not None
    assert (found.place.node, found.also) == ("l4", 0)


def test_layers_of_ten_times_another_size_are_well_initialised() -> None:
    assert not spread([[1, 10, 0.1, 1, 5]] * 4).findings(PoorInitialisation())
    assert not spread([[1] * 5] * 11 + [[1, 1, 100, 1, 1]] * 5).findings(PoorInitialisation())


def test_activations_that_grow_without_end_drift() -> None:
    (found,) = spread([[1.0, 1.0]] * 6 + [[1.0, 150.0]] * 4).findings(ActivationDrift())
    assert (found.first_step, found.also) == (6, 0)
    assert found.evidence["times its initial size"] == pytest.approx(150, rel=1e-3)


def test_a_branch_that_begins_at_next_to_nothing_may_grow_into_its_network() -> None:
    small = [[1.0, 1.0, 1e-4]] * 6
    assert not spread([*small, *[[1.0, 1.0, 90.0]] * 4]).findings(ActivationDrift())
    (found,) = spread([*small, *[[1.0, 1.0, 110.0]] * 4]).findings(ActivationDrift())
    assert found.evidence["times its initial size"] == pytest.approx(110, rel=1e-3)


def test_activations_that_fade_away_drift() -> None:
    (found,) = spread([[1.0, 1.0]] * 6 + [[1.0, 1 / 1500]] * 4).findings(ActivationDrift())
    assert found.evidence["times its initial size"] == pytest.approx(1500, rel=1e-3)
    assert not spread([[1.0, 1.0]] * 6 + [[1.0, 1 / 900]] * 4).findings(ActivationDrift())


@pytest.mark.parametrize(("rank", "steps"), [(3.9, [6]), (4.1, [])])  # of 20 at first
def test_a_weight_that_keeps_a_fifth_of_its_rank_has_not_collapsed(
    rank: float, steps: list[int]
) -> None:
    tape = Tape(statistics=(*STATISTICS, "effective_rank"))
    weight = tape.slot("a", (20, 20), role="weight", kind="parameter")
    other = tape.slot("b", (20, 20), role="weight", kind="parameter")
    for step in range(12):
        tape.record({weight: ONES, other: ONES})
        tape.extra.append({weight: [rank if step > 5 else 20.0], other: [20.0]})
    found = tape.findings(RankCollapse())
    assert [(str(f.place), f.first_step, f.also) for f in found] == [
        ("a weight", step, 0) for step in steps
    ]


def test_rank_says_what_it_lacks() -> None:
    tape, slots = network()
    tape.record(dict.fromkeys(slots, ONES))
    (unchecked,) = tape.play(RankCollapse()).unchecked()
    assert "effective_rank" in unchecked.reason


def test_outputs_that_become_equal_for_all_samples_do_not_depend_on_the_input() -> None:
    tape, (a, b, c) = network()
    rng = np.random.default_rng(2)
    for step in range(14):
        varied = rng.normal(0, 1, (4, 6))
        tape.record({a: varied, b: varied if step < 6 else ONES * step, c: ONES})
    (found,) = tape.findings(InputIndependence())
    assert found.place is not None
    # c never varied (nor does a positional embedding), and is not an output
    assert (found.place.node, found.first_step, found.also) == ("b", 6, 0)


@pytest.mark.parametrize("iterations", [1, 2])
def test_the_first_state_of_a_loop_may_be_zero(iterations: int) -> None:
    tape = Tape()
    slots = [tape.slot("cell", (4, 6), iteration=i) for i in range(2)]
    for _ in range(8):
        tape.record({slot: ONES * (i >= iterations) for i, slot in enumerate(slots)})
    assert [found.also for found in tape.findings(AllZero())] == [1] * (iterations == 2)


def test_an_output_of_zeros_is_found() -> None:
    tape, (a, b, c) = network()
    for step in range(8):
        tape.record({a: ONES, b: ONES * (step < 2), c: ONES})
    (found,) = tape.findings(AllZero())
    assert found.place is not None
    assert (found.place.node, found.first_step) == ("b", 2)
