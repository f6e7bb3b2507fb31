"""The recorded values of a run as points for TensorBoard's projector."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run
from comgra_decl.records import SlotKey
from comgra_decl.sinks.points import (
    MOST_TENSORS,
    Points,
    as_points,
    can_be_points,
    has_points,
    is_image,
)


def points_in(run: Run, chosen: list[SlotKey]) -> Iterator[Points]:
    """Yield the values of the last record of training and of each probe.

    There is one point per sample. Tensors without a batch dimension, with fewer than three samples
    or with more than 4,096 values per sample are left out, and so are all tensors of a record
    beyond the first 20.

    Args:
        run: the run.
        chosen: the tensors, in order.
    """
    last = run.records.groupby("type", sort=False, observed=True)["step"].max()
    for type_, number in last.items():
        if not has_points(str(type_)):
            continue
        step = int(number)
        samples = run.samples(step, type=str(type_))
        tensors = dict(islice(_all_points(run, chosen, step, str(type_)), MOST_TENSORS))
        yield Points(
            str(type_),
            step,
            samples["place"].tolist(),
            samples["label"].tolist(),
            tensors,
            _images(run, step, str(type_)) if tensors else None,
        )


def _all_points(
    run: Run, chosen: list[SlotKey], step: int, type_: str
) -> Iterator[tuple[SlotKey, NDArray[np.float32]]]:
    for key in chosen:
        points = _points(run, key, step, type_)
        if points is not None:
            yield key, points


def _points(run: Run, key: SlotKey, step: int, type_: str) -> NDArray[np.float32] | None:
    """Return the values of a tensor, [samples, values]; None if they make no points."""
    slot = run.slot(key.node, role=key.role, of=key.pass_, iteration=key.iteration)
    if not can_be_points(slot.kind, slot.batch_dim):
        return None
    try:
        return as_points(slot.value(step, type=type_))
    except UnknownNameError:
        return None


def _images(run: Run, step: int, type_: str) -> NDArray[Any] | None:
    """Return the first input with the shape [samples, channels, height, width]."""
    inputs = run.slots.query("kind == 'input' and `pass` == 'forward'")
    for node, role in inputs[["node", "role"]].itertuples(index=False):
        try:
            values = run.slot(node, role=role).value(step, type=type_)
        except UnknownNameError:
            continue
        if is_image("input", "forward", values):
            return values
    return None
