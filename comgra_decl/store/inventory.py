"""List the parts of a run that must exist below its `head`, and the parts stored twice.

Used by operations on a whole run: verification reads every region, and compaction omits superseded
parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError

from .layout import DIGITS, SCALAR_BLOCK, ArrayForm, RecordColumn, round_up
from .view import View

WIDTHS = {
    "kpi": RecordColumn.KPIS,
    "agg": RecordColumn.WIDTH,
    "smp": RecordColumn.WIDTH,
    "hist": RecordColumn.WIDTH,
}
"""The record fact that states the number of columns, for each array family."""

_RECORDS = "records"


@dataclass(frozen=True)
class Region:
    """A box of an array that must exist completely; its edges are aligned with chunks.

    Attributes:
        form: the array.
        low: first index in each dim.
        high: index after the last in each dim.
    """

    form: ArrayForm
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        count = 1
        for axis, chunk in enumerate(self.form.chunk):
            count *= -(-(self.high[axis] - self.low[axis]) // chunk)
        return count

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for low, high in zip(self.low, self.high, strict=True):
            count *= high - low
        return count

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the box."""
        return tuple(slice(low, high) for low, high in zip(self.low, self.high, strict=True))

    def parts(self, elements: int) -> Iterator[Region]:
        """Yield regions of at most `elements` elements each, or of a single chunk."""
        if self.elements <= elements or self.chunks == 1:
            yield self
        else:
            for half in self.halves():
                yield from half.parts(elements)

    def halves(self) -> tuple[Region, Region]:
        """Return two regions of whole chunks; requires more than one chunk."""
        axis = max(range(len(self.low)), key=self._chunks_along)
        middle = self._chunks_along(axis) // 2 * self.form.chunk[axis] + self.low[axis]
        return (
            Region(self.form, self.low, _changed(self.high, axis, middle)),
            Region(self.form, _changed(self.low, axis, middle), self.high),
        )

    def _chunks_along(self, axis: int) -> int:
        return -(-(self.high[axis] - self.low[axis]) // self.form.chunk[axis])


def block_of(view: View) -> int:
    """Return the number of records per block."""
    form = view.tables.forms.get("kpi/blk")
    return form.chunk[0] if form else 1


def edge_of(view: View) -> int:
    """Return the first record that is not in a complete block."""
    return view.n // block_of(view) * block_of(view)


def regions(view: View) -> Iterator[Region]:
    """Yield every array region that must exist: rows, blocks, raw values."""
    forms = view.tables.forms
    for family in WIDTHS:
        if f"{family}/row" in forms:
            yield from _rows(view, family)
            yield from _blocks(view, family)
    yield from _records(view)
    yield from _values(view)


def fact_regions(view: View) -> list[Region]:
    """Return the regions that store whether records in complete blocks also have rows.

    These are the facts of records: the first columns of "kpi" and of "records" (missing from older
    runs).
    """
    form, edge = view.tables.forms.get("kpi/blk"), edge_of(view)
    facts = [Region(form, (0, 0), (edge, form.chunk[1]))] if form and edge else []
    return facts + list(_records(view))


def _records(view: View) -> Iterator[Region]:
    """Yield the second copy of the records' facts, in a few large chunks."""
    form = view.tables.forms.get(_RECORDS)
    if form is not None and view.n >= form.chunk[0]:
        yield Region(form, (0, 0), (view.n // form.chunk[0] * form.chunk[0], form.shape[1]))


def _rows(view: View, family: str) -> Iterator[Region]:
    """Yield the records that are stored as rows, in long stretches of equal width."""
    table, form = view.records, view.tables.forms[f"{family}/row"]
    widths = np.where(table[:, RecordColumn.FORM] == 0, table[:, WIDTHS[family]], 0)
    for first, last, width in _equal(widths):
        if width:
            yield _region(form, first, last, width)


def _blocks(view: View, family: str) -> Iterator[Region]:
    """Yield the blocks. A block is as wide as its last record, which completed it."""
    block, edge = block_of(view), edge_of(view)
    form = view.tables.forms[f"{family}/blk"]
    widths = view.records[block - 1 : edge : block, WIDTHS[family]]
    for first, last, width in _equal(widths):
        yield _region(form, first * block, last * block, width)


def _values(view: View) -> Iterator[Region]:
    tables = view.tables
    for record in range(view.n):
        try:
            stored = view.stored_values(record)
        except DamagedRunError:
            continue  # unknown values are reported as separate damage
        for name, slots in stored.items():
            form, lanes = tables.forms[name], tables.lanes.get(name, {})
            known = [lanes[slot] for slot in slots if slot in lanes]  # others: reported separately
            for first, last in _lane_chunks(known, form.chunk[1]):
                low = (record, first, *[0] * len(form.shape[2:]))
                yield Region(form, low, (record + 1, last, *form.shape[2:]))


def _lane_chunks(lanes: Sequence[int], chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of lanes covered by the chunks of these lanes."""
    held = np.zeros(max(lanes, default=-1) // chunk + 1, np.int64)
    held[[lane // chunk for lane in lanes]] = 1
    for first, last, there in _equal(held):
        if there:
            yield first * chunk, last * chunk


def _region(form: ArrayForm, first: int, last: int, width: int) -> Region:
    inner = form.shape[2:]
    upto = round_up(width, form.chunk[1])
    return Region(form, (first, 0, *[0] * len(inner)), (last, upto, *inner))


def _equal(numbers: NDArray[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, end, number) for each run of equal numbers; `end` is exclusive."""
    edges = np.flatnonzero(np.diff(numbers)) + 1
    for first, last in zip([0, *edges], [*edges, len(numbers)], strict=True):
        if first < last:
            yield int(first), int(last), int(numbers[first])


def is_superseded(key: str, *, edge: int, scalars: int) -> bool:
    """Whether all data in a key is also in a complete block.

    Args:
        key: any key of the database.
        edge: see `edge_of`.
        scalars: number of scalars.
    """
    family, _, rest = key.partition("/row/")
    if family == "scalars":
        digits = rest[:DIGITS]
        return digits.isdigit() and int(digits) < scalars // SCALAR_BLOCK * SCALAR_BLOCK
    if family == "sums":
        return rest.isdigit() and int(rest) < edge
    if family not in WIDTHS or not rest.startswith("c/"):
        return False
    record = rest.split("/")[1]
    return record.isdigit() and int(record) < edge


def keys_of(region: Region) -> Iterator[str]:
    """Yield the keys of a region's chunks."""
    spans = [
        range(low // chunk, -(-high // chunk))
        for low, high, chunk in zip(region.low, region.high, region.form.chunk, strict=True)
    ]
    for place in product(*spans):
        yield f"{region.form.name}/c/{'/'.join(map(str, place))}"


def _changed(numbers: tuple[int, ...], at: int, number: int) -> tuple[int, ...]:
    return (*numbers[:at], number, *numbers[at + 1 :])
