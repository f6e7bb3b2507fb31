"""Ours and TransformerLens compute the same from the same weights."""

from __future__ import annotations

import pytest

pytest.importorskip("transformer_lens", reason="`make test-research` installs it")

from benchmarks.transformerlens import LIMIT, differences, subjects

QUANTITIES = 11


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_every_quantity_agrees_to_a_hundred_thousandth(name: str) -> None:
    found = differences(subjects()[name])
    assert len(found) == QUANTITIES
    assert {what: size for what, size in found.items() if not size <= LIMIT} == {}
