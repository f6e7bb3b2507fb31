"""Pictures of single predictions: confident errors, and samples of foreign categories."""

from __future__ import annotations

import numpy as np

from comgra_decl.errors import UnknownNameError
from comgra_decl.pictures import predictions

from .picture import Picture
from .recorded_values import RecordedValues


def confident_errors(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the wrong predictions of a step, the most confident one first; see `Run.picture`."""
    output, at = node or read.output(), read.step(step, read.type)
    places, classes, scores = read.judged(output, at)
    wrong, confident = predictions.confident_errors(classes, scores)
    columns = (places[wrong], classes[wrong], scores.argmax(1)[wrong], confident)
    values = np.stack([np.asarray(column, np.float64) for column in columns], 1)
    labels = {"quantity": ["sample", "class", "predicted class", "confidence"]}
    facts = {"samples": len(classes)}
    return Picture("confident_errors", values, ("error", "quantity"), output, at, labels, facts)


def foreign_auroc(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return how well confidence tells foreign samples apart, by step; see `Run.picture`."""
    output = node or read.output()
    if not read.foreign:
        raise UnknownNameError(
            "no categories are declared as foreign; declare them with the samples of a probe, as "
            "in `probes: {eyes: {batch: ..., labels: [0, 1, -1], foreign: [-1]}}`."
        )
    steps = read.steps() if step is None else [read.step(step, read.type)]
    found, counts = [], (0, 0)
    for at in steps:
        scores, labels = read.scores(output, at), read.labels(at)
        foreign = np.array([label in read.foreign for label in labels], np.bool_)
        counts = int((~foreign).sum()), int(foreign.sum())
        if not all(counts):
            raise UnknownNameError(
                f"{counts[1]} of the {len(labels)} samples of step {at} are of the foreign "
                f"categories {', '.join(sorted(read.foreign))}; both foreign and other samples are "
                "needed."
            )
        found.append(predictions.foreign_auroc(scores[: len(labels)], foreign))
    facts = {"familiar": counts[0], "foreign": counts[1]}
    values = np.array(found, np.float64)
    return Picture("foreign_auroc", values, ("step",), output, step, {"step": steps}, facts)
