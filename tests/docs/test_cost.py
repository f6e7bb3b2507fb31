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
    price = cost.price(cost.newest(), name)
    assert cost.priced(content, price) == content
    assert content.count("# Cost of a recorded step") == bool(price)


def test_every_preset_is_on_the_page() -> None:
    page = cost.PAGE.read_text()
    assert [name for name in presets() if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("key", ["_target_: a", "defaults: [debug]"])
def test_a_price_replaces_the_one_before(key: str) -> None:
    before = f"# @package x\n# For looking.\n# Cost of a recorded step: x9\n# more.\n{key}\n"
    after = f"# @package x\n# For looking.\n# Cost: new\n{key}\n"
    assert cost.priced(before, ["# Cost: new"]) == after
    assert cost.priced(before, []) == before
