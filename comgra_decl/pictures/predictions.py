"""A model's predictions: confusion, calibration, and what a linear model can read from a layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Classes = NDArray[np.int64]

RIDGE = 1.0
"""Penalty of the linear models; scikit-learn's default."""


def confusion(classes: Classes, scores: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return how often samples of each class (rows) were predicted as each class (columns).

    Args:
        classes: [samples], the true classes.
        scores: [samples, classes], the outputs of the model.
    """
    size = max(scores.shape[1], int(classes.max(initial=0)) + 1)
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (classes, scores.argmax(1)), 1)
    return counts


def reliability(classes: Classes, scores: NDArray[np.floating], bins: int = 10) -> Floats:
    """Return how confident and how accurate a model is, [bins, 3]: confidence, accuracy, samples.

    The bins divide 0..1 evenly by the largest probability of the softmax; a sample with a
    confidence on the border between two bins belongs to the lower one (Guo et al. 2017). The first
    two columns are NaN in empty bins.
    """
    chances = probabilities(scores)
    confident, right = chances.max(1), chances.argmax(1) == classes
    place = np.clip(np.ceil(confident * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        sure = np.bincount(place, confident, bins) / count
        accurate = np.bincount(place, right, bins) / count
    return np.stack([sure, accurate, count], 1)


def probabilities(scores: NDArray[np.floating]) -> Floats:
    """Return the softmax of scores [samples, classes]; NaN where it is undefined."""
    with np.errstate(invalid="ignore"):
        shifted = np.exp(scores.astype(np.float64) - scores.max(1, keepdims=True))
    chances: Floats = shifted / shifted.sum(1, keepdims=True)
    return chances


def confident_errors(
    classes: Classes, scores: NDArray[np.floating]
) -> tuple[NDArray[np.int64], Floats]:
    """Return the samples that are predicted as another class, most confident first.

    Args:
        classes: [samples], the true classes.
        scores: [samples, classes], the outputs of the model.

    Returns:
        The positions of the samples, [errors], and the largest probability of each, [errors].
        Samples with a score that is not finite are not predicted, so they are no errors.
    """
    confident = np.where(np.isfinite(scores).all(1), probabilities(scores).max(1), -1.0)
    wrong = np.flatnonzero((scores.argmax(1) != classes) & (confident >= 0))
    order = wrong[np.argsort(-confident[wrong], kind="stable")]
    return order, confident[order]


def foreign_auroc(scores: NDArray[np.floating], foreign: NDArray[np.bool_]) -> float:
    """Return how well the largest probability of the softmax tells familiar from foreign samples.

    The area under the receiver operating characteristic: the probability that a familiar sample has
    a larger one than a foreign sample, where ties count half (Hendrycks and Gimpel 2017, "A
    Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural Networks"). 1
    means always, 0.5 is chance. NaN if a score is not finite.

    Args:
        scores: [samples, classes], the outputs of the model.
        foreign: [samples], of which at least one is foreign, and one is not.
    """
    if not np.isfinite(scores).all():
        return float("nan")
    confident = probabilities(scores).max(1)
    familiar, other = confident[~foreign, None], confident[None, foreign]
    return float(((familiar > other) + 0.5 * (familiar == other)).mean())


def every_other(classes: Classes) -> NDArray[np.bool_]:
    """Return a mask of every other sample of each class, [samples].

    Stratified, as in scikit-learn's `StratifiedKFold`: each class with at least two samples has
    some on both sides, whatever the order of the samples. The first sample of a class is not in the
    mask.
    """
    order = np.argsort(classes, kind="stable")
    counts = np.unique(classes, return_counts=True)[1]
    places = np.concatenate([np.arange(count) for count in counts]) if len(counts) else order
    mask = np.zeros(len(classes), np.bool_)
    mask[order] = places % 2 == 1
    return mask


def linear_accuracy(
    features: NDArray[np.floating], classes: Classes, *, held_out: NDArray[np.bool_], ridge: float
) -> float:
    """Return the accuracy of a ridge classifier on samples to which it was not fitted.

    Fits one regression per class to targets of -1 and 1, like
    `sklearn.linear_model.RidgeClassifier`.

    Args:
        features: [samples, ...].
        classes: [samples].
        held_out: [samples], the samples to predict.
        ridge: the penalty, above 0.

    Returns:
        The accuracy; NaN if a feature is not finite, and unless some samples are held out and the
        others have at least two classes.
    """
    flat = features.reshape(len(features), -1).astype(np.float64)
    known = np.unique(classes[~held_out])
    if len(known) < 2 or not held_out.any() or not np.isfinite(flat).all():
        return float("nan")
    slopes, offset = ridge_slopes(flat[~held_out], classes[~held_out], known, ridge=ridge)
    predicted = flat[held_out] @ slopes.T + offset
    return float((known[predicted.argmax(1)] == classes[held_out]).mean())


def ridge_slopes(
    given: Floats, classes: Classes, known: Classes, *, ridge: float
) -> tuple[Floats, Floats]:
    """Return the slopes [known, features] and offsets [known] of a regression for each class.

    Args:
        given: [samples, features].
        classes: [samples]; the targets are 1 for a class and -1 for all others.
        known: the classes.
        ridge: the penalty, above 0.
    """
    targets = np.where(classes[:, None] == known, 1.0, -1.0)
    mean, offset = given.mean(0), targets.mean(0)
    centred = given - mean
    # in the dual form, the system has one equation per sample instead of one per feature
    gram = centred @ centred.T
    dual = np.linalg.solve(gram + ridge * np.eye(len(gram)), targets - offset)
    slopes = (centred.T @ dual).T
    return slopes, offset - slopes @ mean
