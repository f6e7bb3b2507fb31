"""A view of a run, with the indexes for queries."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError, did_you_mean, is_one_of, shown
from comgra_decl.records import AGGREGATES, PROBE_MODE, SlotInfo, SlotKey
from comgra_decl.spec.axes import Layouts
from comgra_decl.store.layout import RecordColumn

from . import derived
from .tables import kpis_table, notes_table, records_table, slots_table, tags_by_code
from .view import RecordView

Records = NDArray[np.int64]
"""Record numbers, ascending."""


class Snapshot:
    """Resolves names in one view: slots by key, records by step, columns by statistic."""

    def __init__(self, view: RecordView) -> None:
        self.view = view

    @cached_property
    def by_key(self) -> dict[SlotKey, SlotInfo]:
        """All slots by key."""
        return {slot.key: slot for slot in self.view.slots}

    @cached_property
    def channels_last(self) -> dict[int, bool | None]:
        """Whether the channels of each slot are last, as far as others of its shape tell, by id."""
        layouts = Layouts()
        found: dict[int, bool | None] = {}
        given: dict[int, tuple[int, ...]] = {}
        for slot in self.view.slots:
            if slot.kind in ("parameter", "buffer"):
                continue
            batch = slot.batch_dim
            shape = slot.shape if batch is None else slot.shape[:batch] + slot.shape[batch + 1 :]
            found[slot.id] = layouts.channels_last(shape)
            layouts.add(shape, slot.module_class)
            if slot.kind in ("input", "target"):
                given[slot.id] = shape  # the layer that receives it has a slot of its own, later
        for id_, shape in given.items():
            if found[id_] is None:
                found[id_] = layouts.channels_last(shape)
        return found

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """The step of each record."""
        return self.view.records[:, RecordColumn.STEP].astype(np.int64)

    @cached_property
    def counts(self) -> NDArray[np.bool_]:
        """Whether each record is current; False if a later session repeated its step."""
        return ~self.view.superseded

    @cached_property
    def nodes(self) -> list[str]:
        """All nodes, in order of first appearance."""
        return list(dict.fromkeys(slot.key.node for slot in self.view.slots))

    @property
    def types(self) -> list[str]:
        """All types of execution, in order of first appearance."""
        return self.view.names("type")

    def records(self, type_: str | None) -> Records:
        """Return the records of a type, or those with a tag if no type has that name.

        None selects the records in train mode. If there are none, it selects those of the program's
        own calls, and if there are none either, all records.
        """
        table = self.view.records
        if type_ is None:
            modes = self.view.names("mode")
            train, probe = (modes.index(m) if m in modes else -1 for m in ("train", PROBE_MODE))
            of_mode = table[:, RecordColumn.MODE]
            for chosen in (of_mode == train, of_mode != probe):
                if (chosen & self.counts).any():
                    return np.flatnonzero(chosen & self.counts)
            return np.flatnonzero(self.counts)
        if _is_among(type_, self.types):
            chosen = table[:, RecordColumn.TYPE] == self.types.index(type_)
            return np.flatnonzero(chosen & self.counts)
        if _is_among(type_, self.tags):
            tagged = np.array([type_ in tags for tags in tags_by_code(self.view)])
            chosen = tagged[table[:, RecordColumn.TAGS].astype(np.int64)]
            return np.flatnonzero(chosen & self.counts)
        known = [*self.types, *self.tags]
        raise UnknownNameError(
            f"no record has the type {shown(type_)}{did_you_mean(type_, known) or '.'} "
            f"This run has {_listed(known)}."
        )

    def record(self, step: int, type_: str | None) -> int:
        """Return the last record of a step.

        Raises:
            UnknownNameError: the step was not recorded; the message names the nearest ones.
        """
        records = self.records(type_)
        steps = self.steps[records]
        if not _is_number(step):
            raise UnknownNameError(
                f"{shown(step)} is not a step; this run has {_listed(np.unique(steps).tolist())}."
            )
        found = np.flatnonzero(steps == step)
        if len(found):
            return int(records[found[-1]])
        near = steps[np.argsort(np.abs(steps - step), kind="stable")[:3]]
        raise UnknownNameError(
            f"step {step} was not recorded{'' if type_ is None else f' with type {type_!r}'}; "
            + (f"nearest: {_listed(sorted(set(near.tolist())))}." if len(near) else "none was.")
        )

    def slot(self, node: str, role: str, iteration: int, pass_: str) -> SlotInfo:
        """Return a slot by the parts of its key.

        Raises:
            UnknownNameError: there is no such slot; the message says which part is wrong and what
                exists.
        """
        names: list[object] = [node, role, pass_]
        if all(isinstance(name, str) for name in names) and _is_number(iteration):
            found = self.by_key.get(SlotKey(node, role, iteration, pass_))
            if found is not None:
                return found
        if not _is_among(node, self.nodes):
            raise UnknownNameError(
                f"no node is called {shown(node)}{did_you_mean(node, self.nodes) or '.'} "
                f"This run has {len(self.nodes)} nodes, see `run.nodes`."
            )
        keys = [key for key in self.by_key if key.node == node]
        for field, wanted, where in (
            ("role", role, f"node {node!r}"),
            ("pass_", pass_, f"{node!r}, role {role!r},"),
            ("iteration", iteration, f"{node!r}, role {role!r}, pass {pass_!r},"),
        ):
            there = list(dict.fromkeys(getattr(key, field) for key in keys))
            if not _is_among(wanted, there):
                hint = did_you_mean(wanted, there) or "."
                raise UnknownNameError(
                    f"{where} has no {field.strip('_')} {shown(wanted)}{hint} "
                    f"It has {_listed(there)}."
                )
            keys = [key for key in keys if getattr(key, field) == wanted]
        raise AssertionError("a slot that matches in every part was not found")

    def statistic(self, name: str) -> int:
        """Return the index of a statistic.

        Raises:
            UnknownNameError: the statistic was not recorded; the message suggests similar names.
        """
        known = self.view.meta.statistics
        if not _is_among(name, known):
            if is_one_of(name, derived.NAMES):
                derived.base(self)  # raises an error that lists what is required
            raise UnknownNameError(
                f"statistic {shown(name)} was not recorded{did_you_mean(name, known) or '.'} "
                f"This run has {_listed(known)}."
            )
        return known.index(name)

    @cached_property
    def records_table(self) -> pd.DataFrame:
        """All records, see `Run.records`."""
        return records_table(self.view)[self.counts]

    @cached_property
    def notes_table(self) -> pd.DataFrame:
        """All notes, see `Run.notes`."""
        return notes_table(self.view)

    @cached_property
    def tags(self) -> list[str]:
        """All labels of records other than their types, in order of first appearance."""
        return list(dict.fromkeys(tag for tags in tags_by_code(self.view) for tag in tags))

    @cached_property
    def slots_table(self) -> pd.DataFrame:
        """All slots, see `Run.slots`."""
        return slots_table(self.view)

    @cached_property
    def kpis_table(self) -> pd.DataFrame:
        """All KPIs, see `Run.kpis`."""
        return kpis_table(self.view)

    @cached_property
    def update_pairs(self) -> dict[int, derived.Pair]:
        """The pair of slots that defines each slot's update ratio."""
        return derived.pairs(self.view.slots)

    def column(self, statistic: str, over_batch: str) -> int:
        """Return the column of a statistic for the given aggregate over the batch."""
        return self.statistic(statistic) * len(AGGREGATES) + aggregate(over_batch)

    def sample(self, number: int) -> int:
        """Return the number of a recorded sample as an int.

        Raises:
            UnknownNameError: there is no sample with this number.
        """
        count = self.view.meta.sample_count
        if not (_is_number(number) and 0 <= number < count and number == int(number)):
            raise UnknownNameError(
                f"there is no sample {shown(number)}: {count} samples are recorded per tensor, "
                f"numbered from 0."
            )
        return int(number)

    def step_index(self, records: Records) -> pd.Index[int]:
        """Return the steps of records as an index named "step"."""
        return pd.Index(self.steps[records], name="step")


def named(slot: SlotInfo) -> str:
    """Return the name of a slot as used in messages."""
    key = slot.key
    return f"{key.node!r} ({key.role}, {key.pass_}, iteration {key.iteration})"


def aggregate(over_batch: str) -> int:
    """Return the index of an aggregate over the batch."""
    if not _is_among(over_batch, AGGREGATES):
        near = did_you_mean(over_batch, AGGREGATES) or "."
        raise UnknownNameError(
            f"over_batch={shown(over_batch)} is not valid{near} "
            f"Choose one of {_listed(AGGREGATES)}."
        )
    return AGGREGATES.index(over_batch)


def _is_among(wanted: Any, known: Collection[Any]) -> bool:
    """Whether a name or number is in `known`; other types may not even support comparison."""
    return (isinstance(wanted, str) or _is_number(wanted)) and wanted in known


def _is_number(value: Any) -> bool:
    """Whether a value is a number that can be a step or sample number."""
    real = isinstance(value, (int, float, np.integer, np.floating))
    return real and not isinstance(value, bool) and bool(-(2**63) <= value < 2**63)


def _listed(names: Iterable[object]) -> str:
    shown = [repr(name) if isinstance(name, str) else str(name) for name in names]
    return ", ".join(shown[:12]) + (", ..." if len(shown) > 12 else "")
