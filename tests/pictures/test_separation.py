"""Measures of collapse and separation equal scikit-learn's, or explicit formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import silhouette_score  # type: ignore[import-untyped]

from comgra_decl.pictures import separation

rng = np.random.default_rng(0)


@pytest.mark.parametrize("features", [2, 5, 40])
def test_variability_collapse_is_the_trace_of_within_times_the_inverse_of_between(
    features: int,
) -> None:
    groups = np.array([0, 0, 1, 1, 1, 2, 2, 2, 2, 5])
    points = rng.normal(size=(10, features)) + groups[:, None]
    within, between = np.zeros((2, features, features))
    means = {g: points[groups == g].mean(0) for g in (0, 1, 2, 5)}
    middle = np.mean([*means.values()], 0)
    for point, group in zip(points, groups.tolist(), strict=True):
        within += np.outer(point - means[group], point - means[group]) / len(points)
    for mean in means.values():
        between += np.outer(mean - middle, mean - middle) / len(means)
    wanted = np.trace(within @ np.linalg.pinv(between, rcond=1e-10)) / len(means)
    found = separation.variability_collapse(points, groups)
    assert found == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize("features", [1, 5, 40])
def test_the_silhouette_equals_that_of_scikit_learn(features: int) -> None:
    groups = np.array([*rng.integers(4, size=50), 9])  # the last one is alone in its group
    points = rng.normal(size=(51, features)) + 2 * groups[:, None]
    wanted = silhouette_score(points, groups)
    assert separation.silhouette(points, groups) == pytest.approx(wanted, rel=1e-10)


def test_the_effective_rank_is_the_number_of_equally_long_directions() -> None:
    for rank in (1, 3, 7):
        axes = np.eye(10)[:rank]
        assert separation.effective_rank(np.concatenate([axes, -axes]) + 5) == pytest.approx(rank)
    points = rng.normal(size=(30, 6))
    variances = np.linalg.eigvalsh(np.cov(points.T))
    shares = np.sqrt(variances) / np.sqrt(variances).sum()
    wanted = np.exp(-(shares * np.log(shares)).sum())
    assert separation.effective_rank(points) == pytest.approx(wanted, rel=1e-10)


def test_categories_that_have_collapsed_to_points_are_apart() -> None:
    groups = np.repeat([0, 1, 2], 4)
    points = rng.normal(size=(3, 8))[groups]
    assert separation.variability_collapse(points, groups) == pytest.approx(0, abs=1e-20)
    assert separation.silhouette(points, groups) == pytest.approx(1, abs=1e-6)
    assert separation.effective_rank(points) <= 2


def test_what_has_no_meaning_is_missing() -> None:
    points = rng.normal(size=(6, 3))
    one, all_alone, two = np.zeros(6, int), np.arange(6), np.arange(6) % 2
    assert np.isnan(separation.variability_collapse(points, one))
    assert np.isnan(separation.silhouette(points, one))
    assert np.isnan(separation.silhouette(points, all_alone))
    same = np.full((6, 3), 0.1)
    assert np.isnan(separation.variability_collapse(same, two))
    assert separation.silhouette(same, two) == 0
    assert separation.effective_rank(same) == 0
