"""One file of a run is damaged at random: no wrong number, no crash, no hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strangers.corruption import _same, differences
from tests.support.forked import forked

ROOT = Path(__file__).parents[2]


def fuzzed(count: int, seed: int) -> str:
    done = forked(ROOT, "-m", "tests.strangers.corruption", count, seed, timeout=None)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_damage_to_any_file_gives_no_wrong_number() -> None:
    assert "4 tried" in fuzzed(4, 1)


@pytest.mark.slow
def test_a_thousand_damages_to_any_file_give_no_wrong_number() -> None:
    assert "1000 tried" in fuzzed(1000, 7)


def test_what_is_compared_would_show_a_wrong_number() -> None:
    truth = {"series": {0: 1.0, 1: 2.0, 2: float("nan")}}
    assert differences({"series": {0: 1.0, 1: float("nan")}}, truth) == []
    assert len(differences({"series": {0: 2.0}}, truth)) == 1
    assert len(differences({"series": {2: 2.0}}, truth)) == 1
    assert len(differences({"series": {9: 2.0}}, truth)) == 1
    assert not _same(1.0, 2.0)
