from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.viewer.model.numbers import (
    brief,
    count,
    duration,
    in_bytes,
    number,
    shape,
    signed,
    span,
)

MINUS = "\u2212"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1.000"),
        (-0.25, f"{MINUS}0.2500"),
        (1234.5678, "1235"),
        (0.0012345, "0.001234"),
        (12345.0, "1.234e4"),
        (9999.6, "1.000e4"),
        (-1.5e-12, f"{MINUS}1.500e{MINUS}12"),
        (math.inf, "\u221e"),
        (-math.inf, f"{MINUS}\u221e"),
        (math.nan, "NaN"),
    ],
)
def test_four_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_written_numbers_are_the_value_to_four_digits(value: float) -> None:
    read = float(number(value).replace(MINUS, "-"))
    assert read == pytest.approx(value, rel=5.01e-4)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.002, "0.002"),
        (1.0, "1"),
        (100.0, "100"),
        (1e-5, f"1e{MINUS}5"),
        (3e-4, f"3e{MINUS}4"),
        (0.123456789, "0.123457"),
        (1e20, "1e20"),
    ],
)
def test_settings_are_written_without_trailing_zeros(value: float, text: str) -> None:
    assert brief(value) == text
    assert float(text.replace(MINUS, "-")) == pytest.approx(value, rel=1e-5)


def test_changes_carry_their_sign() -> None:
    assert signed(0.5) == "+0.500"
    assert signed(-0.5) == f"{MINUS}0.500"
    assert signed(0.0) == "0"


def test_other_quantities() -> None:
    assert count(1234567) == "1\u202f234\u202f567"
    assert shape((8, 64)) == "8\u00d764"
    assert shape(()) == "scalar"
    assert duration(0.0015) == "1.5 ms"
    assert duration(3.25) == "3.25 s"
    assert duration(600) == "10 min 0 s"
    assert duration(9000) == "2 h 30 min"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (12, "12 B"), (999, "999 B"), (4230, "4.23 kB"), (999_600, "1 MB"),
     (47_200_000, "47.2 MB"), (2.5e9, "2.5 GB"), (3e15, "3000 TB")],
)  # fmt: skip
def test_sizes_have_the_unit_in_which_they_are_short(size: float, text: str) -> None:
    assert in_bytes(size) == text


@pytest.mark.parametrize(
    ("steps", "text"),
    [([3], "step 3"), ([3, 4, 5], "steps 3 to 5"), ([3, 5], "steps 3, 5"),
     ([1, 3, 5, 7, 9], "steps 1, 3, 5, ..., 9")],
)  # fmt: skip
def test_steps_that_follow_each_other_are_named_by_their_ends(steps: list[int], text: str) -> None:
    assert span(steps) == text
