"""Verdicts stored next to a run can be read back; other files there are not verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comgra_decl.errors import StoreError
from comgra_decl.store.checks import FOLDER, NotedCheck, NotedChecks, note_check, noted_checks

CHECK = NotedCheck("batch_mixing", "good", "replacing all others changes no answer", "x", 12.5)


def test_the_newest_verdict_of_each_experiment_is_kept(tmp_path: Path) -> None:
    assert noted_checks(tmp_path) == NotedChecks()
    other = NotedCheck("overfit_one_batch", "bad", "the loss stays", "y", 14.0)
    newer = NotedCheck("batch_mixing", "unclear", "one sample", "z", 13.0)
    for check in (CHECK, other, newer):
        note_check(tmp_path, check)
    assert noted_checks(tmp_path) == NotedChecks((newer, other))
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [
        "batch_mixing.json",
        "overfit_one_batch.json",
    ]


NO_VERDICTS = {
    "empty": "",
    "null": "null",
    "cut": "{",
    "brackets": "[[[",
    "a list": "[]",
    "no field": "{}",
    "another field": '{"steps": 1e400}',
    "deep": "[" * 100_000,
    "no text": "\udcff",
    "a large number": "1" * 10_000,
    "another outcome": json.dumps({**vars(CHECK), "outcome": "splendid"}),
    "of another": json.dumps({**vars(CHECK), "name": "overfit_one_batch"}),
    "no time": json.dumps({**vars(CHECK), "time": "now"}),
    "endless time": json.dumps({**vars(CHECK), "time": float("inf")}),
    "one field more": json.dumps({**vars(CHECK), "more": 1}),
    "large": json.dumps({**vars(CHECK), "reason": "x" * (1 << 20)}),
}


@pytest.mark.parametrize("content", NO_VERDICTS.values(), ids=NO_VERDICTS)
def test_what_is_no_verdict_is_damage_and_hides_no_other(tmp_path: Path, content: str) -> None:
    other = NotedCheck("overfit_one_batch", "bad", "the loss stays", "y", 14.0)
    note_check(tmp_path, other)
    file = tmp_path / FOLDER / "batch_mixing.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    noted = noted_checks(tmp_path)
    assert noted.verdicts == (other,)
    assert [*noted.damaged] == ["batch_mixing"]
    (loss,) = noted.damage
    assert "batch_mixing.json" in loss


def test_a_run_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot store the verdict"):
        note_check(tmp_path / "gone", CHECK)
