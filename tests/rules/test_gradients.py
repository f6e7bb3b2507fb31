"""Rules about gradients, on gradients written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from comgra_decl.rules.gradients.accumulated import AccumulatedGradient
from comgra_decl.rules.gradients.exploding import ExplodingGradient
from comgra_decl.rules.gradients.vanishing import VanishingGradient
from tests.rules.tape import Tape

LAYERS = 6


def chain(sizes: list[list[float]]) -> Tape:
    """A network whose layers' gradients have these l2 norms: one list per record."""
    tape = Tape()
    forward = [tape.slot(f"layer{i}", (2, 4)) for i in range(LAYERS)]
    backward = [tape.slot(f"layer{i}", (2, 4), pass_="grad") for i in range(LAYERS)]
    tape.graph([(i, i + 1) for i in range(LAYERS - 1)])
    for norms in sizes:
        values = dict.fromkeys(forward, np.ones((2, 4)))
        tape.record(
            values | {b: np.full((2, 4), n / 2) for b, n in zip(backward, norms, strict=True)}
        )
    return tape


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_gradient_that_dies_is_found_where_it_dies(window: int) -> None:
    healthy, dying = [1.0] * LAYERS, [1e-5, 1e-4, 5e-4, 1.0, 1.0, 1.0]
    (found,) = chain([healthy] * 3 + [dying] * 12).findings(VanishingGradient(), window=window)
    assert found.place is not None
    assert (found.place.node, found.place.pass_, found.first_step) == ("layer2", "grad", 3)
    assert found.also == 2
    assert found.evidence["share of the upper quartile"] == pytest.approx(5e-4)


def test_a_gradient_that_dies_over_the_training_is_found_though_it_is_not_the_smallest() -> None:
    """The first layer's share falls from 10 to 0.009 of the upper quartile, which is 1."""
    early, later = [10.0, 1.0, 1.0, 1.0, 1.0, 1.0], [9e-3, 1.0, 1.0, 1.0, 1.0, 1.0]
    (found,) = chain([early] * 6 + [later] * 12).findings(VanishingGradient())
    assert found.place is not None
    assert (found.place.node, found.first_step, found.also) == ("layer0", 6, 0)
    assert not chain([early] * 6 + [[1.1e-2, *later[1:]]] * 12).findings(VanishingGradient())


def test_a_gradient_of_zero_or_a_little_less_is_not_vanishing() -> None:
    assert not chain([[0.0, 2e-3, 1, 1, 1, 1]] * 20).findings(VanishingGradient())


def test_nine_records_are_not_yet_ten() -> None:
    assert not chain([[1e-5, 1, 1, 1, 1, 1]] * 9).findings(VanishingGradient())


def test_a_gradient_that_grows_towards_the_input_explodes() -> None:
    (found,) = chain([[5000.0, 1e3, 100, 10, 1, 1]] * 3).findings(ExplodingGradient())
    assert found.place is not None
    assert found.place.node == "layer0"
    assert found.evidence["times too large"] == pytest.approx(5.0)


def test_gradients_that_grow_over_training_explode_at_the_step_where_they_do() -> None:
    (found,) = chain([[1.0] * 6] * 8 + [[200.0] * 6] * 3).findings(ExplodingGradient())
    assert found.first_step == 8


def test_gradients_that_grow_ten_times_do_not_explode() -> None:
    assert not chain([[1.0] * 6] * 8 + [[10.0] * 6] * 30).findings(ExplodingGradient())


def layers_with_weights(gradients: list[float]) -> Tape:
    """Three layers; the gradients of their weights are these factors times fixed numbers."""
    tape = Tape()
    rng = np.random.default_rng(0)
    outputs = [tape.slot(f"l{i}", (2, 4), pass_="grad") for i in range(3)]
    weights = [
        tape.slot(f"l{i}", (4, 4), role="weight", pass_="grad", kind="parameter") for i in range(3)
    ]
    base = [rng.normal(1, 0.1, (4, 4)) for _ in weights]
    for factor in gradients:
        noise = {w: factor * b for w, b in zip(weights, base, strict=True)}
        tape.record(dict.fromkeys(outputs, np.ones((2, 4))) | noise)
    return tape


def test_gradients_that_nobody_clears_add_up() -> None:
    (found,) = layers_with_weights([float(i) for i in range(1, 20)]).findings(AccumulatedGradient())
    # the median of the first three is 2, and three times that is exceeded at 7, the seventh record
    assert found.first_step == 6
    assert found.evidence["growth against the output's gradient"] == pytest.approx(19 / 2)


def test_gradients_that_change_their_sign_are_not_added_up() -> None:
    signs = [float(i) * (-1) ** i for i in range(1, 20)]
    assert not layers_with_weights(signs).findings(AccumulatedGradient())
