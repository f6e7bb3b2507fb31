"""A run's report in words."""

from __future__ import annotations

from typing import Any

import pytest

from comgra_decl.query.report import price_text

BOTH = {"host": 0.01, "device": 0.05}
ONE = {"host": 0.0123456, "device": None}


@pytest.mark.parametrize(
    ("price", "text"),
    [
        (None, None),
        ({"plain": {"host": None, "device": None}, "added": ONE}, None),
        ({"plain": ONE, "added": BOTH}, "a record adds 10 ms to a step of 12.3 ms (host)"),
        (
            {"plain": BOTH, "added": BOTH, "once": 0.01},
            "a record adds 50 ms to a step of 50 ms (device), 10 ms to a step of 10 ms (host)",
        ),
        (
            {"records": 1, "plain": ONE, "added": BOTH},
            "the first record, which found the model, added 10 ms to a step of 12.3 ms (host)",
        ),
        (
            {"records": 2, "plain": {"host": 0.009}, "added": ONE, "once": 9.0},
            "a record adds 12.3 ms to a step of 9 ms (host), plus 9 s once, for compiling",
        ),
    ],
)
def test_the_price_of_a_record_is_told_as_far_as_it_was_measured(price: Any, text: str) -> None:
    assert price_text({"price": price} if price else {}) == text
