"""Correlations are found with the correct lag; chance and common trends are not reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

import comgra_decl
from comgra_decl.rules import Place, Side, correlate, diagnose, diagnose_and_correlate
from comgra_decl.rules.correlations import series as columns
from comgra_decl.rules.correlations import statistics
from comgra_decl.rules.correlations.correlate import among
from comgra_decl.rules.correlations.series import Series
from tests.support.fake_run import FakeRun
from tests.support.shortened import shortened

Floats = NDArray[np.float32]
RECORDS, COLUMNS = 400, 200


def sides(count: int) -> list[Side]:
    return [Side(f"std of layer{i}", Place(f"layer{i}"), "std") for i in range(count)]


def noise(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.normal(size=shape).astype(np.float32)


def walk(rng: np.random.Generator, *shape: int) -> Floats:
    return np.cumsum(noise(rng, *shape), axis=0, dtype=np.float32)


def slow(rng: np.random.Generator, *shape: int) -> Floats:
    """Returns noise that is correlated over about five records."""
    found = noise(rng, *shape)
    for row in range(1, shape[0]):
        found[row] += 0.8 * found[row - 1]
    return found


def heavy(rng: np.random.Generator, *shape: int) -> Floats:
    return np.exp(noise(rng, *shape) * 1.5)


def fading(rng: np.random.Generator, *shape: int) -> Floats:
    """Returns noise that keeps shrinking, as many quantities do during training."""
    falling = np.exp(-np.arange(shape[0]) / 80).reshape(-1, *[1] * (len(shape) - 1))
    return (noise(rng, *shape) * falling).astype(np.float32)


def series(values: Floats, loss: Floats, every: int = 1) -> Series:
    steps = np.arange(len(values)) * every
    return Series(steps, sides(values.shape[1]), values, {"loss": loss})


@pytest.mark.parametrize("kind", shortened([noise, walk, slow, heavy, fading], tried=2))
def test_chance_is_hardly_ever_reported(kind: Callable[..., Floats]) -> None:
    """Of 20 training runs with independent series, at most 2 report anything; 5% is expected."""
    wrong = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        wrong += bool(among(series(kind(rng, RECORDS, COLUMNS), kind(rng, RECORDS))))
    assert wrong <= 2


@pytest.mark.slow
def test_trends_that_all_have_in_common_are_not_reported() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        time = np.arange(RECORDS, dtype=np.float32)[:, None]
        speeds = rng.uniform(20, 200, COLUMNS + 1)
        falling = np.exp(-time / speeds) + 0.02 * noise(rng, RECORDS, COLUMNS + 1)
        smooth = np.exp(-time / speeds) + 0.1
        for trend in (falling, smooth):
            found = among(series(trend[:, 1:].astype(np.float32), trend[:, 0].astype(np.float32)))
            assert not found, found[0].sentence


@settings(max_examples=15)
@given(
    lag=st.integers(-40, 40),
    sign=st.sampled_from([-1.0, 1.0]),
    every=st.integers(1, 7),
    seed=st.integers(0, 2**31),
)
def test_a_relation_is_found_with_its_lag(lag: int, sign: float, every: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cause = walk(rng, RECORDS + 80)
    values = walk(rng, RECORDS, 60)
    values[:, 17] = cause[40 : 40 + RECORDS]
    loss = sign * cause[40 - lag : 40 - lag + RECORDS] + 0.5 * noise(rng, RECORDS)
    (found, *rest) = among(series(values, loss.astype(np.float32), every))
    assert (found.first.place, found.kind) == (Place("layer17"), "moves")
    assert (found.lag_records, found.lag_steps) == (lag, lag * every)
    assert math.copysign(1, found.effect) == sign
    assert found.low <= found.effect <= found.high
    assert len(rest) <= 1


def test_columns_that_say_the_same_are_one_with_others() -> None:
    rng = np.random.default_rng(0)
    values = walk(rng, RECORDS, 30)
    for column in range(5):
        values[:, column] = values[:, 0] + 0.05 * noise(rng, RECORDS)
    (found,) = among(series(values, values[:, 2] + 0.3 * noise(rng, RECORDS)))
    assert {found.first.text, *(side.text for side in found.also)} == {
        f"std of layer{i}" for i in range(5)
    }


def test_events_that_come_together_are_found_with_their_shares() -> None:
    rng = np.random.default_rng(1)
    values = 10 + 0.1 * noise(rng, RECORDS, 50)
    loss = 2 + 0.05 * noise(rng, RECORDS)
    spikes = np.arange(20, RECORDS, 40)
    loss[spikes] += 3
    values[spikes[:-1], 7] = 0.01
    found = [c for c in among(series(values, loss)) if c.kind == "happens"]
    assert found[0].first.place == Place("layer7")
    assert found[0].first.event == "abnormally low"
    assert found[0].second.event == "abnormally high"
    assert found[0].effect == pytest.approx(0.9)
    assert found[0].count == 10
    assert found[0].base is not None
    assert found[0].base == pytest.approx(10 / 402)
    assert found[0].sentence.startswith("loss abnormally high: 90% with std of layer7 abnormally")
    assert "9 of 10 times" in found[0].sentence


def test_an_event_that_lasts_is_one_episode() -> None:
    rng = np.random.default_rng(2)
    found = series(noise(rng, RECORDS, 5), noise(rng, RECORDS))
    for name in ("a", "b"):
        found.marks[Side(f"rule {name}")] = np.arange(RECORDS) > 350
    assert not among(found)


def test_lags_are_not_tried_where_records_grow_rarer() -> None:
    rng = np.random.default_rng(3)
    cause = walk(rng, RECORDS + 10)
    shown = series(cause[10:, None], cause[:-10])
    assert among(shown)
    shown.steps = (1.05 ** np.arange(RECORDS) * 20).astype(np.int64)
    assert not among(shown)


def test_few_records_say_nothing() -> None:
    rng = np.random.default_rng(4)
    values = noise(rng, 30, 3)
    assert not among(series(values, values[:, 0]))


@given(hits=st.integers(0, 60), count=st.integers(1, 60))
def test_the_interval_of_a_share_is_wilsons(hits: int, count: int) -> None:
    hits = min(hits, count)
    low, high = statistics.share_interval(hits, count)
    for end in (low, high):  # its ends are where the share is 1.96 standard errors away
        if 1e-9 < end < 1 - 1e-9:
            error = math.sqrt(end * (1 - end) / count)
            assert abs(hits / count - end) == pytest.approx(1.96 * error, rel=1e-6)
    assert low <= hits / count <= high


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_false_shares_are_those_of_benjamini_and_hochberg(chances: list[float]) -> None:
    found = statistics.false_shares(np.array(chances), len(chances))
    ordered = sorted(chances)
    for chance, share in zip(chances, found, strict=True):
        candidates = [p * len(chances) / rank for rank, p in enumerate(ordered, 1) if p >= chance]
        assert share == pytest.approx(min(1.0, *candidates, 1.0))


@pytest.mark.slow
def test_samples_with_a_larger_loss_are_told_by_what_they_have(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["input", "output"]}},
        "samples": {"count": 8},
        "rules": "off",
    }
    with comgra_decl.trace(spec, root=tmp_path, overrides=["schedule.every=1"]) as session:
        for _ in range(30):
            x = comgra_decl.node(torch.randn(8, 4) * torch.rand(8, 1) * 4, "given")
            error = 5 * x.norm(dim=1) + 0.01 * net(x)[:, 0]
            comgra_decl.node(error, "error", kind="loss")
            error.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.path is not None
    run = comgra_decl.open_run(session.path)
    found = correlate(run)
    assert diagnose_and_correlate(run) == (diagnose(run), found)
    best = found[0]
    assert (best.kind, best.second.text) == ("samples", "error")
    assert best.first.place is not None
    assert best.first.place.node in ("given", "input", "Linear")
    assert best.effect > 0.7
    assert (best.count, best.records) == (240, 30)
    assert best.sentence.startswith("Samples with a larger error have a larger ")


@pytest.mark.parametrize("every", shortened([1, 3], tried=1))
def test_of_a_long_run_evenly_spaced_records_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    fake = FakeRun(tmp_path / "group" / "run", layers=1)
    fake.write(40)
    fake.close()
    run = comgra_decl.open_run(fake.path)
    size = len(run.slots) * len(run.statistics) * len(run.steps)
    monkeypatch.setattr(columns, "MOST_VALUES", size if every == 1 else size // every + 1)
    found, engine = columns.series_of(run)
    assert engine.scene.records == len(run.steps)
    assert found.steps.tolist() == run.steps.tolist()[::every]
    assert len(found.values) == len(found.steps)
    side, column = next(iter(zip(found.sides, found.values.T, strict=True)))
    assert side.place is not None
    assert side.statistic is not None
    place = side.place
    whole = run.slot(place.node, role=place.role, of=place.pass_, iteration=place.iteration).series(
        side.statistic
    )
    np.testing.assert_array_equal(column, whole.to_numpy(np.float32)[::every])
    assert all(len(mark) == len(found.steps) for mark in found.marks.values())
