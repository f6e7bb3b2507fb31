"""Histograms count the sampled elements; the sample is spread over the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from comgra_decl.bins import SPACINGS, bends, edges_of, fractions_of
from comgra_decl.stats import histogram
from comgra_decl.stats.histogram import Counter, histogram_kernel
from comgra_decl.stats.sampling import sample_stride
from tests.support.shortened import examples

from .recording import Tensors, batch_of, reduce, reducer

BINS = 8


@pytest.fixture(scope="module", autouse=True, params=["compiled", "numpy"])
def recipe(request: pytest.FixtureRequest) -> Iterator[str]:
    """Counts with the compiled kernel, and as if it could not be compiled."""
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "numpy":
            patched.setattr(histogram, "histogram_kernel", lambda: None)
        yield request.param


def expected(sample: NDArray[np.float32], bins: int) -> tuple[NDArray[np.int64], float, float]:
    """Returns counts and range as numpy's histogram computes them."""
    finite = sample[np.isfinite(sample)].astype(np.float64)
    if not finite.size:
        return np.zeros(bins, np.int64), math.nan, math.nan
    low, high = finite.min(), finite.max()
    if low == high:
        return np.array([finite.size] + [0] * (bins - 1)), low, high
    return np.histogram(finite, bins=bins, range=(low, high))[0], low, high


def off_edges(sample: NDArray[np.float32], bins: int) -> bool:
    """Whether no element is so close to an inner edge that rounding decides its bin."""
    finite = sample[np.isfinite(sample)].astype(np.float64)
    if not finite.size or finite.min() == finite.max():
        return True
    position = (finite - finite.min()) / (finite.max() - finite.min()) * bins
    near = np.abs(position - np.round(position)) < 1e-4
    inner = (np.round(position) > 0) & (np.round(position) < bins)
    return not (near & inner).any()


ELEMENTS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=examples(200))
@given(
    tensors=st.lists(
        hnp.arrays(np.float32, st.integers(0, 12), elements=ELEMENTS), min_size=1, max_size=6
    ),
    steps=st.integers(1, 3),
)
def test_counts_equal_those_of_numpy(tensors: list[NDArray[np.float32]], steps: int) -> None:
    starts = np.cumsum([0, *[t.size for t in tensors]])
    counts, ranges = Counter(starts, BINS)([np.concatenate(tensors)] * steps)
    assert counts.shape == (steps, len(tensors), BINS)
    for i, tensor in enumerate(tensors):
        want, low, high = expected(tensor, BINS)
        for step in range(steps):
            np.testing.assert_array_equal(ranges[step, i], np.array([low, high], np.float32))
            assert counts[step, i].sum() == np.isfinite(tensor).sum()
            if off_edges(tensor, BINS):
                np.testing.assert_array_equal(counts[step, i], want)


def test_steps_and_tensors_do_not_mix() -> None:
    generator = np.random.default_rng(0)
    sizes = [5, 5, 0, 400, 1, 400, 400, 2]
    starts = np.cumsum([0, *sizes])
    steps = [
        (generator.normal(size=starts[-1]) * 10.0**step).astype(np.float32) for step in range(6)
    ]
    steps[3][7] = np.nan
    steps[4][starts[5] : starts[6]] = np.inf
    counts, ranges = Counter(starts, 64)(steps)
    for step, values in enumerate(steps):
        for i, (a, b) in enumerate(pairwise(starts)):
            want, low, high = expected(values[a:b], 64)
            np.testing.assert_array_equal(ranges[step, i], np.array([low, high], np.float32))
            assert np.abs(counts[step, i].astype(int) - want).sum() <= 2  # at edges


def test_the_kernel_is_compiled_here() -> None:
    assert histogram_kernel() is not None


SCALES = st.sampled_from([1e-44, 1e-35, 1e-12, 1.0, 1e12, 1e36, 3e38])


@settings(max_examples=examples(200))
@given(data=st.data(), bins=st.integers(1, 130), seed=st.integers(0, 2**32 - 1))
def test_both_recipes_count_the_same(data: st.DataObject, bins: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    parts = []
    for size in data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=8)):
        part = np.clip(generator.normal(size=size), -1, 1) * data.draw(SCALES)
        if data.draw(st.booleans()):
            part = np.round(part)  # many at the edges of bins
        wild = generator.random(size) < data.draw(st.sampled_from([0.0, 0.0, 0.1, 1.0]))
        part[wild] = generator.choice([np.nan, np.inf, -np.inf], size=int(wild.sum()))
        parts.append(part.astype(np.float32))
    starts = np.cumsum([0, *[part.size for part in parts]])
    steps = [np.concatenate(parts), np.concatenate(parts)[::-1].copy()]
    kernel = histogram_kernel()
    assert kernel is not None
    counter = Counter(starts, bins)
    for ours, theirs in zip(counter.by_kernel(kernel, steps), counter.by_numpy(steps), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_both_ends_of_the_range_are_counted() -> None:
    values = np.linspace(-1, 1, 1001, dtype=np.float32)
    for scale in (1.0, 1e-44, 3e38):
        counts, ranges = Counter(np.array([0, 1001]), 10)([(values * np.float32(scale))])
        assert counts.sum() == 1001
        assert (counts > 0).all() or scale == 1e-44
        assert ranges[0, 0, 0] == -ranges[0, 0, 1]


def test_small_tensors_are_counted_completely() -> None:
    x = torch.randn(6, 10)
    tensors: Tensors = [(x, 0), (x.double() * 2, None), (torch.randn(100, 4).transpose(0, 1), 0)]
    batch = batch_of(reduce(tensors, reducer(histogram_elements=1000)), bins=16)
    assert batch.counts is not None
    assert batch.ranges is not None
    for i, (tensor, _) in enumerate(tensors):
        sample = tensor.float().flatten().numpy()
        want, low, high = expected(sample, 16)
        assert np.abs(batch.counts[0, i].astype(int) - want).sum() <= 2
        np.testing.assert_array_equal(batch.ranges[0, i], np.array([low, high], np.float32))


@given(
    dims=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    batch=st.integers(1, 300),
    limit=st.integers(1, 5000),
)
def test_the_stride_stays_within_the_limit_and_off_the_dims(
    dims: list[int], batch: int, limit: int
) -> None:
    elements = math.prod(dims)
    numel = elements * batch
    stride, count = sample_stride(numel, elements, limit)
    assert count == len(range(0, numel, stride))
    assert count <= limit
    if numel <= limit:
        assert stride == 1
    elif numel > 4 * elements:  # a stride longer than a sample has no alternative
        assert math.gcd(stride, elements) == 1


def test_a_sample_sees_every_feature_where_a_plain_stride_would_see_few() -> None:
    batch, features, limit = 1024, 256, 4096
    seen = np.arange(0, batch * features, batch * features // limit) % features
    assert len(set(seen.tolist())) == 4  # must not happen
    stride, _ = sample_stride(batch * features, features, limit)
    seen = np.arange(0, batch * features, stride) % features
    number = np.bincount(seen, minlength=features)
    assert number.min() >= number.max() - 1


@pytest.mark.parametrize("features", [64, 256, 1000])
@pytest.mark.parametrize("batch", [32, 512])
def test_the_histogram_of_a_sample_looks_like_that_of_the_layer(batch: int, features: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, features, generator=generator) + 6 * (torch.arange(features) % 4 == 0)
    reduced = reduce([(x, 0)], reducer(histogram_elements=4096))
    assert reduced.histogram_values is not None
    upper = float((reduced.histogram_values > 3).mean())
    assert upper == pytest.approx(float((x > 3).float().mean()), abs=0.02)
    assert set(reduced.histogram_values.tolist()) <= set(x.flatten().tolist())


def test_without_histograms_there_are_none() -> None:
    reduced = reduce([(torch.randn(3, 4), 0)])
    assert reduced.histogram_values is None
    assert reduced.histogram_starts is None
    batch = batch_of(reduced, bins=None)
    assert batch.counts is None
    assert batch.ranges is None


# -- bins that are finer near zero -----------------------------------------------------------------


@settings(max_examples=examples(200))
@given(data=st.data(), bins=st.integers(2, 130), seed=st.integers(0, 2**32 - 1))
def test_finer_bins_count_what_numpy_counts_between_their_edges(
    data: st.DataObject, bins: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    parts: list[NDArray[np.float32]] = []
    for size in data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=6)):
        part = generator.standard_t(2, size) * data.draw(SCALES) + data.draw(
            st.sampled_from([0.0, 0.0, 3.0, 1000.0])
        )
        part[generator.random(size) < 0.05] = np.nan
        with np.errstate(over="ignore"):
            parts.append(part.astype(np.float32))
    starts = np.cumsum([0, *[part.size for part in parts]])
    counts, ranges = Counter(starts, bins, "signed_log")([np.concatenate(parts)])
    even, same = Counter(starts, bins)([np.concatenate(parts)])
    np.testing.assert_array_equal(ranges, same)
    for i, values in enumerate(parts):
        finite = values[np.isfinite(values)].astype(np.float64)
        low, high = ranges[0, i].tolist()
        edges = edges_of(low, high, bins, "signed_log")
        assert counts[0, i].sum() == finite.size
        if not bends(low, high, "signed_log"):
            np.testing.assert_array_equal(counts[0, i], even[0, i])
            continue
        place = fractions_of(finite, low, high, "signed_log") * bins
        sure = np.abs(place - np.rint(place)) > 1e-3  # rounding decides at edges
        want = np.histogram(finite, edges)[0]
        assert np.abs(counts[0, i].astype(int) - want).sum() <= 2 * (~sure).sum()


def test_gradients_with_a_long_tail_fill_many_bins() -> None:
    generator = np.random.default_rng(0)
    values = (generator.standard_normal(4000) * generator.lognormal(0, 2, 4000)).astype(np.float32)
    starts = np.array([0, len(values)])
    filled = {
        spacing: int((Counter(starts, 64, spacing)([values])[0] > 20).sum()) for spacing in SPACINGS
    }
    assert filled["signed_log"] > 30 > 5 * filled["linear"]


def test_quartiles_from_finer_bins_are_close_to_those_of_the_values() -> None:
    generator = np.random.default_rng(1)
    values = (generator.standard_normal(4000) * generator.lognormal(0, 2, 4000)).astype(np.float32)
    counts, ranges = Counter(np.array([0, 4000]), 64, "signed_log")([values])
    low, high = ranges[0, 0].tolist()
    edges = edges_of(low, high, 64, "signed_log")
    below = np.concatenate([[0.0], np.cumsum(counts[0, 0]) / 4000])
    for q in (0.05, 0.25, 0.5, 0.75, 0.95):
        found, true = np.interp(q, below, edges), np.quantile(values, q)
        assert abs(found - true) < 0.1 * abs(true) + 0.02
