"""The picture of how far the categories of samples are apart in a layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from comgra_decl.pictures import separation

from .picture import Picture
from .recorded_values import RecordedValues

_QUANTITIES = ("variability collapse", "silhouette", "effective rank")


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
