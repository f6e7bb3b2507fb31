"""The page on rules matches the rules."""

from __future__ import annotations

from docs.rules_page import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m docs.rules_page"
