"""A small part of a recorded tensor, with the meaning of its axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from comgra_decl.errors import UnknownNameError
from comgra_decl.records import SAMPLE, Axis, Normalised, SlotInfo
from comgra_decl.spec.axes import name_axes

from .snapshot import Snapshot, named


@dataclass(frozen=True, eq=False)
class Preview:
    """A small, viewable part of a tensor, as kept in a run; converts to a numpy array.

        >>> run.slot("conv1").preview(100)
        <Preview of step 100: sample 1 (first of 64), channel 10 (first of 16),
        height 10 (means of 28), width 10 (means of 28)>

    Attributes:
        step: the recorded step from which it was taken.
        values: the entries; a tensor with a batch dim has its samples first. The dtype is float32,
            except for whole numbers; if `whole`, it can be any dtype.
        meanings: for each axis, its name, its size in the tensor, and which entries were kept:
            "all", "first" (the first ones), or "mean" (entry i of m is the mean of the entries from
            floor(i size / m) to ceil((i + 1) size / m) - 1).
        whole: whether these are all the values in the record, not a preview of them.
        image: how the images in it were normalised, from `image` in the spec: `values * std + mean`
            is between 0 and 1. None if this is not declared.
    """

    step: int
    values: NDArray[Any]
    meanings: tuple[Axis, ...]
    whole: bool = False
    image: Normalised | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes: ("sample", "channel", "height", "width")."""
        return tuple(axis.name for axis in self.meanings)

    @property
    def pooled(self) -> dict[str, float]:
        """For each axis with means, how many entries of the tensor each mean covers."""
        return {
            axis.name: axis.size / kept
            for axis, kept in zip(self.meanings, self.values.shape, strict=True)
            if axis.how == "mean"
        }

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the values."""
        return np.array(self.values, dtype) if copy else np.asarray(self.values, dtype)

    def __repr__(self) -> str:
        words = {"all": "", "first": " (first of {})", "mean": " (means of {})"}
        parts = [
            f"{axis.name} {kept}{words[axis.how].format(axis.size)}"
            for axis, kept in zip(self.meanings, self.values.shape, strict=True)
        ]
        return f"<Preview of step {self.step}: {', '.join(parts)}>"


def preview(snapshot: Snapshot, slot: SlotInfo, step: int, type_: str | None) -> Preview:
    """Return the values at a step or, if there are none, the preview from the nearest record.

    Records up to the step take precedence over later ones.
    """
    record = snapshot.record(step, type_)
    values = snapshot.view.value(record, slot.id)
    if values is not None:
        return _whole(snapshot, slot, values, step)
    for near in _nearest(snapshot, record, type_):
        found = snapshot.view.preview(near, slot.id)
        if found is not None:
            step = int(snapshot.steps[near])
            return Preview(step, found.values, found.axes, image=slot.image)
    raise UnknownNameError(
        f"{named(slot)} has neither values nor previews; previews need `preview: {{every: 50}}` in "
        "the spec, values need `values: true` for the node."
    )


def _nearest(snapshot: Snapshot, record: int, type_: str | None) -> Iterator[int]:
    """Yield the records of a type: from `record` backwards, then those after it."""
    records = snapshot.records(type_)
    later = int(np.searchsorted(records, record, side="right"))
    yield from reversed(records[:later].tolist())
    yield from records[later:].tolist()


def _whole(snapshot: Snapshot, slot: SlotInfo, values: NDArray[Any], step: int) -> Preview:
    batched = slot.batch_dim is not None
    values = values if batched or values.ndim < 2 else values[0]  # stored as a single sample
    dims = values.shape[1:] if batched else values.shape
    names = axis_names(snapshot, slot, dims, whole_numbers=values.dtype.kind in "iu")
    names = (SAMPLE, *names) if batched else names
    meanings = [Axis(name, "all", size) for name, size in zip(names, values.shape, strict=True)]
    if batched and slot.shape and slot.batch_dim is not None:
        size = max(slot.shape[slot.batch_dim], len(values))
        meanings[0] = Axis(SAMPLE, "all" if size == len(values) else "first", size)
    return Preview(step, values, tuple(meanings), whole=True, image=slot.image)


def axis_names(
    snapshot: Snapshot, slot: SlotInfo, dims: tuple[int, ...], *, whole_numbers: bool
) -> tuple[str, ...]:
    """Return the names of a slot's value dims."""
    if slot.batch_dim is None and slot.shape == ():
        return ("value",) * len(dims)
    return name_axes(
        dims,
        kind=slot.kind,
        node=slot.key.node,
        role=slot.key.role,
        module_class=slot.module_class,
        whole_numbers=whole_numbers,
        batched=slot.batch_dim is not None,
        declared=slot.axes,
        channels_last=snapshot.channels_last.get(slot.id),
    )
