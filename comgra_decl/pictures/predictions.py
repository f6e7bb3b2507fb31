"""A model's predictions: confusion, calibration, and what a linear model can read from a layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Classes = NDArray[np.int64]


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
    shifted = np.exp(scores.astype(np.float64) - scores.max(1, keepdims=True))
    chances = shifted / shifted.sum(1, keepdims=True)
    confident, right = chances.max(1), chances.argmax(1) == classes
    place = np.clip(np.ceil(confident * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        sure = np.bincount(place, confident, bins) / count
        accurate = np.bincount(place, right, bins) / count
    return np.stack([sure, accurate, count], 1)


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
    given = flat[~held_out]
    targets = np.where(classes[~held_out, None] == known, 1.0, -1.0)
    mean, offset = given.mean(0), targets.mean(0)
    centred = given - mean
    # in the dual form, the system has one equation per sample instead of one per feature
    gram = centred @ centred.T
    dual = np.linalg.solve(gram + ridge * np.eye(len(gram)), targets - offset)
    predicted = (flat[held_out] - mean) @ (centred.T @ dual) + offset
    return float((known[predicted.argmax(1)] == classes[held_out]).mean())
