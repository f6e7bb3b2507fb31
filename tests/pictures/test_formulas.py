"""Pictures computed from arrays equal scikit-learn's, or explicit formulas."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.decomposition import PCA  # type: ignore[import-untyped]
from sklearn.linear_model import RidgeClassifier  # type: ignore[import-untyped]
from sklearn.metrics import confusion_matrix, roc_auc_score  # type: ignore[import-untyped]
from sklearn.model_selection import StratifiedKFold  # type: ignore[import-untyped]

from comgra_decl.pictures import cloud, likeness, predictions, units

rng = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_basis_equals_the_principal_components_of_scikit_learn(dtype: type) -> None:
    points: NDArray[np.floating] = rng.normal(size=(4, 30, 7)).astype(dtype)
    basis = cloud.fitted(points, axes=3)
    pca = PCA(3, svd_solver="full").fit(points.reshape(-1, 7).astype(np.float64))
    np.testing.assert_allclose(basis.components, pca.components_, atol=1e-12)
    np.testing.assert_allclose(basis.explained, pca.explained_variance_ratio_, atol=1e-12)
    wanted = pca.transform(points.reshape(-1, 7).astype(np.float64)).reshape(4, 30, 3)
    np.testing.assert_allclose(basis.project(points), wanted, atol=1e-12)
    assert basis.steps == 4


def test_points_that_were_drawn_do_not_move_when_a_step_is_added() -> None:
    points = rng.normal(size=(5, 20, 6))
    kept = cloud.fitted(points[:4])
    assert (kept.project(points)[:4] == kept.project(points[:4])).all()


@pytest.mark.parametrize(
    ("shape", "axes"), [((1, 1, 5), 2), ((3, 4, 1), 2)], ids=["one point", "one feature"]
)
def test_too_few_points_have_no_axes(shape: tuple[int, ...], axes: int) -> None:
    with pytest.raises(ValueError, match="2 axes need at least 2 points"):
        cloud.fitted(np.zeros(shape), axes)


def hsic(k: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The unbiased estimator as the average over distinct samples (Song et al. 2012, eq. 5)."""
    n, ones = len(k), np.ones(len(k))
    k, other = k - np.diag(np.diag(k)), other - np.diag(np.diag(other))
    first = np.trace(k @ other)
    second = (ones @ k @ ones) * (ones @ other @ ones) / ((n - 1) * (n - 2))
    third = 2 / (n - 2) * (ones @ k @ other @ ones)
    return float((first + second - third) / (n * (n - 3)))


def test_cka_equals_the_formula() -> None:
    first, second = rng.normal(size=(9, 5)), rng.normal(size=(9, 2, 3))
    k, other = first @ first.T, second.reshape(9, -1) @ second.reshape(9, -1).T
    wanted = hsic(k, other) / np.sqrt(hsic(k, k) * hsic(other, other))
    assert likeness.cka(first, second) == pytest.approx(wanted, rel=1e-10)
    matrix = likeness.cka_matrix([first, second])
    np.testing.assert_allclose(matrix, [[1, wanted], [wanted, 1]], rtol=1e-10)


def test_cka_ignores_rotation_scale_and_offset_and_sees_noise_as_unlike() -> None:
    values = rng.normal(size=(40, 6))
    turned = 3 * values @ np.linalg.qr(rng.normal(size=(6, 6)))[0] + 7
    assert likeness.cka(values, turned) == pytest.approx(1, abs=1e-12)
    noise = [likeness.cka(rng.normal(size=(40, 50)), rng.normal(size=(40, 50))) for _ in range(50)]
    assert abs(np.mean(noise)) < 0.05  # the biased estimate is 0.6 here


def test_cka_is_missing_where_it_has_no_meaning() -> None:
    some = rng.normal(size=(6, 3))
    assert np.isnan(likeness.cka(some[:3], some[:3]))
    assert np.isnan(likeness.cka(some, np.ones((6, 3))))
    assert np.isnan(likeness.cka(some, some[:5]))


def test_confusions_equal_scikit_learn() -> None:
    classes, scores = rng.integers(4, size=50), rng.normal(size=(50, 4))
    wanted = confusion_matrix(classes, scores.argmax(1), labels=range(4))
    assert (predictions.confusion(classes, scores) == wanted).all()
    assert predictions.confusion(np.array([5]), scores[:1]).shape == (6, 6)


def test_reliability_equals_a_loop_over_the_samples() -> None:
    classes, scores = rng.integers(3, size=200), 2 * rng.normal(size=(200, 3)).astype(np.float32)
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
    for cls, row in zip(classes, scores.astype(np.float64), strict=True):
        chances = np.exp(row) / np.exp(row).sum()
        place = next(i for i in range(10) if chances.max() <= (i + 1) / 10)
        bins[place].append((chances.max(), chances.argmax() == cls))
    found = predictions.reliability(classes, scores)
    for row, members in zip(found, bins, strict=True):
        assert row[2] == len(members)
        wanted = np.mean(members, axis=0) if members else [np.nan, np.nan]
        np.testing.assert_allclose(row[:2], wanted, rtol=1e-12)


@pytest.mark.parametrize("distinct", [3, 1000])
def test_the_auroc_of_the_confidence_equals_that_of_scikit_learn(distinct: int) -> None:
    scores = rng.normal(size=(distinct, 4))[rng.integers(distinct, size=60)]  # with ties
    foreign = rng.random(60) < 0.3
    confident = predictions.probabilities(scores).max(1)
    wanted = roc_auc_score(~foreign, confident)
    assert predictions.foreign_auroc(scores, foreign) == pytest.approx(wanted, rel=1e-12)
    scores[3] = np.nan
    assert np.isnan(predictions.foreign_auroc(scores, foreign))


def test_a_sample_without_finite_scores_is_no_confident_error() -> None:
    scores = np.array([[9.0, 0.0], [np.inf, 0.0], [0.0, 1.0], [2.0, 0.0]])
    order, confident = predictions.confident_errors(np.array([1, 1, 1, 1]), scores)
    assert order.tolist() == [0, 3]
    np.testing.assert_allclose(confident, [1 / (1 + np.exp(-9)), 1 / (1 + np.exp(-2))])


@pytest.mark.parametrize("features", [3, 60])
@pytest.mark.parametrize("classes", [2, 4])
def test_a_linear_model_reads_as_much_from_a_layer_as_that_of_scikit_learn(
    features: int, classes: int
) -> None:
    labels = rng.integers(classes, size=40)
    values = rng.normal(size=(40, features)) + 0.7 * labels[:, None]
    held_out = np.arange(40) % 2 == 1
    model = RidgeClassifier(alpha=2.0).fit(values[~held_out], labels[~held_out])
    wanted = model.score(values[held_out], labels[held_out])
    found = predictions.linear_accuracy(values, labels, held_out=held_out, ridge=2.0)
    assert found == pytest.approx(wanted, abs=1e-12)
    nothing = np.zeros(40, np.bool_)
    assert np.isnan(predictions.linear_accuracy(values, labels, held_out=nothing, ridge=2.0))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_every_class_with_two_samples_is_fitted_and_tested(labels: list[int]) -> None:
    """As in scikit-learn, halves have the same number of each class, give or take one."""
    classes = np.array(labels)
    held_out = predictions.every_other(classes)
    counts = Counter(labels)
    assert Counter(classes[held_out].tolist()) == Counter({c: n // 2 for c, n in counts.items()})
    if min(counts.values()) >= 2:
        for _, test in StratifiedKFold(2).split(classes, classes):
            theirs = Counter(classes[test].tolist())
            assert all(abs(theirs[c] - (classes[held_out] == c).sum()) <= 1 for c in counts)


@pytest.mark.parametrize("order", ["alternating", "sorted", "random"])
@pytest.mark.parametrize("classes", range(2, 7))
def test_separable_classes_are_read_perfectly_whatever_their_order(
    classes: int, order: str
) -> None:
    labels = np.arange(4 * classes) % classes
    labels = np.sort(labels) if order == "sorted" else labels
    labels = rng.permutation(labels) if order == "random" else labels
    values = 9.0 * np.eye(classes)[labels]
    held_out = predictions.every_other(labels)
    assert predictions.linear_accuracy(values, labels, held_out=held_out, ridge=1.0) == 1
    values[0] = np.inf
    found = predictions.linear_accuracy(values, labels, held_out=held_out, ridge=1.0)
    assert np.isnan(found), "0 would look like a result"


def test_a_unit_is_dead_if_it_is_never_above_zero() -> None:
    values = np.maximum(rng.normal(size=(3, 4, 5, 5)), 0)
    values[:, 1] = 0
    values[0, 2] = 0
    assert units.dead_units(values, 1).tolist() == [False, True, False, False]
    assert units.dead_units(values.transpose(0, 2, 3, 1), -1).tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_a_spectrum_equals_that_of_the_matrix() -> None:
    weight = rng.normal(size=(6, 3, 2, 2)).astype(np.float32)
    wanted = np.sqrt(np.linalg.eigvalsh(weight.reshape(6, 12) @ weight.reshape(6, 12).T))[::-1]
    np.testing.assert_allclose(units.spectrum(weight), wanted, rtol=1e-4)
    assert np.isnan(units.spectrum(np.full((2, 3), np.inf))).all()
