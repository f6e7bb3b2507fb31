"""What is predicted for larger sizes is checked at a size that the fit has not seen."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.fleet import tables


def figures(at: dict[str, Any], *, factor: float = 1.0) -> dict[str, Any]:
    """Figures that lie on a line, times a factor."""
    size = next(iter(at.values()))
    line = (2.0 + 0.1 * size) * factor
    return {**at, "open": {"seconds": line, "files": line, "peak": line * 2**20}}


@pytest.mark.parametrize(("factor", "shown"), [(1.0, "1.00"), (1.25, "1.25")])
def test_the_largest_size_is_kept_out_of_the_fit(factor: float, shown: str) -> None:
    text = tables(
        {
            "date": "2026-01-01",
            "machine": {"cores": 2, "processor": "any", "load_before": 0},
            "groups": [figures({"runs": 50}), figures({"runs": 200}), figures({"runs": 1_000})],
            "ranks": [
                figures({"ranks": 4}),
                figures({"ranks": 16}),
                figures({"ranks": 64}, factor=factor),
            ],
            "long": [figures({"records": n}) for n in (10_000, 30_000, 100_000)],
        }
    )
    groups, ranks = text.split("One run of several ranks")
    ranks, long = ranks.split("One long run")
    assert "| open | 1.00; 1.00; 1.00 | 1,002 s; 1,002; 1,002 | 10,002 s;" in groups
    assert f"| open | {shown}; {shown}; {shown} | 104 s; 104; 104 | 1,640 s;" in ranks
    assert "| open | 1.00; 1.00; 1.00 | 100,002 s; 100,002; 100,002 |" in long
