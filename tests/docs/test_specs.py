"""Every spec excerpt in the documentation is valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from comgra_decl.spec import load_spec

ROOT = Path(__file__).parents[2]
PIECES = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for number, code in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", PIECES)
def test_a_piece_of_a_spec_is_valid(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in re.findall(r"oc\.env:(\w+)", code):
        monkeypatch.setenv(variable, "https://example.org/x")
    piece = yaml.safe_load(code)
    assert load_spec(piece).model_fields_set >= set(piece) - {"defaults"}
