"""Where the bins of histograms lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.bins import bends, edges_of, fractions_of

ENDS = st.floats(-1e6, 1e6, width=32)


@given(ENDS, ENDS, st.integers(1, 100), st.sampled_from(["signed_log", "linear"]))
def test_edges_ascend_from_end_to_end_and_are_found_again(
    a: float, b: float, bins: int, spacing: str
) -> None:
    low, high = sorted((a, b))
    edges = edges_of(low, high, bins, spacing)  # type: ignore[arg-type]
    assert (edges[0], edges[-1]) == (low, high)
    assert (np.diff(edges) >= 0).all()
    if high - low > 1e-6 * max(abs(low), abs(high)):
        found = fractions_of(edges, low, high, spacing)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, np.arange(bins + 1) / bins, atol=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "curved"),
    [
        (-0.1, 0.2, True),
        (0.0, 3.7, True),
        (0.0, 9.0, False),  # classes
        (97.3, 103.2, False),  # far from zero
        (0.5, 9.5, True),
        (0.3, 0.3, False),
        (np.nan, np.nan, False),
    ],
)
def test_bins_are_finer_near_zero_where_that_gains_something(
    low: float, high: float, curved: bool
) -> None:
    widths = np.diff(edges_of(low, high, 64, "signed_log"))
    assert bool(bends(low, high, "signed_log")) is curved
    assert not bends(low, high, "linear")
    if curved:
        assert widths.max() > 5 * widths.min()
    elif np.isfinite(low):
        np.testing.assert_allclose(widths, (high - low) / 64, rtol=1e-6)


def test_a_symmetric_range_has_symmetric_bins_of_one_ratio() -> None:
    edges = edges_of(-2.5, 2.5, 64, "signed_log")
    np.testing.assert_allclose(edges, -edges[::-1], atol=1e-12)
    ratios = edges[40:] / edges[39:-1]  # far from zero, each edge is the same multiple of the last
    np.testing.assert_allclose(ratios, ratios[-1], rtol=0.05)
