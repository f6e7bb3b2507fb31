"""Pictures of categories of samples in a layer: their directions, and how far they are apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from comgra_decl.errors import UnknownNameError
from comgra_decl.pictures import predictions, separation
from comgra_decl.records import SAMPLE

from .picture import Picture
from .recorded_values import RecordedValues

_QUANTITIES = ("variability collapse", "silhouette", "effective rank")


def concept_vectors(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the direction of each category in a layer, of length 1; see `Run.picture`."""
    wanted, at = read.wanted("concept_vectors", node), read.step(step, read.type)
    value, groups, names = read.grouped(wanted, at)
    held_out = predictions.every_other(groups)
    known = np.arange(len(names))
    if len({*groups[~held_out].tolist()}) < 2:
        raise UnknownNameError(
            f"concept vectors need samples of two categories; those of step {at} have "
            f"{', '.join(names) or 'none'}. Set `samples.by`, or give the samples of a probe "
            "`labels`."
        )
    flat = value.reshape(len(value), -1).astype(np.float64)
    vectors, accuracy = np.full((len(names), flat.shape[1]), np.nan), float("nan")
    if np.isfinite(flat).all():
        slopes, _ = predictions.ridge_slopes(
            flat[~held_out], groups[~held_out], known, ridge=predictions.RIDGE
        )
        with np.errstate(invalid="ignore"):  # a layer that does not vary has no directions
            vectors = slopes / np.linalg.norm(slopes, axis=1, keepdims=True)
        accuracy = predictions.linear_accuracy(
            flat, groups, held_out=held_out, ridge=predictions.RIDGE
        )
    facts = {
        "accuracy": accuracy,
        "fitted": int((~held_out).sum()),
        "tested": int(held_out.sum()),
    }
    dims = read.axes(read.slot(wanted), value.shape[1:])
    vectors = vectors.reshape(len(names), *value.shape[1:])
    labels: dict[str, list[Any]] = {"category": names}
    return Picture("concept_vectors", vectors, ("category", *dims), wanted, at, labels, facts)


def concept_derivatives(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the derivative of the loss along each concept vector; see `Run.picture`."""
    vectors = concept_vectors(read, step, read.wanted("concept_derivatives", node))
    wanted, at = str(vectors.node), vectors.step
    assert at is not None  # those of one step
    type_ = read.training
    slot = read.run.slot(wanted, role=read.slot(wanted).key.role)
    gradient = slot.grad.value(at, type=type_)
    if gradient.shape[1:] != vectors.values.shape[1:]:
        raise UnknownNameError(
            f"the gradient of {wanted!r} at step {at} has the shape {gradient.shape[1:]} per "
            f"sample, but its concept vectors have {vectors.values.shape[1:]}."
        )
    flat = gradient.reshape(len(gradient), -1).astype(np.float64)
    found = vectors.values.reshape(len(vectors.values), -1) @ flat.T
    lowered = [float((row < 0).mean()) if np.isfinite(row).all() else np.nan for row in found]
    labels = {
        "category": vectors.labels["category"],
        SAMPLE: read.run.samples(at, type=type_)["label"].tolist(),
    }
    facts = {**vectors.facts, "lowers_loss": lowered}
    return Picture("concept_derivatives", found, ("category", SAMPLE), wanted, at, labels, facts)


def separability(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return how far a cloud has collapsed and its categories are apart; see `Run.picture`."""
    wanted = read.wanted("separability", node)
    steps = read.steps() if step is None else [step]
    values = read.over_steps(read.slot(wanted), steps, wanted)
    found = np.full((len(values), len(_QUANTITIES)), np.nan)
    counts = []
    for i, (at, value) in enumerate(values.items()):
        flat = value.reshape(len(value), -1).astype(np.float64)
        grouped, groups, names = read.grouped(wanted, at)
        counts.append(len(names))
        if np.isfinite(flat).all():
            points = grouped.reshape(len(grouped), flat.shape[1]).astype(np.float64)
            found[i] = (
                separation.variability_collapse(points, groups),
                separation.silhouette(points, groups),
                separation.effective_rank(flat),
            )
    labels: dict[str, list[Any]] = {"step": [*values], "quantity": [*_QUANTITIES]}
    samples = [len(value) for value in values.values()]
    facts = {"samples": samples, "categories": counts}
    return Picture("separability", found, ("step", "quantity"), wanted, step, labels, facts)
