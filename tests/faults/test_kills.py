"""Whatever writes may be killed in mid-work: nothing that a reader has seen is lost or changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kills import KINDS
from tests.support.forked import forked

ROOT = Path(__file__).parents[2]


def killed(count: int, seed: int, *kinds: str) -> str:
    done = forked(ROOT, "-m", "tests.faults.kills", count, seed, ",".join(kinds), timeout=None)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_a_few_kills_lose_nothing() -> None:
    said = killed(2, 1, "training", "zarr")
    assert "2 killed, 0 with something lost or wrong" in said


@pytest.mark.slow
def test_a_thousand_kills_lose_nothing() -> None:
    said = killed(1000, 1, *KINDS)
    assert "1000 killed, 0 with something lost or wrong" in said
