"""The page on annotations is correct."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import comgra_decl as comgra

PAGE = Path(__file__).parents[2] / "docs" / "annotations.md"


def test_its_program_shows_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    space: dict[str, Any] = {"__name__": "page"}
    exec(code, space)
    run = space["run"]
    kpis = run.kpis()
    scale = kpis[kpis["name"] == "scale"]
    assert scale["step"].tolist() == list(range(100))
    assert len(kpis[kpis["name"] == "loss"]) == 100
    assert run.notes()["step"].tolist() == [50]
    assert {"gate", "open", "clamp"} <= set(run.nodes)
    assert set(run.records["type"]) == {"even", "odd"}
    assert "half of the training" in capsys.readouterr().out


def test_it_names_every_word() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for word in ("node", "connect", "tag", "kpi", "note", "image", "figure", "text", "step"):
        assert f"`{word}(" in text
        assert word in comgra.__all__
