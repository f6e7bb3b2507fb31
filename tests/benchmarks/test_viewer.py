"""The benchmark of the viewer keeps earlier measures, and states its targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.viewer import __main__ as command
from benchmarks.viewer import page

MACHINE = {"processor": "a processor", "cores": 2, "load_before": 0.1}


def measure(day: int, **times: list[float]) -> dict[str, Any]:
    return {**times, "date": f"2026-01-0{day}", "load": 0.2}


def test_a_measure_is_added_to_the_newest_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "viewer.md"
    text.write_text(f"before {page.BEGIN}nothing\n{page.END} after")
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "PAGE", text)
    older = {"everyday": measure(1, step=[40.0]), "pictures": measure(1, step=[90.0])}
    facts = {"date": "2026-01-01", "machine": MACHINE, "measures": older}
    (tmp_path / "viewer-2026-01-01.json").write_text(json.dumps(facts))
    newer = measure(2, step=[30.0], **{"step, pictures drawn": [20.0]})
    command._save("pictures", newer, {"date": "2026-01-02", "machine": MACHINE})
    saved = json.loads((tmp_path / "viewer-2026-01-02.json").read_text())
    assert saved["measures"] == {"everyday": older["everyday"], "pictures": newer}
    written = text.read_text()
    assert "| step | 30 | 30 | 60 | 1 |" in written
    assert "| step, pictures drawn | 20 | 20 | 60 | 1 |" in written
    assert "| step | 40 | 40 | 60 | 1 |" in written
    assert "90" not in written
    assert written.startswith("before")
    assert written.endswith("after")


def test_other_tools_are_measured_only_if_asked_for() -> None:
    assert {*command._options([]).only} == {*command.MEASURES} - {"rivals"}
    assert command._options(["--only", "rivals"]).only == ["rivals"]
