"""What overviews draw of a statistic: each record or, in a long run, the extremes of 256 records.

In a long run, drawing every record would mean reading all of it, although a pixel shows hundreds of
records. The lowest and the highest value of each span of records are read instead, with the steps
at which they occur. Zooming in shows every record again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.query import Slot as Handle
from comgra_decl.viewer.model.runview import RunView, Slot, Steps

Floats = NDArray[np.float64]
Window = tuple[float, float]


def points_of(found: pd.DataFrame) -> tuple[Steps, Floats, NDArray[np.int64]]:
    """Return extremes (`Slot.extremes`) as points of a line: steps, values, numbers of spans.

    A span has a point at its lowest and one at its highest value, or a single point if they are the
    same. A span without any value is a NaN at its first step.
    """
    recorded = found[["low_step", "high_step"]].to_numpy(np.int64)
    steps = np.where(recorded < 0, found.index.to_numpy(np.int64)[:, None], recorded)
    values = found[["low", "high"]].to_numpy(float)
    order = np.argsort(steps, axis=1, kind="stable")
    steps, values = (np.take_along_axis(each, order, axis=1) for each in (steps, values))
    keep = np.ones(steps.shape, bool)
    keep[:, 1] = steps[:, 0] != steps[:, 1]
    spans = np.broadcast_to(np.arange(len(steps))[:, None], steps.shape)
    return steps[keep], values[keep], spans[keep]


def line_of(
    view: RunView, slot: Slot, statistic: str, over: str, type_: str
) -> tuple[Steps, Floats]:
    """Return a statistic of a slot as points of a line over all steps."""
    if view.long:
        return points_of(view.slot_extremes(slot, statistic, over, type_))[:2]
    return _all_points(view.series(slot, statistic, over, type_))


def line_of_slot(
    slot: Handle, statistic: str, over: str, type_: str | None
) -> tuple[Steps, Floats]:
    """Return what `line_of` does, of a tensor that no viewer has open."""
    if slot.long:
        return points_of(slot.extremes(statistic, over_batch=over, type=type_))[:2]
    return _all_points(slot.series(statistic, over_batch=over, type=type_))


def _all_points(series: pd.Series) -> tuple[Steps, Floats]:
    return np.asarray(series.index, np.int64), np.asarray(series, float)


def candidates(
    view: RunView,
    pass_: str,
    slots: Sequence[int],
    what: tuple[str, str, str],
    within: Window | None = None,
) -> tuple[Steps, Floats, Steps]:
    """Return candidates for the cells of a heat map of a pass.

    Args:
        view: the run.
        pass_: the pass.
        slots: id of the slot of each line; -1 for none.
        what: the statistic, the aggregate over the batch and the type of execution.
        within: steps that are visible.

    Returns:
        The steps by which candidates are put into columns [k], the values [lines, k], and the steps
        at which they were recorded [lines, k]. In a long run, a candidate is the value of largest
        magnitude of a span.
    """
    statistic, over, type_ = what
    if not view.long:
        table = view.heat(statistic, pass_, over, type_)
        steps = table.columns.to_numpy(np.int64)
        return (
            steps,
            table.reindex([*slots]).to_numpy(float),
            np.broadcast_to(steps, (len(slots), len(steps))),
        )
    known = view.in_pass(pass_)
    if view.closely(within, type_):
        assert within is not None
        heat = view.window(statistic, known, within, over, type_)
        steps, values, at = (
            heat.steps,
            heat.values.T,
            np.broadcast_to(heat.steps, heat.values.T.shape),
        )
    else:
        found = view.extremes(statistic, known, over, type_)
        lower = np.abs(found.low) > np.abs(found.high)
        steps, values = found.steps, np.where(lower, found.low, found.high).T
        at = np.where(lower, found.low_steps, found.high_steps).T
        at = np.where(at < 0, steps, at)
    lines = [known.index(slot) if slot >= 0 else -1 for slot in slots]
    empty = np.array(lines, np.int64) < 0
    return steps, np.where(empty[:, None], np.nan, values[lines]), at[lines]
