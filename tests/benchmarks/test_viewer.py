"""The benchmark of the viewer shows what it states, and judges it by its targets."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import comgra_decl
from benchmarks.viewer import data, page

MACHINE = {"processor": "a processor", "cores": 2}


def test_every_record_of_the_run_with_previews_has_another_one(tmp_path: Path) -> None:
    shape = data.Shape("small", layers=1, steps=3, previews=True)
    run = comgra_decl.open_run(data.made(tmp_path, shape) / "group" / "small")
    previews = [run.slot("embed").preview(step) for step in range(3)]
    assert [preview.step for preview in previews] == [0, 1, 2]
    assert [preview.values.nbytes for preview in previews] == [4096] * 3
    assert not np.array_equal(previews[0].values, previews[1].values)


def test_a_time_above_its_target_is_bold() -> None:
    taken = {"step": [40.0, 52.0], "node": [40.0, 52.0], "date": "2026-01-02", "load": 0.1}
    table = page.tables({"machine": MACHINE, "measures": {"previews": taken}})
    assert "| step | 46 | **51** | 50 | 2 |" in table
    assert "| node | 46 | 51 | 60 | 2 |" in table
    assert "upper bounds" not in table
