"""Units that do almost nothing, on activations written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from comgra_decl.rules.activations.dormant import DormantParameters, DormantUnits
from tests.rules.tape import Tape

# six of ten units have this share of the magnitude of the other four
FAINT = np.array([1.0] * 4 + [0.0] * 6)
EVERY = 2
RULE = DormantParameters(every=EVERY, looks=3)


def played(unit: NDArray[np.float64], *, records: int = 12, image: bool = False) -> Tape:
    """Activations [4, 10], or channels [4, 10, 2, 3], in which units have these magnitudes."""
    tape = Tape()
    sign = np.array([1.0, -1.0, 1.0, -1.0])[:, None]
    value = sign * unit
    if image:
        value = value[..., None, None] * np.ones((2, 3))
    slot = tape.slot("act", value.shape, class_="GELU")
    for _ in range(records):
        tape.record({slot: value})
    return tape


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("window", [1, 5, 100])
@pytest.mark.parametrize(("faint", "found"), [(0.0, 1), (0.0100, 1), (0.0103, 0), (1.0, 0)])
def test_most_units_below_a_fortieth_of_the_mean_are_dormant(
    faint: float, found: int, window: int, image: bool
) -> None:
    """The mean is (4 + 6 f) / 10, and f = 0.025 of it where f = 0.1 / 9.85 = 0.01015."""
    unit = np.where(FAINT > 0, 1.0, faint)
    findings = played(unit, image=image).findings(DormantUnits(RULE), window=window)
    assert [f.evidence["share of dormant units"] for f in findings] == pytest.approx([0.6] * found)
    # records 0, 2 and 4 are checked, and judged together
    assert [f.first_step for f in findings] == [4] * found


def test_half_of_the_units_may_be_dormant() -> None:
    half = np.array([1.0] * 5 + [0.0] * 5)
    assert not played(half).findings(DormantUnits(RULE))


def test_a_unit_that_wakes_up_at_times_is_not_dormant() -> None:
    tape = Tape()
    slot = tape.slot("act", (4, 10), class_="ReLU")
    for record in range(12):
        one = np.zeros(10)
        one[record // EVERY % 3 :: 3] = 1  # another third at each check
        tape.record({slot: np.ones((4, 1)) * one})
    assert not tape.findings(DormantUnits(RULE))


def test_a_short_run_is_not_judged() -> None:
    rule = DormantUnits(RULE)
    (unchecked,) = played(FAINT, records=4).play(rule).unchecked()
    assert unchecked.reason == "it needs 5 training records; the run has 4"
