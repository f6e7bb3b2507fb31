"""Recorded values as points, one for each sample, of which a tool shows a cloud."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import PROBE_PREFIX, SlotInfo, SlotKey, StepBatch, StepInfo

from . import naming
from .selection import Selection

MOST_TENSORS = 20
"""Largest number of tensors of a record that become points."""

_MOST_DIMS = 4096
_PAUSE = 100.0  # times what it took to write the points


@dataclass(frozen=True, eq=False)
class Points:
    """The values of one record.

    Attributes:
        type: type of execution of the record.
        step: its step.
        places: index of each sample in its batch.
        labels: category of each sample; None if it has none.
        tensors: float32 [samples, values] by tensor.
        images: an input, [samples, channels, height, width]; None if none is an image.
    """

    type: str
    step: int
    places: Sequence[int]
    labels: Sequence[Any]
    tensors: Mapping[SlotKey, NDArray[np.float32]]
    images: NDArray[Any] | None = None


def has_points(type_: str) -> bool:
    """Return whether the records of a type of execution become points: training and probes."""
    return type_ == naming.TRAIN or type_.startswith(PROBE_PREFIX)


def can_be_points(kind: str, batch_dim: int | None) -> bool:
    """Return whether a tensor has a point for each sample: it has a batch dim and is no target."""
    return batch_dim is not None and kind not in ("target", "loss")


def as_points(values: NDArray[Any]) -> NDArray[np.float32] | None:
    """Return the values of a tensor, [samples, ...], as float32 [samples, values].

    None if there are fewer than three samples, one value for each or more than 4,096, or if the
    values are complex.
    """
    points = values.reshape(len(values), -1)
    usable = len(points) > 2 and 1 < points.shape[1] <= _MOST_DIMS and points.dtype.kind != "c"
    return points.astype(np.float32) if usable else None


def is_image(kind: str, pass_: str, values: NDArray[Any]) -> bool:
    """Return whether the values of a tensor are pictures of more than two samples."""
    return kind == "input" and pass_ == "forward" and values.ndim == 4 and len(values) > 2


class NewestPoints:
    """Keep the newest values of training and of each probe until a tool has time for them.

    Values of earlier records are dropped, so that a slow tool needs no memory. `keep` is called on
    the thread that writes the run, the other methods on the thread of the tool.
    """

    def __init__(
        self, selection: Selection, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._selection = selection
        self._clock = clock
        self._again = -np.inf  # when to write the points next
        self._slots: dict[int, SlotInfo] = {}
        self._newest: dict[str, tuple[StepInfo, dict[int, NDArray[Any]]]] = {}
        self._changed = False
        self._work = threading.Lock()

    def see(self, slots: Sequence[SlotInfo]) -> None:
        """Add slots."""
        new = {slot.id: slot for slot in slots if self._concerns(slot)}
        with self._work:
            self._slots |= new

    def keep(self, batch: StepBatch) -> None:
        """Replace the values of the types of execution in a batch; nothing is copied."""
        self.see(batch.new_slots)
        for info, values in zip(batch.steps, batch.values, strict=False):  # or no values at all
            found = {slot: values[slot] for slot in values.keys() & self._slots.keys()}
            if found and has_points(info.type):
                with self._work:
                    self._newest[info.type] = (info, found)
                    self._changed = True

    def write(
        self,
        chosen: Mapping[int, SlotKey],
        to: Callable[[Sequence[Points]], None],
        *,
        last: bool = False,
    ) -> None:
        """Pass on the newest points if they are new, and writing took at most a hundredth of late.

        Args:
            chosen: the selected tensors, by id.
            to: receives the points.
            last: whether the run has ended, so that nothing is left for later.
        """
        began = self._clock()
        if began < self._again and not last:
            return
        with self._work:
            if not self._changed:
                return
            newest, slots, self._changed = dict(self._newest), dict(self._slots), False
        found = [_points(*each, slots, chosen) for each in newest.values()]
        if any(points.tensors for points in found):
            to(found)
        ended = self._clock()
        self._again = ended + _PAUSE * (ended - began)

    def _concerns(self, slot: SlotInfo) -> bool:
        if slot.kind == "input" and slot.key.pass_ == "forward":
            return True  # it may be an image
        selected = self._selection.nodes != "" and self._selection.includes(
            slot.key.node, slot.key.pass_
        )
        return selected and can_be_points(slot.kind, slot.batch_dim)


def _points(
    info: StepInfo,
    values: Mapping[int, NDArray[Any]],
    slots: Mapping[int, SlotInfo],
    chosen: Mapping[int, SlotKey],
) -> Points:
    """Return the points of a record."""
    there = sorted(values.keys() & slots.keys())
    usable = (
        (chosen[slot], points)
        for slot in there
        if slot in chosen
        and can_be_points(slots[slot].kind, slots[slot].batch_dim)
        and (points := as_points(values[slot])) is not None
    )
    images = (
        values[slot]
        for slot in there
        if is_image(slots[slot].kind, slots[slot].key.pass_, values[slot])
    )
    labels = info.extra.get("labels") or [None] * len(info.samples)
    tensors = dict(islice(usable, MOST_TENSORS))
    return Points(info.type, info.step, info.samples, labels, tensors, next(images, None))
