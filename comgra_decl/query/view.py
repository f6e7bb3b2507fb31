"""Read interface of a run, whether written by one process or several."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import Note, SlotInfo, StoredPreview, Structure
from comgra_decl.store import RunMeta
from comgra_decl.store.levels import Extremes
from comgra_decl.store.parts import Part
from comgra_decl.store.sessions import Session


class RecordView(Protocol):
    """The records of a run at one moment: immutable, thread-safe.

    `store.View` implements it for one process. `query.ranks.JoinedView` implements it for the
    records that all ranks of a distributed training job have. Records are numbered 0 to `n` - 1 in
    the order in which they were written. Slots are numbered by their ids. Statistics that are
    damaged or were not recorded are NaN.

    Attributes:
        n: number of records.
        meta: statistics, columns, samples and bins of the run.
    """

    n: int
    meta: RunMeta

    # -- tables ---------------------------------------------------------------------------------

    @property
    def slots(self) -> list[SlotInfo]:
        """All slots, by id."""

    @property
    def records(self) -> NDArray[np.float64]:
        """Numeric facts about each record, [n, `RecordColumn`]."""

    @property
    def scalars(self) -> NDArray[np.void]:
        """Scalars of any step: (step, value, name, type), with names as codes."""

    @property
    def notes(self) -> list[Note]:
        """All notes."""

    @property
    def sessions(self) -> list[Session]:
        """The sessions that wrote the run, in order."""

    @property
    def superseded(self) -> NDArray[np.bool_]:
        """Which records a later session has recorded again, [n]."""

    @property
    def superseded_scalars(self) -> NDArray[np.bool_]:
        """Which scalars a later session has logged again."""

    @property
    def damage(self) -> list[str]:
        """One sentence for each damaged part encountered so far."""

    def look_for_damage(self) -> None:
        """Read all documents, so that `damage` lists the damaged ones."""

    def names(self, table: str) -> list[str]:
        """Return the names in a table ("type", "tags", "scalar", ...), by code."""

    # -- one record -----------------------------------------------------------------------------

    def samples(self, record: int) -> list[int]:
        """Return the batch indices of the recorded samples; -1: the sample does not exist.

        Empty if they are damaged.
        """

    def extra(self, record: int) -> dict[str, Any]:
        """Return additional facts about a record; empty if they are damaged."""

    def has_column(self, record: int, slot: int) -> bool:
        """Whether a record's row includes a slot. Rows are padded to whole chunks."""

    def document(self, name: str) -> Any:
        """Return the newest document with the given name; None if it is missing or damaged."""

    def structure(self, digest: str) -> Structure | None:
        """Return a dependency graph by its hash; None if it is damaged."""

    # -- statistics -----------------------------------------------------------------------------

    def row(self, family: str, record: int, *inner: int | slice) -> NDArray[Any]:
        """Return the statistics of a record, [slots, ...], or the part selected by `inner`.

        Args:
            family: "agg", "smp", "hist" or "kpi".
            record: number of the record.
            inner: index of the slot, then indices within the slot.

        Raises:
            DamagedRunError: the whole record is damaged, or a requested histogram is.
        """

    def rows(self, family: str, first: int, last: int) -> NDArray[Any]:
        """Return the statistics of records `first` to `last` - 1, [records, slots, ...]."""

    def series(self, family: str, slot: int, *inner: int | slice) -> NDArray[Any]:
        """Return one slot (or "kpi" column) over all records, [n, ...]."""

    def heat(self, family: str, *inner: int | slice) -> NDArray[Any]:
        """Return all slots over all records, [n, slots, ...]."""

    def tile(self, column: int, records: slice, slots: slice) -> NDArray[np.float32]:
        """Return one column of "agg" for some slots in some records, [records, slots]."""

    def extremes(
        self, column: int, slots: slice, chosen: NDArray[np.bool_], within: slice
    ) -> Extremes:
        """Return the lowest and the highest values of a column of "agg" in spans of records.

        Args:
            column: the column.
            slots: the slots.
            chosen: which records count [n].
            within: records, which the spans cover.
        """

    def lost(self, family: str, slot: int) -> NDArray[np.bool_] | None:
        """Return which records of a slot are damaged, [n]; None if none are."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Tensor shapes that differ from the slot table; see `shape`."""

    @property
    def reshaped(self) -> bool:
        """Whether any record has a tensor shape that differs from the slot table."""

    def shape(self, slot: int, code: float) -> tuple[int, ...] | None:
        """Return the shape of a slot in a record, given its value in the "shape" column.

        None if the record lacks the slot, or if the shape is unknown.
        """

    # -- values ---------------------------------------------------------------------------------

    def value(
        self, record: int, slot: int, sample: int | None = None, part: Part = ...
    ) -> NDArray[Any] | None:
        """Return the recorded values, [samples, *dims], of one sample [*dims], or a part of them.

        None if there are none.
        """

    def preview(self, record: int, slot: int) -> StoredPreview | None:
        """Return a record's preview of a slot; None if it has none."""

    def value_slots(self, record: int) -> list[int]:
        """Return the slots with values in a record."""
