"""How the writer thread turns raw sums into records."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from comgra_decl.records import (
    RAW_STATISTICS,
    STATISTICS,
    Layout,
    Raw,
    RawStep,
    SlotInfo,
    SlotKey,
    StepInfo,
    Structure,
)
from comgra_decl.stats import Reducer, finalise

from .oracle import over_batch, rows_of, statistics_of
from .recording import layout_of, raw_step, reduce, reducer

OPTIONS: dict[str, Any] = {"statistics": STATISTICS, "sample_count": 3, "bins": (8, "linear")}


def tensors(seed: int) -> list[tuple[torch.Tensor, int | None]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(5, 7, generator=generator) + 2, 0),
        (torch.randn(9, generator=generator), None),
        (torch.randn(2, 20_000, generator=generator), 0),
    ]


def recorded(by: Reducer, layout: Layout | None, seed: int) -> RawStep:
    reduced = reduce(tensors(seed), by)
    return raw_step(reduced, layout or layout_of(reduced), step=seed)


def test_many_steps_at_once_equal_each_alone() -> None:
    by = reducer(histogram_elements=100)
    first = recorded(by, None, 0)
    steps = [first, *[recorded(by, first.layout, n) for n in range(1, 90)]]
    (together,) = finalise(steps, **OPTIONS)
    assert together.counts is not None
    assert together.ranges is not None
    assert [info.step for info in together.steps] == list(range(90))
    for k, step in enumerate(steps):
        (alone,) = finalise([step], **OPTIONS)
        assert alone.counts is not None
        assert alone.ranges is not None
        np.testing.assert_allclose(together.aggregates[k], alone.aggregates[0], rtol=1e-6)
        np.testing.assert_array_equal(together.samples[k], alone.samples[0])
        np.testing.assert_array_equal(together.counts[k], alone.counts[0])
        np.testing.assert_array_equal(together.ranges[k], alone.ranges[0])


def test_consecutive_steps_of_one_layout_make_one_batch_and_order_is_kept() -> None:
    by = reducer(histogram_elements=100)
    one = recorded(by, None, 0)
    other = recorded(by, None, 1)
    plain = recorded(reducer(), None, 5)
    steps = [
        one,
        recorded(by, one.layout, 2),
        other,
        recorded(by, one.layout, 3),
        recorded(by, one.layout, 4),
        plain,
    ]
    batches = finalise(steps, **OPTIONS)
    assert [[i.step for i in b.steps] for b in batches] == [[0, 2], [1], [3, 4], [5]]
    assert batches[-1].counts is None
    assert finalise([], **OPTIONS) == []


def test_only_the_statistics_asked_for_in_the_order_asked_for() -> None:
    step = recorded(reducer(), None, 0)
    names = ("l2", "nonfinite", "mean")
    (some,) = finalise([step], statistics=names, sample_count=2, bins=None)
    (all_,) = finalise([step], statistics=STATISTICS, sample_count=2, bins=None)
    assert some.aggregates.shape == (1, 3, 3, 3)
    for i, name in enumerate(names):
        j = STATISTICS.index(name)
        np.testing.assert_array_equal(some.aggregates[:, :, i], all_.aggregates[:, :, j])
        np.testing.assert_array_equal(some.samples[..., i], all_.samples[..., j])


def test_two_slots_may_show_one_tensor_in_any_order() -> None:
    reduced = reduce(tensors(0))
    plain = layout_of(reduced)
    layout = Layout(
        slots=np.array([4, 9, 2, 0], np.int32),
        tensors=np.array([2, 0, 2, 1]),
        starts=plain.starts,
        rows=plain.rows,
        samples=plain.samples,
        elements=plain.elements,
        batched=plain.batched,
    )
    (batch,) = finalise([raw_step(reduced, layout)], **OPTIONS)
    (each,) = finalise([raw_step(reduced, plain)], **OPTIONS)
    assert batch.slots.tolist() == [4, 9, 2, 0]
    np.testing.assert_array_equal(batch.aggregates[0], each.aggregates[0][[2, 0, 2, 1]])
    np.testing.assert_array_equal(batch.samples[0], each.samples[0][[2, 0, 2, 1]])


def test_rows_may_lie_in_any_order_with_gaps_and_tensors_without_samples() -> None:
    generator = np.random.default_rng(0)
    raw = np.zeros((20, RAW_STATISTICS))
    raw[:, Raw.SUM] = generator.normal(size=20)
    raw[:, Raw.SQUARES] = raw[:, Raw.SUM] ** 2 + 1
    layout = Layout(
        slots=np.arange(4, dtype=np.int32),
        tensors=np.arange(4),
        starts=np.array([12, 3, 0, 7]),
        rows=np.array([6, 2, 0, 1]),
        samples=np.array([6, 2, 0, 1]),
        elements=np.array([1, 2, 5, 4]),
        batched=np.array([True, True, True, False]),
    )
    step = RawStep(StepInfo(0, 0.0, "train", "train"), layout, raw)
    (batch,) = finalise([step], statistics=("mean",), sample_count=3, bins=None)
    for i in (0, 1, 3):
        rows = slice(layout.starts[i], layout.starts[i] + layout.samples[i])
        mean = raw[rows, Raw.SUM] / layout.elements[i]
        np.testing.assert_allclose(
            batch.aggregates[0, i, 0], over_batch(mean), rtol=1e-6, atol=1e-7
        )
    assert np.isnan(batch.aggregates[0, 2]).all()


def test_sample_rows_of_slots_with_fewer_samples_are_nan_and_a_whole_tensor_is_sample_zero() -> (
    None
):
    reduced = reduce(tensors(0))
    (batch,) = finalise([raw_step(reduced)], statistics=("mean",), sample_count=4, bins=None)
    has = ~np.isnan(batch.samples[0, :, :, 0])
    assert has.sum(1).tolist() == [4, 1, 2]
    whole = statistics_of(rows_of(*tensors(0)[1]))["mean"]
    np.testing.assert_allclose(batch.samples[0, 1, 0, 0], whole[0], rtol=1e-5)


def test_a_spread_over_samples_survives_a_large_mean() -> None:
    x = 1e5 + torch.arange(64.0).view(64, 1).repeat(1, 8) * 1e-2
    reduced = reduce([(x, 0)])
    (batch,) = finalise([raw_step(reduced)], statistics=("mean",), sample_count=0, bins=None)
    expected = over_batch(statistics_of(rows_of(x, 0))["mean"])
    np.testing.assert_allclose(batch.aggregates[0, 0, 0], expected, rtol=1e-6)


def test_what_float32_cannot_hold_is_stored_as_infinity_without_a_warning() -> None:
    x = torch.tensor([[1e300, 2e300], [-1e300, 1.0]], dtype=torch.float64)
    (batch,) = finalise([raw_step(reduce([(x, 0)]))], **OPTIONS)
    by_name = {name: batch.samples[0, 0, :, s] for s, name in enumerate(STATISTICS)}
    assert by_name["max"].tolist()[:2] == [np.inf, 1.0]
    assert by_name["min"].tolist()[:2] == [np.inf, -np.inf]
    assert by_name["nonfinite"].tolist()[:2] == [0.0, 0.0]


def test_everything_else_of_a_step_is_passed_on() -> None:
    by = reducer()
    first = recorded(by, None, 0)
    second = recorded(by, first.layout, 1)
    slot = SlotInfo(0, SlotKey("a", "output", 0, "forward"), "computed", "float32", (5, 7), 0, "X")
    structure = Structure("hash", [], [], [])
    first.new_slots, second.structure = [slot], structure
    first.kpis, second.values = {"loss": 1.0}, {0: np.ones((1, 2))}
    first.documents, second.documents = {"a": 1, "b": 1}, {"b": 2}
    (batch,) = finalise([first, second], **OPTIONS)
    assert batch.new_slots == [slot]
    assert batch.new_structures == [structure]
    assert batch.kpis == [{"loss": 1.0}, {}]
    assert batch.values == [{}, second.values]
    assert batch.documents == {"a": 1, "b": 2}


def test_results_under_way_are_waited_for_once() -> None:
    waited = []
    step = recorded(reducer(), None, 0)
    step.wait = lambda: waited.append(1)
    finalise([step], **OPTIONS)
    finalise([step], **OPTIONS)
    assert waited == [1]


def test_opt_in_statistics_with_a_formula() -> None:
    x = torch.tensor([[3.0, 4.0], [2.0, 2.0], [0.0, 0.0], [1.0, torch.nan]])
    step = raw_step(reduce([(x, 0), (torch.zeros(1, 0), 0)]))
    (batch,) = finalise([step], statistics=("nonfinite", "rms", "snr"), sample_count=4, bins=None)
    rms, snr = batch.samples[0, 0, :, 1], batch.samples[0, 0, :, 2]
    np.testing.assert_allclose(rms, [np.sqrt(12.5), 2, 0, np.nan], rtol=1e-6)
    np.testing.assert_allclose(snr, [7, np.inf, np.nan, np.nan], rtol=1e-6)
    assert np.isnan(batch.samples[0, 1, :, 1:]).all()


def test_columns_of_the_step_follow_those_with_a_formula() -> None:
    reduced = reduce([(torch.ones(2, 3), 0), (torch.zeros(4), None)])
    layout = layout_of(reduced)
    first, second = raw_step(reduced, layout), raw_step(reduced, layout, step=1)
    first.extra = np.array([[1.0, 10.0], [2.0, np.nan], [np.nan, 30.0]])
    names = ("mean", "nonfinite", "b")
    (batch,) = finalise(
        [first, second], statistics=names, sample_count=2, bins=None, extra=("a", "b")
    )
    np.testing.assert_array_equal(batch.samples[0, :, :, 2], [[10, np.nan], [30, np.nan]])
    np.testing.assert_array_equal(batch.aggregates[0, :, 2], [[np.nan] * 3, [30, 0, 30]])
    assert np.isnan(batch.aggregates[1, :, 2]).all()
    np.testing.assert_array_equal(batch.samples[1, :, :, 1], [[0, 0], [0, np.nan]])
