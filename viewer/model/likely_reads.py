"""Prefetching: likely next selections, as small reads that fill a run's caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from comgra_decl.viewer.model.distribution import distribution
from comgra_decl.viewer.model.graph import scale
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, slots_of
from comgra_decl.viewer.model.series import curve
from comgra_decl.viewer.model.statistics import sample_table, statistics_table
from comgra_decl.viewer.model.values import values_picture

Work = Callable[[], object]

_SAMPLES = 8
"""Maximum number of recorded samples to prefetch."""

_QUICK = 2_000_000
"""Maximum number of values per read. A read blocks requests for a few hundredths of a second."""


def next_to(view: RunView, at: Selection, before: Selection, colour: str) -> Iterator[Work]:
    """Yield likely next reads after a change: neighbouring steps or choices.

    Args:
        view: the run.
        at: the selection.
        before: the selection before the change.
        colour: the pass that colours the graph.
    """
    if at.step != before.step:
        yield from near_steps(view, at, before.step)
    if replace(at, step=before.step) != before or at.step == before.step:
        yield from near_choices(view, at, colour)


def near_steps(view: RunView, at: Selection, before: int | None) -> Iterator[Work]:
    """Yield reads for two records in the direction of navigation and one behind."""
    for other in neighbours(view, at, before):
        yield from _at_step(view, other)


def neighbours(view: RunView, at: Selection, before: int | None) -> Iterator[Selection]:
    """Yield the selection at two records in the direction of navigation and one behind."""
    steps = view.steps(at.type)
    if at.step is None or not len(steps):
        return
    here = int(np.searchsorted(steps, at.step))
    way = 1 if before is not None and before < at.step else -1
    for index in (here + way, here + 2 * way, here - way):
        if 0 <= index < len(steps):
            yield replace(at, step=int(steps[index]))


def near_choices(view: RunView, at: Selection, colour: str) -> Iterator[Work]:
    """Yield reads for the tensor's other statistics and samples.

    Args:
        view: The run.
        at: Current selection.
        colour: The pass that colours the graph. Other values of `colour` use no statistics.
    """
    known = view.run.statistics
    here = known.index(at.statistic) if at.statistic in known else 0
    near = sorted(known, key=lambda name: abs(known.index(name) - here))
    others = [replace(at, statistic=name, auto_statistic=False) for name in near]
    samples = map(str, range(min(_SAMPLES, view.run.sample_count)))
    others += [replace(at, batch=batch, auto_batch=False) for batch in ("mean", *samples)]
    for other in others[1:]:
        for slot in slots_of(view, at):
            yield partial(curve, view, slot, other)
    passes = ("forward", *view.gradient_passes())
    if len(view.steps(at.type)) * len(view.slots) <= _QUICK and colour in passes:
        for other in others[1 : len(near)]:
            yield partial(scale, view, other, colour)


def tensor(view: RunView, at: Selection) -> Iterator[Work]:
    """Yield reads for another tensor at the step."""
    for slot in slots_of(view, at):
        yield partial(curve, view, slot, at)
        yield partial(distribution, view, slot, at)
    yield from _at_step(view, at)


def _at_step(view: RunView, at: Selection) -> Iterator[Work]:
    yield partial(statistics_table, view, at)
    yield partial(sample_table, view, at)
    for slot in slots_of(view, at):
        yield partial(values_picture, view, slot, at)
