"""Decide which records contain previews of which tensors, and determine what their axes mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from comgra_decl.spec.axes import Layouts, name_axes
from comgra_decl.stats import CannotReduceError
from comgra_decl.stats.previews import Previews

if TYPE_CHECKING:
    from comgra_decl.hooks.tensors.slots import Slot
    from comgra_decl.records import StoredPreview
    from comgra_decl.spec import Spec

_SHARE = 0.25
"""The largest part of the space that the disk budget leaves which the previews of a record take."""

_FIRST = 4
"""The first records with a preview of every input and target: those that *Data* shows."""
_GIVEN = ("input", "target")

_WHOLE_NUMBERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class Previewing:
    """Takes previews in every n-th record, unless the disk budget leaves too little space.

    The first four records have previews of inputs and targets in any case.

    A record with previews may be many times larger than others, so the average size of a record,
    by which the budget decides whether another one fits, says little about it.

    Args:
        every: n.
        samples: maximum number of samples in a preview.
        refuse: called with a name and a reason if a preview cannot be taken.
        left: returns the bytes that the disk budget leaves, see `Declared.left`.
    """

    def __init__(
        self,
        every: int,
        *,
        samples: int,
        refuse: Callable[[str, str], object],
        left: Callable[[int], float | None],
    ) -> None:
        self._every = every
        self._refuse = refuse
        self._left = left
        self._records = 0
        self._due = False
        self._size = 0  # bytes of the last previews
        self._stored = 0  # bytes of all previews so far
        self._layouts = Layouts()
        self._previews = Previews(samples=samples)

    def begin(self) -> Previewing | None:
        """Start a record; return this object if the record will contain previews."""
        self._previews.clear()
        self._due = not self._records % self._every
        return self if (self._due or self._records < _FIRST) and self._fits() else None

    def add(self, index: int, slot: Slot, tensor: torch.Tensor, batch_dim: int | None) -> None:
        """Take a preview of the tensor that the reducer numbers `index`."""
        if not self._due and slot.kind not in _GIVEN:
            return
        if slot.piece is not None:
            return  # a shard: its preview would show only a piece of the tensor
        shape = tuple(tensor.shape)
        dims = shape if batch_dim is None else shape[:batch_dim] + shape[batch_dim + 1 :]
        last = self._layouts.channels_last(dims)
        if slot.kind not in ("parameter", "buffer"):
            self._layouts.add(dims, slot.module_class)
        names = name_axes(
            dims,
            kind=slot.kind,
            node=slot.node(),
            role=slot.role,
            module_class=slot.module_class,
            whole_numbers=tensor.dtype in _WHOLE_NUMBERS,
            batched=batch_dim is not None,
            declared=slot.axes,
            channels_last=last,
        )
        try:
            self._previews.add(index, tensor, batch_dim, names)
        except (CannotReduceError, RuntimeError) as error:
            self._refuse(f"the preview of {slot.node()} {slot.role}", str(error))

    def finish(
        self, entries: Iterable[tuple[Slot, int]]
    ) -> tuple[dict[int, StoredPreview], Callable[[], None] | None]:
        """End a record; return its previews by slot id, valid after the function has run."""
        self._records += 1
        found, wait = self._previews.finish()
        self._size = sum(preview.values.nbytes for preview in found.values())
        if not found or not self._fits():
            return {}, wait
        self._stored += self._size
        return {slot.id: found[index] for slot, index in entries if index in found}, wait

    def _fits(self) -> bool:
        """Return whether there is room for previews as large as the last ones."""
        left = self._left(self._stored)
        if left is None or self._size <= _SHARE * left:
            return True
        self._refuse(
            "previews",
            f"they take {self._size:,} bytes in a record, more than {_SHARE:.0%} of what "
            "schedule.budget.disk leaves; later records have none",
        )
        return False


def previewing(
    spec: Spec,
    *,
    refuse: Callable[[str, str], object],
    left: Callable[[int], float | None],
) -> Previewing | None:
    """Return an object that takes the previews that a spec requests; None if it requests none."""
    if spec.preview is None:
        return None
    return Previewing(spec.preview.every, samples=spec.samples.count, refuse=refuse, left=left)
