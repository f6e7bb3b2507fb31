"""Flags above the step bar that mark notable steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from comgra_decl.viewer.model.labels import pass_label
from comgra_decl.viewer.model.runview import RunView

MOST = 200
"""Maximum number of flags. If there are more, the first and evenly spaced others are shown."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A flag at the `index`-th step."""

    index: int
    title: str


def nonfinite_marks(view: RunView, type_: str) -> tuple[Mark, ...]:
    """Return the steps at which any recorded tensor contained NaN or infinity, with its name."""
    return view.now(("marks", type_), lambda: _marks(view, type_))


def _marks(view: RunView, type_: str) -> tuple[Mark, ...]:
    found: dict[int, str] = {}
    steps = view.steps(type_)
    for pass_ in ("forward", *view.gradient_passes()):
        counts = view.heat("nonfinite", pass_, "abs_max", type_)
        slots, recorded = counts.index.to_numpy(), counts.columns.to_numpy()
        broken = counts.to_numpy(float) > 0
        for column in np.flatnonzero(broken.any(axis=0)):
            slot = view.slots[int(slots[np.argmax(broken[:, column])])]
            index = int(np.searchsorted(steps, recorded[column]))
            text = f"{slot.node} {pass_label(pass_)}"
            found.setdefault(index, f"NaN or infinite at step {steps[index]}, first in {text}")
    indices = sorted(found)
    if len(indices) > MOST:
        indices = [indices[i] for i in np.linspace(0, len(indices) - 1, MOST).astype(int)]
    return tuple(Mark(index, found[index]) for index in indices)
