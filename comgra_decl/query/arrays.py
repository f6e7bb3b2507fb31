"""Low-level access without pandas, for reading large parts of a run as numpy arrays by slot id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import (
    UnknownNameError,
    did_you_mean,
    is_one_of,
    needed,
    shown,
)
from comgra_decl.records import AGGREGATES, SAMPLE, SlotInfo
from comgra_decl.store import levels
from comgra_decl.store.levels import SPAN, reduced

from . import derived, unusual
from .preview import axis_names
from .snapshot import Snapshot, aggregate

if TYPE_CHECKING:
    import xarray

Shape = tuple[int, ...] | None


class Rows(NamedTuple):
    """Statistics of the slots or samples that are present in a record.

    Attributes:
        ids: slot ids or sample numbers, ascending.
        names: names of the statistics.
        values: float32 [ids, names].
    """

    ids: NDArray[np.int64]
    names: list[str]
    values: NDArray[np.float32]


class Heat(NamedTuple):
    """One statistic for all slots in a pass.

    Attributes:
        ids: slot ids, ascending.
        steps: steps of the records.
        values: float32 [steps, ids].
    """

    ids: NDArray[np.int64]
    steps: NDArray[np.int64]
    values: NDArray[np.float32]


class Extremes(NamedTuple):
    """Lowest and highest values of a statistic in spans of up to 256 consecutive records.

    NaN is not a value; infinities are. Spans without any selected record are left out.

    Attributes:
        ids: slot ids.
        steps: step of the first selected record of each span.
        low: lowest values, float32 [spans, ids]; NaN where nothing was recorded.
        high: highest values, likewise.
        low_steps: steps of the lowest values, int64 [spans, ids]; -1 where nothing was recorded.
        high_steps: steps of the highest values, likewise.
    """

    ids: NDArray[np.int64]
    steps: NDArray[np.int64]
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    low_steps: NDArray[np.int64]
    high_steps: NDArray[np.int64]


class Arrays:
    """Recorded data of a run as arrays by slot id; see `Run.arrays`."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Use `Run.arrays`."""
        self._snapshot = snapshot

    @property
    def slots(self) -> list[SlotInfo]:
        """All slots; the list index of each is its id."""
        return self._snapshot.view.slots

    def axes(self, slot: int) -> tuple[str, ...]:
        """Return the names of a slot's dimensions, as its values and previews have them.

        Args:
            slot: its id.
        """
        info = self.slots[slot]
        batch = info.batch_dim
        dims = info.shape if batch is None else info.shape[:batch] + info.shape[batch + 1 :]
        names = axis_names(self._snapshot, info, dims, whole_numbers="int" in info.dtype)
        return names if batch is None else (SAMPLE, *names)

    def row(self, step: int, *, over_batch: str = "mean", type: str | None = None) -> Rows:
        """Return all statistics of the slots recorded at a step."""
        return row(self._snapshot, step, type, over_batch)

    def heat(
        self,
        statistic: str,
        *,
        of: str = "forward",
        over_batch: str = "mean",
        type: str | None = None,
    ) -> Heat:
        """Return a statistic for all slots in a pass, at every step."""
        return heat(self._snapshot, statistic, of, over_batch, type)

    @property
    def long(self) -> bool:
        """Whether an overview should read `extremes`, which then takes few reads."""
        return self._snapshot.view.n >= levels.LONG

    def extremes(
        self,
        statistic: str,
        *,
        ids: NDArray[np.int64],
        over_batch: str = "mean",
        type: str | None = None,
    ) -> Extremes:
        """Return the extremes of a statistic of some slots, for overviews of long runs."""
        return extremes(self._snapshot, statistic, ids, over_batch, type)

    def window(
        self,
        statistic: str,
        within: tuple[float, float],
        *,
        ids: NDArray[np.int64],
        over_batch: str = "mean",
        type: str | None = None,
    ) -> Heat:
        """Return a statistic of some slots at the steps of a window, both ends included."""
        return window(self._snapshot, statistic, within, ids, over_batch, type)

    def aggregates(
        self, records: NDArray[np.int64], ids: NDArray[np.int64], names: Sequence[str]
    ) -> NDArray[np.float64]:
        """Return statistics of several slots in several records.

        Args:
            records: numbers of the records, ascending [r].
            ids: ids of the slots [s].
            names: names of the statistics [n].

        Returns:
            float64 [r, s, n, 3]: mean, std and largest magnitude over the batch; NaN where not
            recorded.
        """
        first, last = int(records.min()), int(records.max()) + 1
        table = self._snapshot.view.rows("agg", first, last)[records - first]
        columns = [[self._snapshot.column(name, over) for over in AGGREGATES] for name in names]
        found = np.full((len(records), len(ids), len(names), len(AGGREGATES)), np.nan)
        there = ids < table.shape[1]
        found[:, there] = table[:, ids[there]][..., np.array(columns, np.int64)]
        return found

    def unusual(
        self, step: int, statistic: str = "std", *, type: str | None = None
    ) -> NDArray[np.float64]:
        """Return the distance of each sample from the rest of its batch, [slots, samples]."""
        return unusual.distances(self._snapshot, step, statistic, type)

    def samples(
        self, step: int, statistic: str = "mean", *, type: str | None = None
    ) -> NDArray[np.float64]:
        """Return a statistic of each recorded sample at a step, [slots, samples].

        NaN where a sample was not recorded. A tensor without a batch dimension counts as one
        sample.
        """
        view, record = self._snapshot.view, self._snapshot.record(step, type)
        place = self._snapshot.statistic(statistic)
        if not view.meta.sample_count:
            return np.full((len(view.slots), 0), np.nan)
        return view.row("smp", record)[: len(view.slots), :, place].astype(float)

    def shapes(self, step: int, *, type: str | None = None) -> dict[int, Shape]:
        """Return the shapes of the slots recorded at a step; None where damaged."""
        return shapes(self._snapshot, step, type)


def row(snapshot: Snapshot, step: int, type_: str | None, over_batch: str) -> Rows:
    """Return all statistics of the slots recorded at a step."""
    rank = aggregate(over_batch)
    table = snapshot.view.row("agg", snapshot.record(step, type_))
    names = [*snapshot.view.meta.statistics]
    values = table[: len(snapshot.view.slots), : len(names) * len(AGGREGATES)]
    columns = [values[:, rank :: len(AGGREGATES)]]
    for name in derived.offered(snapshot):
        lengths = values[:, derived.base(snapshot) * len(AGGREGATES)]
        ratios = np.full(len(lengths), np.nan, np.float32)
        fill_ratios(snapshot, ratios, lengths, over_batch)
        columns.append(ratios[:, None])
        names.append(name)
    return present(snapshot, names, np.concatenate(columns, axis=1))


def present(snapshot: Snapshot, names: list[str], values: NDArray[np.float32]) -> Rows:
    """Return only the recorded rows, whose `nonfinite` is not NaN."""
    nonfinite = snapshot.view.meta.statistics.index("nonfinite")
    there = np.flatnonzero(~np.isnan(values[:, nonfinite]))
    return Rows(there, names, values[there])


def heat(
    snapshot: Snapshot, statistic: str, pass_: str, over_batch: str, type_: str | None
) -> Heat:
    """Return a statistic for all slots in a pass, at every step."""
    records = snapshot.records(type_)
    if not is_one_of(pass_, [pass_]):
        raise UnknownNameError(
            f"{shown(pass_)} is not a valid pass; use 'forward' or 'grad', for example."
        )
    ids = np.array([s.id for s in snapshot.view.slots if s.key.pass_ == pass_], np.int64)
    return Heat(
        ids, snapshot.steps[records], table(snapshot, statistic, over_batch)[records][:, ids]
    )


def extremes(
    snapshot: Snapshot,
    statistic: str,
    ids: NDArray[np.int64],
    over_batch: str,
    type_: str | None,
) -> Extremes:
    """Return the extremes of a statistic of some slots in spans of records."""
    view, records = snapshot.view, snapshot.records(type_)
    chosen = np.zeros(view.n, bool)
    chosen[records] = True
    if not len(ids) or not len(records):
        none = np.empty((0, len(ids)))
        nowhere = none.astype(np.int64)
        values = none.astype(np.float32)
        return Extremes(ids, snapshot.steps[:0], values, values, nowhere, nowhere)
    if is_one_of(statistic, derived.NAMES):
        every = table(snapshot, statistic, over_batch)[:, ids]
        found, columns = reduced(every, chosen, 0), np.arange(len(ids))
    else:
        column = snapshot.column(statistic, over_batch)
        slots = slice(int(ids.min()), int(ids.max()) + 1)
        found = view.extremes(column, slots, chosen, slice(0, view.n))
        columns = ids - slots.start
    spans, first = np.unique(records // SPAN, return_index=True)
    low, high = (array[spans][:, columns] for array in (found.low, found.high))
    low_at, high_at = (array[spans][:, columns] for array in (found.low_at, found.high_at))
    low_steps, high_steps = (np.where(at < 0, -1, snapshot.steps[at]) for at in (low_at, high_at))
    return Extremes(ids, snapshot.steps[records[first]], low, high, low_steps, high_steps)


def window(
    snapshot: Snapshot,
    statistic: str,
    within: tuple[float, float],
    ids: NDArray[np.int64],
    over_batch: str,
    type_: str | None,
) -> Heat:
    """Return a statistic of some slots at the steps of a window."""
    records = snapshot.records(type_)
    steps = snapshot.steps[records]
    records = records[(steps >= within[0]) & (steps <= within[1])]
    if not len(records) or not len(ids):
        values = np.empty((len(records), len(ids)), np.float32)
    elif is_one_of(statistic, derived.NAMES):
        values = table(snapshot, statistic, over_batch)[records][:, ids]
    else:
        first, low = int(records.min()), int(ids.min())
        part = slice(first, int(records.max()) + 1), slice(low, int(ids.max()) + 1)
        read = snapshot.view.tile(snapshot.column(statistic, over_batch), *part)
        values = read[records - first][:, ids - low]
    return Heat(ids, snapshot.steps[records], values)


def table(snapshot: Snapshot, statistic: str, over_batch: str) -> NDArray[np.float32]:
    """Return one statistic [records, slots] of all slots in all records."""
    if not is_one_of(statistic, derived.NAMES):
        return snapshot.view.heat("agg", snapshot.column(statistic, over_batch))
    derived.base(snapshot)
    lengths = snapshot.view.heat("agg", snapshot.column("l2", "mean"))
    values = np.full_like(lengths, np.nan)
    fill_ratios(snapshot, values, lengths, over_batch)
    return values


def shapes(snapshot: Snapshot, step: int, type_: str | None) -> dict[int, Shape]:
    """Return the shapes of the slots recorded at a step; None where damaged."""
    view, names = snapshot.view, snapshot.view.meta.columns
    values = view.row("agg", snapshot.record(step, type_))[: len(view.slots)]
    there = np.flatnonzero(~np.isnan(values[:, names.index("nonfinite.mean")]))
    codes = np.zeros(len(there))
    if view.meta.tells_shapes:
        codes = values[there, names.index("shape")]
    pairs = zip(there.tolist(), codes.tolist(), strict=True)
    return {slot: view.shape(slot, code) for slot, code in pairs}


def fill_ratios(
    snapshot: Snapshot, out: NDArray[np.float32], lengths: NDArray[np.float32], over_batch: str
) -> None:
    """Write the update ratios [..., slots] to `out`; they are computed from l2 where available."""
    there = {
        slot: pair for slot, pair in snapshot.update_pairs.items() if max(pair) < lengths.shape[-1]
    }
    if there:
        update, parameter = np.array(list(there.values())).T
        out[..., list(there)] = derived.ratio(
            lengths[..., update], lengths[..., parameter], over_batch
        )


def dataset(
    snapshot: Snapshot, names: Sequence[str], of: str | None, over_batch: str, type_: str | None
) -> xarray.Dataset:
    """Return statistics [step, slot] of all slots, or of the slots of one pass."""
    passes = list(dict.fromkeys(slot.key.pass_ for slot in snapshot.view.slots))
    if of is not None and not is_one_of(of, passes):
        hint = did_you_mean(of, passes) or "."
        raise UnknownNameError(f"{shown(of)} is not a pass of this run{hint} It has {passes}.")
    slots = [slot for slot in snapshot.view.slots if of in (None, slot.key.pass_)]
    ids = np.array([slot.id for slot in slots], np.int64)
    records = snapshot.records(type_)
    coords: dict[str, Any] = {"step": snapshot.steps[records]}
    for name, field in (("node", "node"), ("role", "role"), ("pass", "pass_")):
        coords[name] = ("slot", np.array([getattr(slot.key, field) for slot in slots], str))
    coords["iteration"] = ("slot", np.array([slot.key.iteration for slot in slots], np.int64))
    tables = {name: table(snapshot, name, over_batch)[records][:, ids] for name in names}
    data = {name: (("step", "slot"), table) for name, table in tables.items()}
    found: xarray.Dataset = needed("xarray", "xarray").Dataset(
        data, coords, attrs={"over_batch": over_batch}
    )
    return found
