"""The rule that the page about findings shows is a rule that works."""

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
    """The example as the module `my_package.rules`, which the example's spec names."""
    (code,) = re.findall(r"```python\n(from comgra_decl.rules.api .*?)```", PAGE.read_text(), re.S)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "rules.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_package.rules"
    for name in ("my_package", "my_package.rules"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("limit", "first"), [(3.0, 4), (20.0, None)])
def test_the_rule_finds_the_output_that_is_too_large(
    module: str, limit: float, first: int | None
) -> None:
    tape = Tape()
    small, large = tape.slot("small", (4, 6)), tape.slot("large", (4, 6))
    for step in range(12):
        tape.record({small: np.ones((4, 6)), large: np.full((4, 6), 1.0 if step < 4 else -10.0)})
    rules = build({"mine": {"_target_": f"{module}.Mine", "limit": limit}}, trust=True)
    (rule,) = [rule for rule in rules if rule.name == "mine"]
    found = tape.findings(rule)
    assert [f.first_step for f in found] == ([] if first is None else [first])
    assert [(str(f.place), f.message) for f in found] == [("large", "large reaches 10.")][
        : len(found)
    ]
    assert descriptions(rule.Parameters)["limit"] == "The largest magnitude that is fine."
