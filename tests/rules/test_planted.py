"""Correlations planted in a run are reported first; runs without any report none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl
from comgra_decl.query import open_run
from comgra_decl.rules import Correlation, correlate
from comgra_decl.rules.correlations import statistics
from comgra_decl.rules.correlations.correlate import among
from comgra_decl.rules.correlations.correlation import Side
from comgra_decl.rules.correlations.series import Series
from tests.support.shortened import shortened

STEPS, BATCH, INPUTS, CATEGORIES = 100, 32, 8, 4
SEEDS = pytest.mark.parametrize("seed", shortened([1, 2, 3], tried=1))


class SquaredErrorLoss(nn.Module):
    """A loss with a value per sample."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        squared: Tensor = (prediction - target) ** 2
        return squared


class Network(nn.Module):
    """A small regression; with `by_sample`, it returns the loss of each sample."""

    def __init__(self, *, by_sample: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, 1))
        self.loss = SquaredErrorLoss() if by_sample else None

    def forward(self, x: Tensor, category: Tensor, target: Tensor) -> Tensor:
        prediction: Tensor = self.body(x)[:, 0]
        return prediction if self.loss is None else self.loss(prediction, target)


@dataclass
class Batch:
    """The data of a step: inputs, the category of each sample, and the noise on each target."""

    x: Tensor
    category: Tensor
    noise: Tensor


Plant = Callable[[Batch, torch.Generator], None]


def trained(
    path: Path, plant: Plant, *, seed: int, by_sample: bool = False, by_category: bool = False
) -> list[Correlation]:
    """Trains on data changed by a plant, and returns the correlations that are found."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(INPUTS, generator=generator) * 0.5
    net = Network(by_sample=by_sample)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    overrides = ["schedule.first=1000"]
    if by_sample or by_category:
        overrides += ["samples.by={input: 1}", "samples.count=16"]
    with comgra_decl.trace("debug", root=path, overrides=overrides) as session:
        for _ in range(STEPS):
            batch = Batch(
                torch.randn(BATCH, INPUTS, generator=generator),
                torch.randint(0, CATEGORIES, (BATCH,), generator=generator),
                0.5 * torch.randn(BATCH, generator=generator),
            )
            plant(batch, generator)
            target = batch.x @ weights + batch.noise
            answer = net(batch.x, batch.category, target)
            loss = answer.mean() if by_sample else F.mse_loss(answer, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert session.path is not None
    return correlate(open_run(session.path))


def chance(generator: torch.Generator) -> float:
    return float(torch.rand(1, generator=generator))


def noisy_category(number: int) -> Plant:
    def plant(batch: Batch, _: torch.Generator) -> None:
        batch.noise *= torch.where(batch.category == number, 4.0, 0.2)

    return plant


def clean_category(batch: Batch, _: torch.Generator) -> None:
    """Category 2 has labels without noise, so its loss is smaller."""
    batch.noise *= torch.where(batch.category == 2, 0.02, 3.0)


def batches_of_different_scale(batch: Batch, generator: torch.Generator) -> None:
    scale = torch.exp(0.7 * torch.randn(1, generator=generator))
    batch.x *= scale
    batch.noise *= 1.2 * scale


def batches_of_different_mean(batch: Batch, generator: torch.Generator) -> None:
    """Batches from another region of the input space, where labels get worse with distance."""
    shift = 4 * torch.rand(1, generator=generator)
    batch.x = 0.2 * batch.x + shift
    batch.noise *= 0.1 + shift


def spoilt_source(batch: Batch, generator: torch.Generator) -> None:
    bad = chance(generator) < 0.15
    comgra_decl.tag("web" if bad else "books")
    batch.noise *= 6.0 if bad else 0.6


def spoilt_source_second(batch: Batch, generator: torch.Generator) -> None:
    """The relevant tag comes after an irrelevant one."""
    bad = chance(generator) < 0.15
    comgra_decl.tag("day" if chance(generator) < 0.5 else "night", "web" if bad else "books")
    batch.noise *= 6.0 if bad else 0.6


def temperature(batch: Batch, generator: torch.Generator) -> None:
    degrees = 0.2 + 2 * chance(generator)
    comgra_decl.kpi("temperature", degrees)
    comgra_decl.kpi("queue", chance(generator))
    batch.noise *= 2 * degrees


def nothing_with_tags_and_metrics(_: Batch, generator: torch.Generator) -> None:
    comgra_decl.tag("a" if chance(generator) < 0.3 else "b")
    comgra_decl.kpi("temperature", chance(generator))
    comgra_decl.kpi("queue", chance(generator))


def nothing(_batch: Batch, _generator: torch.Generator) -> None:
    pass


@SEEDS
@pytest.mark.parametrize(
    ("plant", "first"),
    shortened(
        [
            (noisy_category(3), "Samples of category 3 have a larger loss ("),
            (noisy_category(0), "Samples of category 0 have a larger loss ("),
            (clean_category, "Samples of category 2 have a smaller loss ("),
        ],
        tried=1,
        several=True,
    ),
)
def test_a_category_with_another_loss_comes_first(
    tmp_path: Path, plant: Plant, first: str, seed: int
) -> None:
    found = trained(tmp_path, plant, seed=seed, by_sample=True)
    assert found[0].sentence.startswith(first)
    assert [c.first.text for c in found if c.second.text == "loss"] == [found[0].first.text]


@SEEDS
@pytest.mark.slow
def test_gradients_at_the_prediction_stand_for_losses_that_are_averaged(
    tmp_path: Path, seed: int
) -> None:
    (found,) = trained(tmp_path, noisy_category(3), seed=seed, by_category=True)
    assert found.sentence.startswith(
        "Samples of category 3 have a larger gradient of the loss at Network ("
    )


@SEEDS
@pytest.mark.parametrize("plant", shortened([spoilt_source, spoilt_source_second], tried=1))
def test_a_tag_with_another_loss_comes_first(tmp_path: Path, plant: Plant, seed: int) -> None:
    found = trained(tmp_path, plant, seed=seed)
    assert found[0].sentence.startswith("Steps with tag web have a larger loss (")
    others = [c for c in found if c.first.text.startswith("tag ") and c is not found[0]]
    assert not others, "books is what is not web, and day and night do not matter"


@SEEDS
@pytest.mark.parametrize(
    ("plant", "statistics"),
    shortened(
        [
            (batches_of_different_scale, {"std", "l2", "abs_mean", "abs_max", "min", "max"}),
            (batches_of_different_mean, {"mean", "abs_mean", "l2", "abs_max", "min", "max"}),
        ],
        tried=1,
        several=True,
    ),
)
def test_what_distinguishes_inputs_stands_for_all_it_causes(
    tmp_path: Path, plant: Plant, statistics: set[str], seed: int
) -> None:
    (first, *_) = trained(tmp_path, plant, seed=seed)
    assert first.first.place is not None
    assert first.first.place.node == "input"
    assert first.first.statistic in statistics
    assert first.effect > 0.5
    assert " of input input rises when loss rises (" in first.sentence


@SEEDS
@pytest.mark.slow
def test_a_metric_that_drives_the_loss_comes_first(tmp_path: Path, seed: int) -> None:
    found = trained(tmp_path, temperature, seed=seed)
    assert found[0].sentence.startswith("temperature rises when loss rises (")
    assert "queue" not in " ".join(c.sentence for c in found)


@SEEDS
@pytest.mark.parametrize(
    ("plant", "how"),
    shortened(
        [
            (nothing_with_tags_and_metrics, {}),
            (nothing, {"by_sample": True}),
            (nothing, {"by_category": True}),
        ],
        tried=1,
        several=True,
    ),
)
def test_nothing_is_reported_where_nothing_was_planted(
    tmp_path: Path, plant: Plant, how: dict[str, bool], seed: int
) -> None:
    found = trained(tmp_path, plant, seed=seed, **how)
    assert [c.sentence for c in found] == []


def series(loss: list[float], tags: dict[str, list[int]]) -> Series:
    marks = {Side(f"tag {name}"): np.isin(np.arange(len(loss)), at) for name, at in tags.items()}
    return Series(
        np.arange(len(loss)),
        values=np.zeros((len(loss), 0), np.float32),
        numbers={"loss": np.array(loss, np.float32)},
        marks=marks,
    )


def test_a_tag_is_described_by_medians_and_by_the_share_of_pairs() -> None:
    """Of 60 records, every sixth has a tag and a loss above all others: 500 of 500 pairs."""
    tagged = list(range(3, 60, 6))
    loss = [9.0 + 0.01 * i if i in tagged else 1.0 + 0.01 * (i % 7) for i in range(60)]
    (found,) = among(series(loss, {"web": tagged, "books": sorted({*range(60)} - {*tagged})}))
    assert (found.kind, found.first, found.second) == ("differs", Side("tag web"), Side("loss"))
    assert found.effect == pytest.approx(1.0, abs=0.05)
    assert (found.count, found.total, found.records) == (10, 60, 60)
    assert found.medians == pytest.approx((9.30, 1.03))  # 9.30 is that of 9.03, 9.09 ... 9.57
    assert found.sentence.startswith("Steps with tag web have a larger loss (9.3 against 1.03; ")


def test_tags_that_take_turns_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    loss = [float(x) for x in rng.uniform(1, 2, 60) + 2 * (np.arange(60) % 2)]
    (found,) = among(series(loss, {"odd": list(range(1, 60, 2)), "even": list(range(0, 60, 2))}))
    assert found.sentence.startswith("Steps with tag odd have a larger loss (")


def test_a_tag_for_the_second_half_of_a_training_explains_no_falling_loss() -> None:
    rng = np.random.default_rng(0)
    loss = [float(x) for x in np.exp(-np.arange(200) / 60) * rng.uniform(0.9, 1.1, 200)]
    assert not among(series(loss, {"late": list(range(100, 200)), "early": list(range(100))}))


def test_random_tags_are_hardly_ever_reported() -> None:
    """Of 40 random tags in each of 20 training runs; 5% of the runs are expected."""
    wrong = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        loss = [float(x) for x in np.exp(rng.normal(size=200))]
        tags = {f"t{k}": np.flatnonzero(rng.random(200) < 0.2).tolist() for k in range(40)}
        wrong += bool(among(series(loss, tags)))
    assert wrong <= 2


def test_equal_values_share_a_rank_and_missing_ones_have_none() -> None:
    column = np.array([[3.0], [1.0], [1.0], [np.nan], [9.0]], np.float32)
    ranks = statistics.ranked(column)[:, 0]
    np.testing.assert_allclose(ranks, [0.25, -0.5, -0.5, 0.0, 0.75])
