"""The page on cost and the presets say what was measured."""

from __future__ import annotations

import pytest

from comgra_decl.spec.loading import presets
from docs import cost


def test_the_page_is_that_of_the_newest_measurement() -> None:
    if cost.PAGE.read_text() != cost.page(cost.newest()):
        pytest.fail("docs/cost.md is not what was measured: run `python -m docs.cost`")


@pytest.mark.parametrize("name", presets())
def test_a_preset_states_the_price_that_was_measured(name: str) -> None:
    content = presets()[name].read_text()
    assert cost.priced(content, cost.price(cost.newest(), name)) == content
    assert content.count("# Price of a recorded step") <= 1


def test_every_preset_is_on_the_page() -> None:
    page = cost.PAGE.read_text()
    assert [name for name in presets() if f"| `{name}` |" not in page] == []


def test_a_price_replaces_the_one_before() -> None:
    before = "# @package x\n# For looking.\n# Price of a recorded step: x9\n# more.\n_target_: a\n"
    after = "# @package x\n# For looking.\n# Price: new\n_target_: a\n"
    assert cost.priced(before, ["# Price: new"]) == after
    assert cost.priced(before, []) == before
