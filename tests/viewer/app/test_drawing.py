"""Properties of drawings that need no run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from comgra_decl.query import Preview
from comgra_decl.records import Axis
from comgra_decl.viewer import palette
from comgra_decl.viewer.model.columns import COLUMNS, columns, strongest, taken
from comgra_decl.viewer.model.distribution import picture
from comgra_decl.viewer.model.drawing import draw, fitted, place_of, tile_ticks
from comgra_decl.viewer.model.graph import scale_of
from comgra_decl.viewer.model.series import Curve, bounds, drawn, isolated, thin
from comgra_decl.viewer.model.ticks import log_ticks
from comgra_decl.viewer.model.values import standardised
from comgra_decl.viewer.panes.distribution import SHADES, shades
from comgra_decl.viewer.panes.figures import Frame
from comgra_decl.viewer.panes.hovering import NUMBER, PLACED
from comgra_decl.viewer.panes.values import ValuesPane

values = arrays(np.float64, st.integers(1, 400), elements=st.floats(-1e6, 1e6) | st.just(math.nan))


@given(values, st.integers(4, 100))
def test_thinning_keeps_extremes_first_and_last(line: np.ndarray, points: int) -> None:
    keep = thin(line, points)
    assert len(keep) <= max(points + 2, 4)
    assert (np.diff(keep) > 0).all()
    assert keep[0] == 0
    assert keep[-1] == len(line) - 1
    if np.isfinite(line).any():
        assert np.nanmin(line[keep]) == np.nanmin(line)
        assert np.nanmax(line[keep]) == np.nanmax(line)


@given(values, st.integers(4, 40), st.floats(-10, 810), st.floats(0, 900))
def test_a_line_zoomed_into_keeps_the_whole_and_shows_more_of_the_window(
    line: np.ndarray, points: int, low: float, length: float
) -> None:
    steps, within = 2 * np.arange(len(line)), (low, low + length)
    keep = drawn(steps, line, points, within)
    assert (np.diff(keep) > 0).all()
    assert set(thin(line, points)) <= set(keep)
    inside = np.flatnonzero((steps >= within[0]) & (steps <= within[1]))
    if len(inside) <= points - 2:  # with one more on each side
        assert set(inside) <= set(keep)


@given(
    st.integers(1, 60).flatmap(
        lambda k: st.tuples(
            st.lists(st.integers(0, 300), min_size=k, max_size=k, unique=True).map(sorted),
            arrays(np.float64, (2, k), elements=st.floats(-1e6, 1e6) | st.just(math.nan)),
        )
    ),
    st.integers(1, 40),
)
def test_a_column_shows_its_strongest_record_or_the_one_before(
    records: tuple[list[int], np.ndarray], count: int
) -> None:
    steps, numbers = np.array(records[0]), records[1]
    x0, x1 = float(steps[0]), float(steps[-1]) + 1
    found = taken(numbers, strongest(numbers, steps, x0, x1, count))
    edges = np.linspace(x0, x1, count + 1)
    for line, row in zip(numbers, found, strict=True):
        for j in range(count):
            inside = line[(steps >= edges[j]) & (steps < edges[j + 1])]
            if not len(inside):
                inside = line[steps < edges[j]][-1:]
            known = np.abs(inside[~np.isnan(inside)])
            if len(known):
                assert abs(row[j]) == known.max()
                assert row[j] in inside
            else:
                assert math.isnan(row[j])


@given(st.floats(-40, 20), st.floats(1e-3, 60), st.integers(3, 8))
def test_a_logarithmic_axis_has_some_round_numbers_and_not_too_many(
    low: float, span: float, most: int
) -> None:
    high = low + span
    ticks = log_ticks(low, high, most)
    assert 1 <= len(ticks) <= most
    assert ticks == sorted(set(ticks))
    for tick in ticks:
        assert low - 1e-9 <= tick <= high + 1e-9
        digits = f"{10.0**tick:.12e}".partition("e")[0].rstrip("0")
        assert len(digits) <= 7  # 1., 5.2, up to 1.2345


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [
        (-18.2, -1.8, [1e-15, 1e-10, 1e-5]),
        (-3.4, 0.4, [1e-3, 1e-2, 1e-1, 1]),
        (-0.42, -0.2, [0.4, 0.5, 0.6]),
        (2.1, 3.9, [200, 500, 1000, 2000, 5000]),
        (5.0, 5.001, [100000.0, 100050.0, 100100.0, 100150.0, 100200.0]),
    ],
)
def test_numbers_of_a_logarithmic_axis(low: float, high: float, numbers: list[float]) -> None:
    np.testing.assert_allclose(10.0 ** np.array(log_ticks(low, high, 5)), numbers, rtol=1e-9)


@given(values)
def test_bounds_hold_all_finite_values(line: np.ndarray) -> None:
    low, high = bounds(line)
    assert low < high
    finite = line[np.isfinite(line)]
    assert ((low <= finite) & (finite <= high)).all()


@given(values)
def test_a_point_is_isolated_if_no_line_leads_to_it(line: np.ndarray) -> None:
    drawn = {i for i in range(len(line) - 1) if np.isfinite(line[i : i + 2]).all()}
    joined = drawn | {i + 1 for i in drawn}
    alone = [i for i, value in enumerate(line) if np.isfinite(value) and i not in joined]
    assert isolated(line).tolist() == alone


def test_a_logarithmic_curve_drops_what_is_not_positive() -> None:
    line = Curve(steps=np.arange(4), values=np.array([10.0, 0.0, -1.0, 1000.0]))
    log = line.logarithmic()
    np.testing.assert_array_equal(log.values, [1.0, math.nan, math.nan, 3.0])
    assert log.bounds[0] < 1 < 3 < log.bounds[1]
    assert Curve(steps=np.arange(1), values=np.array([-1.0])).logarithmic().missing


def test_a_band_that_reaches_below_zero_goes_to_the_end_of_a_logarithmic_axis() -> None:
    line = Curve(
        steps=np.arange(3),
        values=np.array([1.0, 10.0, math.nan]),
        low=np.array([0.1, -5.0, math.nan]),
        high=np.array([10.0, 25.0, math.nan]),
    )
    log = line.logarithmic()
    np.testing.assert_array_equal(log.low, [-1.0, log.bounds[0], math.nan])


def histograms(*centres: float, bins: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Normal distributions around `centres`, as counts and ranges."""
    rng = np.random.default_rng(0)
    counts, ranges = [], []
    for centre in centres:
        sample = rng.normal(centre, 1.0, 4000)
        counted, edges = np.histogram(sample, bins)
        counts.append(counted)
        ranges.append([edges[0], edges[-1]])
    return np.array(counts), np.array(ranges)


def even(ranges: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The edges of bins of equal width."""
    return np.linspace(ranges[:, 0], ranges[:, 1], counts.shape[1] + 1, axis=1)


def test_the_shades_of_a_picture_are_its_values_in_equal_steps() -> None:
    places = np.array([[0.0, 0.5, 0.999, 1.0, np.nan]])
    assert shades(places).tolist() == [[0, SHADES // 2, SHADES - 1, SHADES - 1, 0]]
    fine = np.linspace(0, 1, 1001)[None]
    assert np.abs(shades(fine) / SHADES - fine).max() <= 1 / SHADES


def test_a_distribution_shows_where_the_values_are() -> None:
    centres = np.linspace(-5, 5, 21)
    counts, ranges = histograms(*centres)
    drawn = picture(np.arange(21), counts, even(ranges, counts))
    heights = np.linspace(drawn.y0, drawn.y1, len(drawn.image), endpoint=False)
    density = drawn.image**2
    means = (density * heights[:, None]).sum(0) / density.sum(0)
    np.testing.assert_allclose(means[3:-3], centres[3:-3], atol=0.25)
    assert drawn.image.max() == 1
    assert (drawn.x0, drawn.x1) == (-0.5, 20.5)


def test_neither_an_outlier_nor_a_collapse_decides_the_range() -> None:
    counts, ranges = histograms(*[0.0] * 40)
    ranges[5] = [-1e6, 1e6]  # one step with an outlier
    ranges[6] = [0.0, 0.0]  # one step at which all values were equal
    drawn = picture(np.arange(40), counts, even(ranges, counts))
    assert -6 < drawn.y0 < -1
    assert 1 < drawn.y1 < 6
    assert np.nansum(drawn.image[:, 6] > 0) <= 2


def test_a_distribution_shows_all_values_unless_a_few_are_far_away() -> None:
    counts, ranges = histograms(*np.linspace(0, 3, 30))
    drawn = picture(np.arange(30), counts, even(ranges, counts))
    assert drawn.y0 < ranges.min() < ranges.max() < drawn.y1
    assert [len(steps) for steps in drawn.beyond] == [0, 0]
    ranges[5, 1] = 1e6
    drawn = picture(np.arange(30), counts, even(ranges, counts))
    assert drawn.y1 < 10
    assert 5 in drawn.beyond[1]


def test_the_quartiles_of_a_distribution_are_those_of_the_values() -> None:
    counts, ranges = histograms(-2.0, 0.0, 7.0, bins=400)
    counts[1] = 0
    drawn = picture(np.array([3, 4, 5]), counts, even(ranges, counts))
    assert drawn.steps.tolist() == [3, 4, 5]
    for column, centre in ((0, -2.0), (2, 7.0)):
        found = drawn.quartiles[:, column]
        np.testing.assert_allclose(found, centre + np.array([-0.674, 0, 0.674]), atol=0.06)
    assert np.isnan(drawn.quartiles[:, 1]).all()
    np.testing.assert_array_equal(drawn.highest, [ranges[0, 1], np.nan, ranges[2, 1]])


def test_the_lines_of_a_distribution_end_at_the_last_record() -> None:
    counts, ranges = histograms(*[0.0] * 6)
    drawn = picture(np.array([0, 1, 2, 10, 100, 1000]), counts, even(ranges, counts))
    assert drawn.steps[-1] == 1000
    zoomed = picture(np.arange(6) ** 2, counts, even(ranges, counts), within=(0, 9))
    assert zoomed.steps[-1] == 9


def test_records_without_a_histogram_stay_empty() -> None:
    counts, ranges = histograms(0.0, 0.0, 0.0)
    counts[1] = 0
    drawn = picture(np.arange(3), counts, even(ranges, counts))
    assert np.isnan(drawn.image[:, 1]).all()
    assert not np.isnan(drawn.image[:, [0, 2]]).any()


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=600, unique=True).map(sorted))
def test_each_column_shows_the_newest_record_at_or_before_it(steps: list[int]) -> None:
    known = np.array(steps)
    x0, x1, chosen = columns(known)
    assert x0 < x1 or len(steps) == 1
    assert len(chosen) <= max(COLUMNS, len(steps))
    assert (np.diff(chosen) >= 0).all()
    centres = x0 + (np.arange(len(chosen)) + 0.5) * (x1 - x0) / len(chosen)
    assert (known[chosen] <= centres + 1e-9).all()
    later = np.minimum(chosen + 1, len(known) - 1)
    assert ((known[later] > centres - 1e-9) | (later == chosen)).all()


@pytest.mark.parametrize(
    ("numbers", "diverging", "logarithmic"),
    [
        (np.linspace(1, 2, 100), False, False),
        (np.geomspace(1e-6, 1, 100), False, True),
        (np.linspace(-1, 3, 100), True, False),
        (np.zeros(10), False, False),
        (np.array([]), False, False),
    ],
)
def test_the_scale_suits_the_numbers(
    numbers: np.ndarray, diverging: bool, logarithmic: bool
) -> None:
    scale = scale_of(numbers)
    assert (scale.diverging, scale.logarithmic) == (diverging, logarithmic)
    for value in (0.0, -1e9, 1e9, *numbers[:5]):
        assert len(scale.colour(float(value))) == 7


def test_the_scale_of_many_numbers_is_that_of_a_part() -> None:
    rng = np.random.default_rng(0)
    numbers = rng.lognormal(0, 0.3, 400_000)
    scale = scale_of(numbers)
    low, high = np.quantile(numbers, [0.01, 0.99])
    assert (scale.low, scale.high) == pytest.approx((low, high), rel=0.02)


def test_colours_run_from_end_to_end() -> None:
    assert palette.colour_at(0) == palette.SCALE[0]
    assert palette.colour_at(1) == palette.colour_at(7) == palette.SCALE[-1]
    assert palette.signed_colour(-1) != palette.signed_colour(1)
    assert palette.signed_colour(0.0) == palette.signed_colour(-1e-12)
    assert palette.faded("#102030")[0] == "#10203000"
    assert palette.faded("#102030")[-1] == "#102030ff"


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 30))
def test_the_picture_is_that_of_interpolating_record_by_record(
    seed: int, records: int, bins: int
) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rng.choice([0.05, 1, 20]), (records, bins)).astype(np.uint32)
    counts[0, 0] += 1
    ranges = np.sort(rng.normal(size=(records, 2)), axis=1)
    ranges[rng.random(records) < 0.1] = 0.5  # all values equal
    drawn = picture(np.arange(records), counts, even(ranges, counts))
    edges = np.linspace(drawn.y0, drawn.y1, len(drawn.image) + 1)
    for record, (low, high) in enumerate(ranges):
        column = drawn.image[:, record]
        if not counts[record].sum():
            assert np.isnan(column).all()
            continue
        if low == high:
            low, high = low - (edges[1] - edges[0]) / 2, high + (edges[1] - edges[0]) / 2
        shares = np.concatenate([[0.0], np.cumsum(counts[record]) / counts[record].sum()])
        part = np.diff(np.interp(edges, np.linspace(low, high, bins + 1), shares))
        expected = np.sqrt(part / part.max()) if part.max() > 0 else part
        np.testing.assert_allclose(column, expected, atol=1e-6)


# ---- values relative to their batch, names of cells, square cells


@given(arrays(np.float64, (5, 3, 4), elements=st.floats(-1e3, 1e3)))
def test_relative_values_are_those_of_numpy(kept: np.ndarray) -> None:
    found = standardised(kept)
    spread = kept.std(0)
    for i in np.ndindex(3, 4):
        column = kept[(slice(None), *i)]
        expected = (column - column.mean()) / spread[i] if spread[i] > 0 else np.zeros(5)
        np.testing.assert_allclose(found[(slice(None), *i)], expected, atol=1e-9)


def test_what_is_not_finite_stays_so_when_values_are_relative() -> None:
    found = standardised(np.array([[1.0, 1.0], [np.nan, 1.0], [3.0, 1.0]]))
    assert np.isnan(found[:, 0]).all()
    assert (found[:, 1] == 0).all()


def preview_of(*shape: int, axes: tuple[str, ...]) -> Preview:
    kept = np.arange(np.prod(shape), dtype=float).reshape(shape)
    return Preview(0, kept, tuple(Axis(n, "all", s) for n, s in zip(axes, shape, strict=True)))


def test_cells_are_square_where_both_axes_are_alike() -> None:
    heads = draw(preview_of(2, 4, 5, 5, axes=("sample", "head", "query", "key")), sample=0)
    assert heads.to_scale
    assert draw(preview_of(2, 3, 8, 6, axes=("sample", "channel", "height", "width"))).to_scale
    assert not draw(preview_of(8, 90, axes=("sample", "feature"))).to_scale
    assert not draw(preview_of(2, 5, 16, axes=("sample", "position", "feature"))).to_scale


@pytest.mark.parametrize(("channels", "samples"), [(1, 2), (3, 2), (5, 1)])
def test_means_over_unlike_areas_keep_the_proportions_of_the_image(
    channels: int, samples: int
) -> None:
    """A picture of 32 x 48 pixels is kept as 16 x 16 means."""
    axes = (
        Axis("sample", "all", samples),
        Axis("channel", "all", channels),
        Axis("height", "mean", 32),
        Axis("width", "mean", 48),
    )
    preview = Preview(0, np.random.default_rng(0).random((samples, channels, 16, 16)), axes)
    drawing = draw(preview, sample=0, picture=True)
    assert drawing.form == ("colours" if channels == 3 else "map")
    assert drawing.aspect == pytest.approx((32 / 16) / (48 / 16))
    rows, columns = drawing.image.shape
    across, down = fitted(columns, rows, 400, 300, aspect=drawing.aspect)
    assert (300 / down) / (400 / across) == pytest.approx(2 / 3)


@given(
    st.integers(1, 99),
    st.integers(1, 99),
    st.integers(40, 900),
    st.integers(40, 900),
    st.floats(0.1, 10),
)
def test_cells_fill_a_frame_as_far_as_they_fit(
    columns: int, rows: int, width: int, height: int, aspect: float
) -> None:
    across, down = fitted(columns, rows, width, height, aspect=aspect)
    assert aspect * width / across == pytest.approx(height / down)
    assert across >= columns * (1 - 1e-9)
    assert down >= rows * (1 - 1e-9)
    assert min(across / columns, down / rows) == pytest.approx(1)
    assert fitted(columns, rows, 0, 0) == (columns, rows)


@pytest.mark.browser
def test_a_tooltip_names_the_tile_and_the_cell_in_it(page: Any) -> None:
    heads = draw(preview_of(1, 6, 4, 5, axes=("sample", "head", "query", "key")), sample=0)
    kernels = draw(preview_of(4, 3, 2, 2, axes=("filter", "channel", "height", "width")))
    page.goto("about:blank")
    for drawing in (heads, kernels):
        where = place_of(drawing)
        code = f"([place, x, y]) => {{ {NUMBER}{PLACED}; return placed({{ x, y }}); }}"
        for tile in drawing.tiles:
            x, y = tile.left + 1, tile.top
            said = page.evaluate(code, [where, x + 0.3, y - 0.4])
            index = np.unravel_index(tile.number, (6,) if drawing is heads else (4, 3))
            names = ("head",) if drawing is heads else ("filter", "channel")
            inner = ("query 0", "key 1") if drawing is heads else ("height 0", "width 1")
            expected = [f"{name} {i}" for name, i in zip(names, index, strict=True)]
            assert said == " \u00b7 ".join([*expected, *inner])
        gap = page.evaluate(code, [where, drawing.tiles[0].width, 0])
        assert gap == "between two"
    flat = place_of(draw(preview_of(8, 90, axes=("sample", "feature"))))
    assert page.evaluate(code, [flat, 17.2, 3.4]) == "sample 3 \u00b7 feature 17"


def test_the_axes_of_tiles_have_the_numbers_of_tiles() -> None:
    maps = draw(preview_of(7, 2, 2, axes=("channel", "height", "width")))  # in rows of three
    assert tile_ticks(maps, 9) == ({1: "0", 4: "1", 7: "2"}, {1: "0", 4: "3", 7: "6"})
    assert tile_ticks(maps, 2) == ({1: "0", 7: "2"}, {1: "0", 7: "6"})
    kernels = draw(preview_of(2, 3, 4, 4, axes=("filter", "channel", "height", "width")))
    assert tile_ticks(kernels, 9) == ({2: "0", 7: "1", 12: "2"}, {2: "0", 7: "1"})
    assert tile_ticks(draw(preview_of(3, 4, axes=("position", "feature"))), 9) == ({}, {})


def test_tiles_are_numbered_where_they_are_drawn() -> None:
    pane = ValuesPane(lambda **_: None, place=0)
    axes: list[Any] = [pane.frame.figure.xaxis[0], pane.frame.figure.yaxis[0]]
    usual = [axis.ticker for axis in axes]
    pane._number_axes(draw(preview_of(7, 2, 2, axes=("channel", "height", "width"))))
    assert [[*axis.ticker.ticks] for axis in axes] == [[0.5, 3.5, 6.5]] * 2
    assert axes[1].major_label_overrides == {0.5: "0", 3.5: "3", 6.5: "6"}
    pane._number_axes(None)
    assert [axis.ticker for axis in axes] == usual
    assert axes[1].major_label_overrides == {}


def test_a_title_ends_before_the_download_button() -> None:
    frame = Frame()
    frame.title = "forward \u00b7 abs_max \u00b7 batch mean"
    assert frame._title.text == frame.title
    frame._on_width("inner_width", 0, 200)
    assert frame._title.text.endswith("\u2026")
    assert len(frame._title.text) * 7 < 200
    frame._on_width("inner_width", 200, 400)
    assert frame._title.text == frame.title
