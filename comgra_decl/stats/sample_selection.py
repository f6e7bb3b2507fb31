"""Select the samples to record individually, with equal numbers per category."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import RawStep

_log = logging.getLogger("comgra_decl")


def choose_samples(raw: RawStep, count: int, *, in_batch_order: bool = False) -> None:
    """Replace the first samples of a step with `count` selected ones, if it has labels.

    Sets `info.samples` to their batch indices and `info.extra["labels"]` to their labels, and
    reduces the values to these samples. Without exactly one label per sample, the first samples are
    kept. The labels of the samples alternate unless they are stored `in_batch_order`.
    """
    labels, raw.labels = raw.labels, None
    if labels is None or not count:
        _first_values(raw, count)
        return
    found = labels()
    if len(found) != raw.info.batch_size:
        _log.warning(
            "comgra.samples.by: %d categories for a batch of %s samples at step %d; "
            "the first samples are recorded",
            len(found),
            raw.info.batch_size,
            raw.info.step,
        )
        _first_values(raw, count)
        return
    layout = raw.layout
    if (pooled := layout.rows < layout.samples).any():  # the other samples have no rows
        found = found[: int(layout.rows[pooled].min())]
    chosen = balanced(found, count)
    raw.info.samples = chosen = sorted(chosen) if in_batch_order else chosen
    raw.info.extra = {**raw.info.extra, "labels": [str(found[i]) for i in chosen]}
    raw.chosen = np.array(chosen, np.int64)
    _reduce_values(raw, raw.chosen)


def balanced(labels: Sequence[Any], count: int) -> list[int]:
    """Return up to `count` indices: the first of each label, then the second, and so on.

    Labels alternate in ascending order, numbers before strings. The order is therefore the same in
    every batch that contains all labels.
    """
    places: dict[Any, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    ordered = [places[label] for label in sorted(places, key=_rank)]
    chosen: list[int] = []
    turn = 0
    while len(chosen) < min(count, len(labels)):
        chosen += [of_label[turn] for of_label in ordered if turn < len(of_label)]
        turn += 1
    return chosen[:count]


def _rank(label: Any) -> tuple[bool, float, str]:
    number = isinstance(label, (int, float))
    return not number, float(label) if number else 0.0, str(label)


def _first_values(raw: RawStep, count: int) -> None:
    """Reduce the values to the first samples; until now, the values of all samples were kept."""
    _reduce_values(raw, np.arange(count))


def _reduce_values(raw: RawStep, places: NDArray[np.int64]) -> None:
    if not (raw.values or raw.spare_values):
        return
    layout = raw.layout
    batched = dict(zip(layout.slots.tolist(), layout.batched[layout.tensors].tolist(), strict=True))
    for values in (raw.values, raw.spare_values):
        for slot, value in values.items():
            if batched[slot]:
                values[slot] = value[places[places < len(value)]]
