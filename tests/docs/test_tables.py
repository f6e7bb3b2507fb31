"""Tables in the documentation are whole: no row stands apart, and all rows have the same cells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

_RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+")
_CELL = re.compile(r"(?<!\\)\|")


def problems(text: str) -> Iterator[str]:
    """Yield what is wrong with the tables of a page."""
    cells = 0  # of each row of the table above the line; 0 outside of tables
    rows: list[str] = []
    fenced = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fenced ^= line.lstrip().startswith("```")
        is_row = not fenced and line.lstrip().startswith("|")
        if not is_row:
            if rows and not cells:
                yield f"line {number - 1}: a row without a table: {rows[-1][:60]}"
            rows, cells = [], 0
            continue
        rows.append(line.strip())
        width = len(_CELL.findall(re.sub(r"`[^`]*`", "", rows[-1]))) - 1
        if len(rows) == 2 and _RULE.fullmatch(rows[-1]):
            cells = width
            header = len(_CELL.findall(re.sub(r"`[^`]*`", "", rows[0]))) - 1
            if header != cells:
                yield f"line {number}: {header} titles, but {cells} columns"
        elif cells and width != cells:
            yield f"line {number}: {width} cells, but {cells} columns: {rows[-1][:60]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    assert [*problems(page.read_text("utf-8"))] == []


def test_a_table_that_is_not_whole_is_found() -> None:
    table = "| a | b |\n|---|---:|\n| 1 | `|` |\n"
    assert [*problems(table)] == []
    assert len([*problems(f"{table}\n| 3 | 4 |\n")]) == 1
    assert len([*problems(f"{table}| 3 |\n")]) == 1
    assert len([*problems("| a |\n|---|---|\n")]) == 1
    assert [*problems(f"```\n| 3 | 4 |\n```\n{table}")] == []
