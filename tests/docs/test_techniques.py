"""The page on techniques names only what exists."""

from __future__ import annotations

import re
from pathlib import Path

from comgra_decl.rules.catalogue import build

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "techniques.md").read_text()


def test_every_test_and_every_page_exists() -> None:
    linked = re.findall(r"\]\(([^)#]+)", PAGE)
    assert len(linked) > 60
    assert [link for link in linked if not (ROOT / "docs" / link).exists()] == []


def test_every_rule_exists() -> None:
    named = set(re.findall(r"rules\.md#(\w+)", PAGE))
    assert len(named) > 30
    assert named - {rule.name for rule in build("default")} == set()


def test_a_row_without_a_test_says_why() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    untested = [row.split(" | ")[1] for row in rows if row.endswith("| — |")]
    assert all(re.match(r"no[ ,:]", where) for where in untested)
