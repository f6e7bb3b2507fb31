"""What works with a model whose parameters are distributed over processes, and needs no copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.launching import run_ranks


@pytest.mark.slow  # starts two processes
def test_each_rank_harvests_what_the_whole_model_computes(tmp_path: Path) -> None:
    for code, output in run_ranks("-m", "tests.ranks.harvesting", tmp_path, timeout=120):
        assert code == 0, output
        assert "distributed over processes" in output  # `look`, which needs a copy
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
