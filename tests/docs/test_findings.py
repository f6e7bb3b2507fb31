"""The example rule on the page on findings works."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from comgra_decl.rules.catalogue import build
from comgra_decl.spec.described import descriptions
from tests.rules.tape import Tape

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Provides the example as the module `my_package.rules`, which the example's spec names."""
    blocks = re.findall(r"```python\n(from comgra_decl.rules.api .*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 2
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "rules.py").write_text("\n\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_package.rules"
    for name in ("my_package", "my_package.rules"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("kind", "limit", "first", "message"),
    [
        ("Mine", 3.0, 4, "large reaches 10."),
        ("Mine", 20.0, None, ""),
        ("Grown", 3.0, 8, "large has grown 30-fold."),
        ("Grown", 40.0, None, ""),
    ],
)
def test_the_rule_finds_the_output_that_is_too_large(
    module: str, kind: str, limit: float, first: int | None, message: str
) -> None:
    tape = Tape()
    small, large = tape.slot("small", (4, 6)), tape.slot("large", (4, 6))
    for step in range(20):
        size = 1.0 if step < (4 if kind == "Mine" else 8) else 10.0 if kind == "Mine" else 30.0
        tape.record({small: np.ones((4, 6)), large: -size * np.ones((4, 6))})
    rules = build({"mine": {"_target_": f"{module}.{kind}", "limit": limit}}, trust=True)
    (rule,) = [rule for rule in rules if rule.name == "mine"]
    found = tape.findings(rule)
    expected = [] if first is None else [(first, "large", message)]
    assert [(f.first_step, str(f.place), f.message) for f in found] == expected
    assert descriptions(rule.Parameters)["limit"] == "The largest acceptable magnitude."
