"""Any writer may be killed in mid-work: nothing that a reader has seen is lost or changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.kills import KINDS
from tests.support.forked import forked

ROOT = Path(__file__).parents[2]


def killed(count: int, seed: int, *kinds: str) -> str:
    done = forked(ROOT, "-m", "tests.faults.kills", count, seed, ",".join(kinds), timeout=None)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def said_of(count: int, seed: int, *kinds: str) -> dict[str, int]:
    """Returns how many of each kind were killed in mid-work; fails if anything was lost."""
    *each, total = killed(count, seed, *kinds).splitlines()
    assert re.fullmatch(
        rf"{count} killed in mid-work, \d+ more too late, 0 with something lost or wrong", total
    )
    found = [re.fullmatch(r"(\w+): (\d+) killed in mid-work, \d+ more too late", e) for e in each]
    return {match[1]: int(match[2]) for match in found if match}


def test_a_few_kills_in_mid_work_lose_nothing() -> None:
    assert said_of(2, 1, "training", "zarr") == {"training": 1, "zarr": 1}


@pytest.mark.slow
def test_a_thousand_kills_in_mid_work_lose_nothing() -> None:
    found = said_of(1000, 1, *KINDS)
    assert found.keys() == {*KINDS}
    assert min(found.values()) == 1000 // len(KINDS)
