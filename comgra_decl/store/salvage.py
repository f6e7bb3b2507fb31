"""Read damaged arrays: return the intact data, mark lost parts as missing, and log them.

A failed read is halved repeatedly at chunk edges until the unreadable chunks are known. If a block
is damaged, its records are read from the rows, which exist unless the run was compacted. Data that
cannot be read from any copy is replaced by the fill value, which is NaN for statistics, and is
marked as lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError

from .layout import ArrayForm, RecordColumn

_log = logging.getLogger("comgra_decl")

Box = tuple[tuple[int, int], ...]
"""Start and end index (exclusive) in each dim."""

Data = NDArray[np.generic]
Read = Callable[..., Data]
"""Reads the part of an array selected by an index; raises DamagedRunError on failure."""

_CONTENTS = {
    "kpi": "facts and KPIs",
    "agg": "statistics",
    "smp": "statistics of individual samples",
    "hist": "histograms",
}
_MOST_LOGGED = 200
_LARGE = 64 << 20  # bytes; smaller reads are assumed to fit into memory


class TooLargeError(DamagedRunError):
    """There is not enough memory for a read. This is not damage, so splitting would not help."""


class Salvage:
    """Fault-tolerant reads of one view.

    Args:
        read: function that reads or raises.
        forms: array forms of the run.
        records: numeric facts of all records.
        damage: list to which a line is added per loss.
    """

    def __init__(
        self,
        read: Read,
        forms: Mapping[str, ArrayForm],
        records: NDArray[np.float64],
        damage: list[str],
    ) -> None:
        self._read = read
        self._forms = forms
        self._records = records
        self._losses = damage
        self._lost: list[tuple[str, Box]] = []
        self._logged: set[str] = set()

    def read(self, name: str, *index: int | slice) -> Data:
        """Return the part of an array selected by an index, with fill values for lost elements."""
        try:
            return self._read(name, *index)
        except TooLargeError:
            raise
        except DamagedRunError as error:
            form = self._forms.get(name)
            if form is None:
                raise
            box = _box(form, index)
            fill = np.nan if form.dtype.startswith("float") else 0
            data = np.full([high - low for low, high in box], fill, form.dtype)
            self._split(data, form, box, error)
            return data[tuple(slice(None) if isinstance(i, slice) else 0 for i in index)]

    def lost(self, family: str, *index: int | slice) -> NDArray[np.bool_] | None:
        """Return a mask of the lost entries of an index (record, slot, ...); None if none are."""
        boxes = [box for name, box in self._lost if name == family]
        if not boxes:
            return None
        ends = _box(self._forms[f"{family}/row"], index)
        gone = np.zeros([high - low for low, high in ends], bool)
        for box in boxes:
            pairs = zip(ends, box, strict=True)
            gone[tuple(slice(max(0, a - low), max(0, b - low)) for (low, _), (a, b) in pairs)] = (
                True
            )
        if not gone.any():
            return None
        return gone[tuple(slice(None) if isinstance(i, slice) else 0 for i in index)]

    def _fill(self, data: Data, form: ArrayForm, box: Box) -> None:
        """Read a box into `data`; lost parts keep the fill value."""
        try:
            data[...] = self._read(form.name, *(slice(*ends) for ends in box))
        except TooLargeError:
            raise
        except DamagedRunError as error:
            self._split(data, form, box, error)

    def _split(self, data: Data, form: ArrayForm, box: Box, error: DamagedRunError) -> None:
        """Read the readable parts of a box that cannot be read as a whole."""
        axis, middle = _middle(box, form.chunk)
        if middle is None:
            self._look_elsewhere(data, form, box, error)
            return
        low, high = box[axis]
        for first, last in ((low, middle), (middle, high)):
            part = [slice(None)] * len(box)
            part[axis] = slice(first - low, last - low)
            self._fill(data[tuple(part)], form, (*box[:axis], (first, last), *box[axis + 1 :]))

    def _look_elsewhere(
        self, data: Data, form: ArrayForm, box: Box, error: DamagedRunError
    ) -> None:
        family, _, kind = form.name.partition("/")
        rows = self._forms.get(f"{family}/row")
        if kind != "blk" or rows is None:
            self._lose(form, box, error)
            return
        (first, last), (low, high), *inner = box
        for start, stop, width in self._row_spans(family, first, last):
            if width is None:
                self._lose(form, ((start, stop), *box[1:]), error)
            elif low < (upto := min(high, width)):
                part = data[start - first : stop - first, : upto - low]
                self._fill(part, rows, ((start, stop), (low, upto), *inner))

    def _row_spans(
        self, family: str, first: int, last: int
    ) -> Iterator[tuple[int, int, int | None]]:
        """Yield runs of records with rows of equal width; None means that they have no rows."""
        column = RecordColumn.KPIS if family == "kpi" else RecordColumn.WIDTH
        facts = self._records[first:last]
        widths = np.where(facts[:, RecordColumn.FORM] == 0, facts[:, column], -1)
        edges = np.flatnonzero(np.diff(widths)) + 1
        for start, stop in zip([0, *edges], [*edges, len(widths)], strict=True):
            width = int(widths[start])
            yield first + int(start), first + int(stop), None if width < 0 else width

    def _lose(self, form: ArrayForm, box: Box, error: DamagedRunError) -> None:
        family = form.name.partition("/")[0]
        self._lost.append((family, box))
        first, last = self._records[[box[0][0], box[0][1] - 1], RecordColumn.STEP].astype(int)
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        how = "missing" if "NOT_FOUND" in str(error) else "damaged"
        loss = f"{_CONTENTS.get(family, family)} of {steps} are missing: {form.name!r} is {how}"
        if loss in self._losses or len(self._losses) >= _MOST_LOGGED:
            return
        self._losses.append(loss)
        if family not in self._logged:  # `run.damage` lists the others
            self._logged.add(family)
            _log.warning("comgra: %s", loss)


def reserve(size: int, place: str, name: str) -> None:
    """Raise TooLargeError if a read lacks memory, as TensorStore would end the process."""
    if size > _LARGE:
        try:
            np.empty(size, np.uint8)
        except (MemoryError, ValueError):
            need = f"it requires {size / 1e9:.1f} GB of memory"
            raise TooLargeError(f"{place}: cannot read {name!r}: {need}") from None


def _box(form: ArrayForm, index: Sequence[int | slice]) -> Box:
    """Return the box selected by an index; dims not in the index are selected completely."""
    ends = []
    for axis, extent in enumerate(form.shape):
        chosen = index[axis] if axis < len(index) else slice(None)
        if isinstance(chosen, slice):
            low, high, _ = chosen.indices(extent)
            ends.append((low, max(low, high)))
        else:
            ends.append((int(chosen), int(chosen) + 1))
    return tuple(ends)


def _middle(box: Box, chunk: Sequence[int]) -> tuple[int, int | None]:
    """Return the axis and chunk edge at which to split a box; None for a single chunk."""
    spans = [-(-high // size) - low // size for (low, high), size in zip(box, chunk, strict=True)]
    axis = int(np.argmax(spans))
    if spans[axis] < 2:
        return axis, None
    return axis, (box[axis][0] // chunk[axis] + spans[axis] // 2) * chunk[axis]
