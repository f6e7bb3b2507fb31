"""Pictures of predictions: those of the model, and of linear probes of its layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from comgra_decl.errors import UnknownNameError
from comgra_decl.pictures import predictions

from .picture import Picture
from .recorded_values import RecordedValues


def confusion(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the predictions by class, by step; see `Run.picture`."""
    output = node or read.output()
    steps = read.steps() if step is None else [read.step(step, read.type)]
    counts = [predictions.confusion(*read.scored(output, at)) for at in steps]
    labels = {"step": steps}
    axes = ("step", "class", "predicted class")
    return Picture("confusion", np.stack(counts), axes, output, step, labels)


def reliability(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return confidence and accuracy in ten bins; see `Run.picture`."""
    output, at = node or read.output(), read.step(step, read.type)
    values = predictions.reliability(*read.scored(output, at))
    labels = {"quantity": ["confidence", "accuracy", "samples"]}
    return Picture("reliability", values, ("bin", "quantity"), output, at, labels)


def linear_probe(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return how well each layer tells the classes apart, by step; see `Run.picture`."""
    steps = read.steps() if step is None else [read.step(step, read.type)]
    samples = [read.classes(at) for at in steps]
    held_out = [predictions.every_other(classes) for _, classes in samples]
    classes = samples[-1][1]
    usable = (
        bool(any(held)) and len({*each.tolist()}) > 1
        for (_, each), held in zip(samples, held_out, strict=True)
    )
    if not any(usable):  # before values are read
        raise UnknownNameError(
            "a linear probe needs samples of two classes, at least one of them with two "
            f"samples; those of step {steps[-1]} have the classes {classes.tolist()}. Raise "
            "`samples.count`, or set `samples.by` to have the same number of each class."
        )
    names = [*read.all_values(steps[-1])] if node is None else [node]
    found = np.full((len(steps), len(names)), np.nan)
    for i, (at, (places, each), held) in enumerate(zip(steps, samples, held_out, strict=True)):
        for j, name in enumerate(names):
            found[i, j] = predictions.linear_accuracy(
                read.value(name, at)[places], each, held_out=held, ridge=predictions.RIDGE
            )
    facts: dict[str, Any] = {
        "fitted": [int((~held).sum()) for held in held_out],
        "tested": [int(held.sum()) for held in held_out],
    }
    labels: dict[str, list[Any]] = {"step": steps, "node": names}
    return Picture("linear_probe", found, ("step", "node"), node, step, labels, facts)


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
