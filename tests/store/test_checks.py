"""Verdicts that are noted beside a run come back; what else lies there is no verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.errors import StoreError
from comgra_decl.store.checks import FOLDER, NotedCheck, note_check, noted_checks

CHECK = NotedCheck("batch_mixing", "good", "replacing all others changes no answer", "x", 12.5)


def test_the_newest_verdict_of_each_experiment_is_kept(tmp_path: Path) -> None:
    assert noted_checks(tmp_path) == []
    other = NotedCheck("overfit_one_batch", "bad", "the loss stays", "y", 14.0)
    newer = NotedCheck("batch_mixing", "unclear", "one sample", "z", 13.0)
    for check in (CHECK, other, newer):
        note_check(tmp_path, check)
    assert noted_checks(tmp_path) == [newer, other]
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [
        "batch_mixing.json",
        "overfit_one_batch.json",
    ]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({**vars(CHECK), "outcome": "splendid"}),
        json.dumps({**vars(CHECK), "name": "overfit_one_batch"}),
        json.dumps({**vars(CHECK), "time": "now"}),
        json.dumps({**vars(CHECK), "more": 1}),
        json.dumps({**vars(CHECK), "reason": "x" * (1 << 20)}),
    ],
)
def test_what_is_no_verdict_is_passed_over(tmp_path: Path, content: Any) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "batch_mixing.json").write_text(content)
    assert noted_checks(tmp_path) == []


def test_a_run_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be noted"):
        note_check(tmp_path / "gone", CHECK)
