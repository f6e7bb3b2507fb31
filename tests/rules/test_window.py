"""The windows of records that rules look at."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import Mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.rules.window import Window


@given(st.lists(st.sampled_from([None, [1], [2], [1, 2]]), max_size=12))
def test_spans_contain_each_record_with_a_fact_once(values: list[list[int] | None]) -> None:
    window = Window(
        table=Mock(),
        statistics=(),
        first=0,
        steps=np.arange(len(values)),
        types=["train"] * len(values),
        train=np.ones(len(values), np.bool_),
        aggregates=np.zeros((len(values), 0, 0, 3), np.float32),
        details=Mock(),
        facts=[{} if value is None else {"fact": [*value]} for value in values],
    )
    spans = [*window.spans("fact")]
    found = {row: value for value, first, stop in spans for row in range(first, stop)}
    assert found == {row: value for row, value in enumerate(values) if value is not None}
    assert sum(stop - first for _, first, stop in spans) == len(found)
    for (value, _, stop), (following, first, _) in pairwise(spans):
        assert stop < first or value != following  # as few spans as possible
