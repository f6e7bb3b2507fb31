"""Names what a run contains and passes the selected part of it to a sink."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.bins import Spacing, edges_of
from comgra_decl.errors import SelectionError
from comgra_decl.pictures.tiles import tiled
from comgra_decl.records import AGGREGATES, AUTOMATIC, SHOWN, Note, SlotInfo, SlotKey

from . import naming
from .api import Findings, Moment, Sink
from .naming import SeriesName
from .selection import Selection

_NONFINITE = "nonfinite"

_PICTURES = 20
"""Largest number of pictures by name, and number of steps of each that are passed on without gaps.
"""


@dataclass(frozen=True, eq=False)
class Records:
    """Consecutive records of a run.

    `slots`: int [n], ids. `aggregates`: float32 [k, n, statistics, 3], NaN where a record lacks a
    slot. `counts` [k, n, bins] and `ranges` [k, n, 2], or None; NaN ranges where they are lost.
    """

    moments: Sequence[Moment]
    types: Sequence[str]
    slots: NDArray[Any]
    aggregates: NDArray[np.float32]
    counts: NDArray[Any] | None = None
    ranges: NDArray[Any] | None = None


@dataclass(frozen=True, eq=False)
class Metrics:
    """Metrics in the order in which they were logged, [n] each."""

    moments: Sequence[Moment]
    types: Sequence[str]
    names: Sequence[str]
    values: Sequence[float]


class Feed:
    """Pass the selected part of a run to a sink.

    Raises:
        UnknownNameError: a selected statistic is not stored.
    """

    def __init__(
        self,
        sink: Sink,
        selection: Selection,
        *,
        statistics: Sequence[str],
        spacing: Spacing = "linear",
    ) -> None:
        self._sink = sink
        self._selection = selection
        self._statistics = list(statistics)
        self._spacing = spacing
        self._columns = selection.columns(self._statistics)
        self._all: list[SlotInfo] = []
        self._chosen: dict[int, SlotKey] = {}
        self._pictured: dict[int, SlotKey] = {}
        self._drawn: Counter[int] = Counter()
        self._told: set[tuple[Any, ...]] = set()
        self._over = False
        self._types: dict[int, set[str]] = {}  # of the records of each selected tensor
        self._refused: set[str] = set()

    @property
    def slots(self) -> list[SlotInfo]:
        """All slots so far."""
        return self._all

    @property
    def chosen(self) -> Mapping[int, SlotKey]:
        """The selected tensors so far, by id."""
        return self._chosen

    def see(
        self, slots: Iterable[SlotInfo], types: Mapping[int, Iterable[str]] | None = None
    ) -> None:
        """Add slots.

        Args:
            slots: the slots.
            types: the types of execution in which each of them occurs, by id, if they are known.

        Raises:
            SelectionError: too many series are selected; from then on, none are passed on.
        """
        new = [*slots]
        self._all += new
        self._types |= {slot: {*each} for slot, each in (types or {}).items()}
        self._pictured |= {s.id: s.key for s in new if self._selection.pictured(s.key)}
        if self._over:
            return
        try:
            found = self._selection.chosen(self._all, self._statistics, self._types)
        except SelectionError:
            self._over, self._chosen = True, {}
            raise
        self._chosen = {slot.id: slot.key for slot in found}

    def records(self, records: Records) -> dict[str, SelectionError]:
        """Pass on the statistics and histograms of the selected tensors.

        Returns:
            The types of execution of which, from now on, no series are passed on, because there
            would be too many.
        """
        problems: dict[str, SelectionError] = {}
        there = [
            (column, self._chosen[int(slot)])
            for column, slot in enumerate(records.slots)
            if int(slot) in self._chosen
        ]
        present = self._statistics.index(_NONFINITE)
        for row, (at, type_) in enumerate(zip(records.moments, records.types, strict=True)):
            numbers: dict[str, float] = {}
            lost = np.isnan(records.aggregates[row, :, present, 0])
            here = [(column, key) for column, key in there if not lost[column]]
            problem = self._refuse(type_, [int(records.slots[column]) for column, _ in here])
            if problem is not None:
                problems[type_] = problem
            if type_ in self._refused:
                continue
            for column, key in here:
                line = records.aggregates[row, column]
                for statistic, how in self._columns:
                    name = SeriesName(key, self._statistics[statistic], AGGREGATES[how], type_)
                    numbers[str(name)] = float(line[statistic, how])
            if numbers:
                self._sink.scalars(at, numbers)
            if self._selection.histograms:
                self._histograms(records, row, there)
        return problems

    def _refuse(self, type_: str, slots: list[int]) -> SelectionError | None:
        """Return why no series of a type are passed on; notes the types of tensors otherwise."""
        if type_ in self._refused:
            return None
        known = self._types
        new = {slot: {*known.get(slot, ()), type_} for slot in slots}
        if all(known.get(slot) == types for slot, types in new.items()):
            return None
        try:
            self._selection.chosen(self._all, self._statistics, known | new)
        except SelectionError as error:
            self._refused.add(type_)
            return error
        known |= new
        return None

    def _histograms(self, records: Records, row: int, there: Sequence[tuple[int, SlotKey]]) -> None:
        if records.counts is None or records.ranges is None:
            return
        for column, key in there:
            low, high = records.ranges[row, column].tolist()
            counts = records.counts[row, column].astype(np.int64)
            if np.isnan(low) or np.isnan(high) or not counts.any():
                continue
            name = naming.of_tensor(key, records.types[row])
            edges = edges_of(low, high, len(counts), self._spacing)
            self._sink.histogram(records.moments[row], name, counts, edges)

    def pictures(self, at: Moment, values: Mapping[int, NDArray[Any]]) -> None:
        """Pass on the pictures among the values of a record, by slot.

        At most 20 pictures by name are passed on. Each is passed on the first 20 times, then every
        second time, from the 40th on every fourth, from the 80th on every eighth, and so on.
        """
        for slot, value in values.items():
            key = self._pictured.get(slot)
            if key is None or (slot not in self._drawn and len(self._drawn) == _PICTURES):
                continue
            number = self._drawn[slot]
            self._drawn[slot] += 1
            if number % (1 << (number // _PICTURES).bit_length()) == 0:
                self.picture(at, key, value)

    def picture(self, at: Moment, key: SlotKey, value: NDArray[Any]) -> None:
        """Pass on a picture, [samples, ..., height, width], or what the program showed."""
        if key.pass_ != SHOWN:
            if value.ndim > 2 and not np.iscomplexobj(value):
                self._sink.image(at, naming.of_tensor(key, naming.TRAIN), tiled(value))
        elif key.role == "text":
            text = bytes(value[0]).rstrip(b"\0").decode("utf-8", "replace")
            self._sink.text(at, naming.of_shown(key.node), text)
        else:
            self._sink.image(at, naming.of_shown(key.node), _opaque(value[0]))

    def metrics(self, metrics: Metrics) -> None:
        """Pass on all metrics, those of a step together; automatic ones without their prefix.

        Values that have the same name, step and time are passed on one after the other.
        """
        by_moment: dict[tuple[Moment, int], dict[str, float]] = {}
        repeated: Counter[tuple[Moment, str]] = Counter()
        columns = zip(metrics.moments, metrics.types, metrics.names, metrics.values, strict=True)
        for at, type_, name, value in columns:
            full = naming.of_metric(name.removeprefix(AUTOMATIC), type_)
            moment = by_moment.setdefault((at, repeated[at, full]), {})
            moment[full] = float(value)
            repeated[at, full] += 1
        for (at, _), numbers in by_moment.items():
            self._sink.scalars(at, numbers)

    def notes(self, notes: Iterable[Note]) -> None:
        """Pass on notes."""
        for note in notes:
            self._sink.text(Moment(note.step, note.time), f"notes/{note.type}", note.text)

    def findings(self, document: Findings | None, time: float) -> None:
        """Pass on the findings that have not been passed on before, at their first step."""
        for finding in (document or {}).get("findings", []):
            place = finding.get("place") or {}
            identity = (finding["rule"], *(place.get(name) for name in SlotKey._fields))
            if identity in self._told:
                continue
            self._told.add(identity)
            text = f"**{finding['severity']}**: {finding['message']}\n\n{finding['advice']}"
            at = Moment(int(finding["first_step"]), time)
            self._sink.text(at, f"findings/{finding['rule']}", text)


def _opaque(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return an image [height, width, 1, 3 or 4] as [height, width, 3], on white."""
    colours, alpha = image[..., :3].astype(np.float64), image[..., 3:] / 255
    if alpha.shape[-1]:
        colours = colours * alpha + 255 * (1 - alpha)
    found = np.rint(np.broadcast_to(colours, (*image.shape[:2], 3))).astype(np.uint8)
    return np.ascontiguousarray(found)
