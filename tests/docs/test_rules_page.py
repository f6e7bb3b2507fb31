"""The page on rules matches the rules."""

from __future__ import annotations

import re

from docs.rules_page import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m docs.rules_page"


def test_every_limit_in_the_texts_is_filled_in() -> None:
    assert not re.findall(r"\{_?[A-Za-z.]+(?::[^}' ]+)?\}", page())
