"""Flags above the step bar that mark notable steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from comgra_decl.viewer.model.labels import pass_label
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.stretches import candidates

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
        for number, step in _broken(view, pass_, type_):
            index = int(np.searchsorted(steps, step))
            text = f"{view.slots[number].node} {pass_label(pass_)}"
            found.setdefault(index, f"NaN or infinite at step {steps[index]}, first in {text}")
    indices = sorted(found)
    if len(indices) > MOST:
        indices = [indices[i] for i in np.linspace(0, len(indices) - 1, MOST).astype(int)]
    return tuple(Mark(index, found[index]) for index in indices)


def _broken(view: RunView, pass_: str, type_: str) -> Iterator[tuple[int, int]]:
    """Yield the steps with NaN or infinity in a pass, each with the first slot that has it.

    In a long run, one step of every span of records that has any, and all of the first span.
    """
    slots = view.in_pass(pass_)
    if view.long:
        found = view.extremes("nonfinite", slots, "abs_max", type_)
        spans = np.flatnonzero((found.high > 0).any(axis=1))
        for span in spans.tolist():
            line = int(np.argmax(found.high[span] > 0))
            yield slots[line], int(found.high_steps[span, line])
        if not len(spans):
            return
        first = int(spans[0])
        end = found.steps[first + 1] - 1 if first + 1 < len(found.steps) else np.inf
        within = float(found.steps[first]), float(end)
        steps, counts, _ = candidates(view, pass_, slots, ("nonfinite", "abs_max", type_), within)
    else:
        steps, counts, _ = candidates(view, pass_, slots, ("nonfinite", "abs_max", type_))
    for column in np.flatnonzero((counts > 0).any(axis=0)).tolist():
        yield slots[int(np.argmax(counts[:, column] > 0))], int(steps[column])
