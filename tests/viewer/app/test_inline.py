"""Arrays embedded in their message arrive unchanged."""

from __future__ import annotations

import numpy as np
import pytest
from bokeh.core.serialization import Deserializer, Serialized, Serializer
from bokeh.models import ColumnDataSource
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from comgra_decl.viewer.panes.inline import inline, inline_steps

DTYPES = [np.uint8, np.int8, np.uint16, np.int32, np.uint32, np.float32, np.float64]


def sent(values: np.ndarray) -> Serialized[object]:
    """Returns what leaves the server for a source with that one column."""
    return Serializer().serialize(ColumnDataSource({"x": values}))


def arrived(message: Serialized[object]) -> np.ndarray:
    column: np.ndarray = Deserializer().deserialize(message).data["x"]
    return column


@given(st.sampled_from(DTYPES).flatmap(lambda d: arrays(d, array_shapes(max_dims=3, max_side=9))))
def test_an_array_arrives_as_it_was_without_a_message_of_its_own(values: np.ndarray) -> None:
    message = sent(inline(values, values.dtype))
    assert not message.buffers
    np.testing.assert_array_equal(arrived(message), values)
    assert arrived(message).dtype == values.dtype


def test_a_view_that_is_not_contiguous_arrives_too() -> None:
    sheet = np.arange(24.0).reshape(4, 6)[::2, ::-1]
    np.testing.assert_array_equal(arrived(sent(inline(sheet, np.float64))), sheet)


def test_a_large_array_is_sent_as_bokeh_sends_it() -> None:
    values = np.arange(200_000, dtype=np.float32)
    message = sent(inline(values))
    assert len(message.buffers or ()) == 1
    np.testing.assert_array_equal(arrived(message), values)


def test_numbers_beyond_single_precision_are_infinite_without_a_warning() -> None:
    assert arrived(sent(inline([1e300, -1e300, np.nan]))).tolist()[:2] == [np.inf, -np.inf]


@pytest.mark.parametrize("last", [3, 2**31 - 1, 2**31, 2**40])
def test_steps_arrive_exactly_however_long_the_training(last: int) -> None:
    assert arrived(sent(inline_steps([0, 1, last]))).tolist() == [0, 1, last]
    assert len(inline_steps([])) == 0
