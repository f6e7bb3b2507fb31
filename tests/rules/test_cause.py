"""Where a finding began: chains through the graph, on magnitudes written by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from comgra_decl.rules import Finding, Rule
from comgra_decl.rules.activations.dead import DeadUnits
from comgra_decl.rules.activations.spread import ActivationDrift
from comgra_decl.rules.gradients.vanishing import VanishingGradient
from comgra_decl.rules.parameters.untrained import Untrained
from comgra_decl.rules.precision.nonfinite import Nonfinite
from comgra_decl.rules.values.zero import AllZero
from tests.rules.tape import Tape

WAVE = np.random.default_rng(4).normal(size=(4, 6))
RECORDS = 20


def layers(begins: Sequence[int | None], *, pass_: str = "forward", size: float = 1e3) -> Tape:
    """A chain of layers; the magnitude of each changes at one record, or never."""
    tape = Tape()
    forward = [tape.slot(f"l{i}", (4, 6)) for i in range(len(begins))]
    siblings = [tape.slot(f"usual{i}", (4, 6)) for i in range(6)]
    tape.graph([*itertools.pairwise(forward)])
    changing = forward
    if pass_ != "forward":
        changing = [tape.slot(f"l{i}", (4, 6), pass_=pass_) for i in range(len(begins))]
    for step in range(RECORDS):
        late = [begin is not None and step >= begin for begin in begins]
        sizes = dict(zip(changing, np.where(late, size, 1.0), strict=True))
        tape.record(
            {slot: WAVE * sizes.get(slot, 1.0) for slot in {*forward, *siblings, *changing}}
        )
    return tape


def found(tape: Tape, *rules: Rule) -> dict[str, Finding]:
    return {finding.rule: finding for finding in tape.play(*rules).findings()}


def chain(finding: Finding) -> list[tuple[str, int]]:
    return [(str(link.place), link.first_step) for link in finding.chain]


@pytest.mark.parametrize(
    ("begins", "expected"),
    [
        ([None, 8, 8, 8], [("l1", 8), ("l2", 8), ("l3", 8)]),
        ([None, 6, 7, 8], [("l1", 6), ("l2", 7), ("l3", 8)]),
        ([8, None, 8, 8], [("l2", 8), ("l3", 8)]),  # a usual value ends the walk
        ([None, None, None, 8], []),  # it began here
        ([None, 12, 8, 8], [("l2", 8), ("l3", 8)]),  # a cause does not come after its effect
        ([6, 5, 8, 8], [("l1", 5), ("l2", 8), ("l3", 8)]),  # the earliest, not the furthest
    ],
)
def test_values_come_from_the_earliest_unusual_tensor_upstream(
    begins: list[int | None], expected: list[tuple[str, int]]
) -> None:
    tape = layers(begins)
    drift = found(tape, OnlyLast())["activation_drift"]
    assert str(drift.place) == "l3"
    assert chain(drift) == expected


class OnlyLast(ActivationDrift):
    """Checks only the last layer, so that the others are unusual only in magnitude."""

    def chosen(self, scene, fired):  # type: ignore[no-untyped-def]
        return fired[fired == 3]

    def marks(self) -> dict[int, int]:
        return {}


def test_gradients_come_from_downstream() -> None:
    tape = layers([8, 8, 8, None, None, None, None], pass_="grad", size=1e-6)
    vanishing = found(tape, VanishingGradient())["vanishing_gradient"]
    assert str(vanishing.place) == "l2 (grad)"  # nearest to the loss: it begins here
    assert chain(vanishing) == []


def test_an_origin_has_no_cause_that_came_later() -> None:
    """A NaN in a loop's second call corrupts the weights, and then the entire next step."""
    tape = Tape()
    first, second = (tape.slot("cell", (4, 6), iteration=i) for i in range(2))
    tape.graph([(first, second)])
    bad = WAVE.copy()
    bad[1, 2] = np.nan
    for step in range(8):
        tape.record({first: bad if step > 5 else WAVE, second: bad if step > 4 else WAVE})
    nonfinite = found(tape, Nonfinite())["nonfinite"]
    assert (str(nonfinite.place), nonfinite.first_step) == ("cell, iteration 1", 5)
    assert (nonfinite.sample, chain(nonfinite)) == (1, [])


@pytest.mark.parametrize("dead", [True, False])
def test_a_layer_without_gradient_is_explained_by_a_dead_rectifier(dead: bool) -> None:
    tape = Tape()
    names = ("first", "act", "last")
    outputs = [tape.slot(n, (4, 6), class_="ReLU" if n == "act" else "Linear") for n in names]
    slopes = [tape.slot(n, (6,), role="bias", kind="parameter", pass_="grad") for n in names[::2]]
    tape.graph([(outputs[0], outputs[1]), (outputs[1], outputs[2])])
    for _ in range(8):
        values = dict(zip(outputs, [WAVE, WAVE * (not dead), WAVE], strict=True))
        tape.record({**values, slopes[0]: np.zeros(6), slopes[1]: np.ones(6)})
    said = found(tape, Untrained(), DeadUnits(), AllZero())
    assert said["untrained_parameter"].because == ("dead_units" if dead else None)
    assert str(said["dead_units"].place) == ("act" if dead else "first bias (grad)")
    if dead:
        assert said["all_zero"].because is not None


def test_of_gradients_of_zero_the_one_nearest_to_the_loss_is_named() -> None:
    tape = Tape()
    for name in "abc":
        tape.slot(name, (4, 6))
    slopes = [tape.slot(n, (6, 6), role="weight", kind="parameter", pass_="grad") for n in "abc"]
    for _ in range(6):
        tape.record(
            dict(zip(slopes, [np.zeros((6, 6)), np.zeros((6, 6)), np.ones((6, 6))], strict=True))
        )
    untrained = found(tape, Untrained())["untrained_parameter"]
    assert untrained.place is not None
    assert (untrained.place.node, untrained.also) == ("b", 1)


def test_a_tensor_that_was_always_unlike_its_siblings_is_no_cause_of_what_comes_later() -> None:
    always = layers([0, 8, 8, 8])
    assert chain(found(always, OnlyLast())["activation_drift"]) == [("l1", 8), ("l2", 8), ("l3", 8)]
