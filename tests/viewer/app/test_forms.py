"""Values are drawn according to the meaning of their axes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from comgra_decl.query import Preview
from comgra_decl.records import Axis
from comgra_decl.viewer.model.drawing import Drawing, boxes_of, draw, labels_of


def preview(values: NDArray[np.generic], *names: str, sizes: tuple[int, ...] = ()) -> Preview:
    """A preview that keeps all of each axis, or means of an axis with another size."""
    whole = sizes or values.shape
    axes = [
        Axis(name, "all" if size == kept else "mean", size)
        for name, size, kept in zip(names, whole, values.shape, strict=True)
    ]
    return Preview(0, values, tuple(axes))


def counted(*size: int) -> NDArray[np.float32]:
    return np.arange(math.prod(size), dtype=np.float32).reshape(size)


def cut(drawing: Drawing, number: int) -> NDArray[np.float64]:
    """One tile of a drawing."""
    tile = drawing.tiles[number]
    rows = slice(tile.top, tile.top + tile.height)
    return drawing.image[rows, tile.left : tile.left + tile.width]


@given(st.integers(1, 30), st.integers(2, 6), st.integers(2, 6))
def test_tiles_hold_every_value_once(n: int, h: int, w: int) -> None:
    maps = 1 + counted(n, h, w)
    drawing = draw(preview(maps, "head", "query", "key"))
    known = drawing.image[~np.isnan(drawing.image)]
    np.testing.assert_array_equal(np.sort(known), maps.ravel())
    for number in range(n):
        np.testing.assert_array_equal(cut(drawing, number), maps[number])
    assert not drawing.marks.any()


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_kernels_of_a_filter_stay_side_by_side(outputs: int, inputs: int, size: int) -> None:
    for box in boxes_of((outputs * inputs, size, size), inputs):
        first = box.number // inputs * inputs
        assert box.top == boxes_of((outputs * inputs, size, size), inputs)[first].top


def test_a_channel_without_any_signal_is_marked() -> None:
    values = 1 + counted(2, 4, 3, 3)
    values[:, 2] = 0
    values[0, 1] = 0  # alive in the other sample
    drawing = draw(preview(values, "sample", "channel", "height", "width"))
    assert [tile.zero for tile in drawing.tiles] == [False, False, True, False]
    assert drawing.notes == "sample 0 \u00b7 1 all zero"
    np.testing.assert_array_equal(cut(drawing, 3), values[0, 3])


def test_three_channels_of_an_input_are_colours() -> None:
    values = np.zeros((1, 3, 8, 9), np.float32)
    values[0, 1, 2, 5] = 1
    drawing = draw(preview(values, "sample", "channel", "height", "width"), picture=True)
    assert drawing.form == "colours"
    assert drawing.rgba is not None
    pixels = drawing.rgba.view(np.uint8).reshape(8, 9, 4)
    assert pixels[2, 5].tolist() == [0, 255, 0, 255]
    assert pixels[0, 0].tolist() == [0, 0, 0, 255]


def test_channels_may_come_last() -> None:
    values = np.zeros((2, 8, 9, 3), np.float32)
    values[1, 7, 8] = [1, 0.2, 0]
    drawing = draw(preview(values, "sample", "height", "width", "channel"), picture=True, sample=1)
    assert drawing.rgba is not None
    assert drawing.rgba.view(np.uint8).reshape(8, 9, 4)[7, 8].tolist() == [255, 51, 0, 255]


@pytest.mark.parametrize(
    ("size", "names", "form"),
    [
        ((8,), ("sample",), "bars"),
        ((8, 1), ("sample", "feature"), "bars"),
        ((1,), ("value",), "bars"),
        ((10,), ("feature",), "line"),
        ((8, 16, 1, 1), ("sample", "channel", "height", "width"), "map"),
        ((8, 10), ("sample", "feature"), "map"),
        ((5, 10), ("out", "in"), "map"),
        ((8, 5, 10), ("sample", "position", "feature"), "map"),
    ],
)
def test_the_axes_choose_the_form(size: tuple[int, ...], names: tuple[str, ...], form: str) -> None:
    drawing = draw(preview(counted(*size), *names))
    assert drawing.form == form
    assert drawing.image[~np.isnan(drawing.image)].size == math.prod(size)


def test_hidden_states_are_one_map_for_each_sample() -> None:
    values = counted(3, 4, 5)
    drawing = draw(preview(values, "sample", "position", "feature"))
    assert [tile.number for tile in labels_of(drawing)] == [0, 1, 2]
    np.testing.assert_array_equal(cut(drawing, 2), values[2])
    one = draw(preview(values, "sample", "position", "feature"), sample=2)
    np.testing.assert_array_equal(one.image, values[2])
    assert one.facts == "position \u00d7 feature \u00b7 4\u00d75"


def test_it_says_what_was_pooled() -> None:
    pooled = preview(counted(1, 4, 5, 5), "sample", "head", "query", "key", sizes=(8, 4, 60, 60))
    assert draw(pooled).facts == "4 heads, means of 60\u00d760"


def test_values_that_are_not_finite_are_marked_and_gaps_are_not() -> None:
    values = counted(3, 4, 4)
    values[1, 2, 3] = np.nan
    drawing = draw(preview(values, "head", "query", "key"))
    assert drawing.marks.sum() == 1
