"""What someone is likely to look at next, as small pieces of reading that fill a run's caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from comgra_decl.viewer.model.distribution import distribution
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, slots_of
from comgra_decl.viewer.model.series import curve
from comgra_decl.viewer.model.statistics import sample_table, statistics_table
from comgra_decl.viewer.model.values import values_picture

Work = Callable[[], object]


def near_steps(view: RunView, at: Selection, before: int | None) -> Iterator[Work]:
    """Yields what shows the tensor two records on in the direction of walking, and one back."""
    steps = view.steps(at.type)
    if at.step is None or not len(steps):
        return
    here = int(np.searchsorted(steps, at.step))
    way = 1 if before is not None and before < at.step else -1
    for index in (here + way, here + 2 * way, here - way):
        if 0 <= index < len(steps):
            yield from _at_step(view, replace(at, step=int(steps[index])))


def tensor(view: RunView, at: Selection) -> Iterator[Work]:
    """Yields what shows another tensor at the step."""
    for slot in slots_of(view, at):
        yield partial(curve, view, slot, at)
        yield partial(distribution, view, slot, at)
    yield from _at_step(view, at)


def _at_step(view: RunView, at: Selection) -> Iterator[Work]:
    yield partial(statistics_table, view, at)
    yield partial(sample_table, view, at)
    for slot in slots_of(view, at):
        yield partial(values_picture, view, slot, at)
