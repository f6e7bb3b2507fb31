"""One open run with the indexes and caches that the view models share."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Preview, Run, arrays
from comgra_decl.query import Slot as Handle
from comgra_decl.records import (
    EFFECT_PREFIX,
    INTERVENTION_PREFIX,
    NO_SERIES,
    PICTURE_PREFIX,
    PROBE_PREFIX,
    SlotInfo,
    Structure,
)
from comgra_decl.viewer.model.cache import Cache

if TYPE_CHECKING:
    from comgra_decl.spec import Spec
    from comgra_decl.viewer.model.selection import Selection

T = TypeVar("T")
Steps = NDArray[np.int64]
_KINDS = ("loss", "computed", "input", "target", "buffer", "parameter")

WINDOW = 1 << 14
"""Maximum number of records of a long run that are read one by one when zoomed in."""

LASTING, PASSING = 48 << 20, 96 << 20
"""Maximum sizes in bytes of an open run's two caches: single records, and data over all steps."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One line of the run's slot table."""

    id: int
    node: str
    role: str
    iteration: int
    pass_: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    batch_dim: int | None
    module_class: str
    names: tuple[str, ...]


class Rows:
    """A table of numbers with fast access to individual lines.

    Args:
        found: Statistics of slots or samples.
        batch_index: Indices of samples in the batch.
        labels: Categories of samples.
    """

    def __init__(
        self, found: arrays.Rows, *, batch_index: Iterable[int] = (), labels: Iterable[str] = ()
    ) -> None:
        self._names = found.names
        self._values = found.values.astype(float)
        self._place = {key: i for i, key in enumerate(found.ids.tolist())}
        self.nbytes: int = self._values.nbytes + 100 * len(found.ids)  # 100 bytes per key
        self.batch_index = [*batch_index]
        self.labels = [*labels]

    def lines(self) -> list[int]:
        """Return the keys of the lines: slot ids, or numbers of samples."""
        return list(self._place)

    def line(self, key: int | None) -> dict[str, float]:
        """Return the numbers in one line by column; empty if there is no such line."""
        if key not in self._place:
            return {}
        return dict(zip(self._names, self._values[self._place[key]].tolist(), strict=True))

    def column(self, name: str) -> dict[int, float]:
        """Return one column by line."""
        numbers = self._values[:, self._names.index(name)].tolist()
        return dict(zip(self._place, numbers, strict=True))


class RunView:
    """A run with caches for the view models. Each process has one per run, shared by all sessions.

    `revision` is incremented whenever `refresh` finds new records, so that sessions notice them.
    `number` is the rank if only one of several ranks is shown. `whole` is the view of all ranks.
    Never modifies the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.number: int | None = None
        self.whole = self
        self.revision = 0
        self._ranks: dict[int, RunView] = {}
        self._lasting = Cache(LASTING)  # data that never change
        self._passing = Cache(PASSING)  # data of this revision
        self._index()

    def refresh(self) -> bool:
        """Check for new records; returns whether there were any."""
        for view in self._ranks.values():
            view.refresh()
        if not self.run.refresh():
            return False
        self.revision += 1
        self._passing.clear()
        self._index()
        return True

    def rank(self, number: int | None) -> RunView:
        """Return one rank of a distributed run, or all ranks combined for None.

        Raises:
            UnknownNameError: The rank was not recorded.
        """
        if number is None:
            return self
        if number not in self._ranks:
            self._ranks[number] = RunView(self.run.rank(number))
            self._ranks[number].number, self._ranks[number].whole = number, self
        return self._ranks[number]

    @property
    def ranks(self) -> list[int]:
        """All ranks of the run, even if this view shows only one of them."""
        return self.whole.run.ranks

    # --- slots -------------------------------------------------------------------------------

    def _index(self) -> None:
        known = self.run.arrays.slots
        if hasattr(self, "slots") and len(known) == len(self.slots):
            return
        self.slots: dict[int, Slot] = {info.id: _slot(info) for info in known}
        tree: dict[str, dict[str, dict[int, dict[str, Slot]]]] = {}
        offered = [slot for slot in self.slots.values() if slot.pass_ not in NO_SERIES]
        for slot in offered:
            roles = tree.setdefault(slot.node, {})
            roles.setdefault(slot.role, {}).setdefault(slot.iteration, {})[slot.pass_] = slot
        self._tree = tree
        passes = sorted({slot.pass_ for slot in offered} - {"forward"})
        self._gradients = [p for p in passes if not p.startswith((EFFECT_PREFIX, PICTURE_PREFIX))]

    @property
    def nodes(self) -> list[str]:
        """Names of all nodes, in the order of their first slots."""
        return list(self._tree)

    def roles(self, node: str) -> list[str]:
        """Return the roles of a node, outputs first, parameters last."""
        roles = self._tree.get(node, {})
        rank = {role: _role_rank(role, _any_slot(roles[role]).kind) for role in roles}
        return sorted(roles, key=lambda role: rank[role])

    def iterations(self, node: str, role: str) -> list[int]:
        """Return the iterations in which a role of a node was recorded, ascending."""
        return sorted(self._tree.get(node, {}).get(role, {}))

    def passes(self, node: str, role: str, iteration: int) -> dict[str, Slot]:
        """Return the slots of one tensor, by pass."""
        return self._tree.get(node, {}).get(role, {}).get(iteration, {})

    def gradient_passes(self) -> list[str]:
        """Return the passes of a training step except the forward pass."""
        return self._gradients

    def other_passes(self, node: str, role: str, iteration: int) -> list[str]:
        """Return the passes that can be shown beside the forward pass of a tensor.

        These are the passes of a training step. Effects and pictures are tensors in a pass of
        their own, which is the only one.
        """
        own = [*self.passes(node, role, iteration)]
        alone = own and not {*own} & {"forward", *self._gradients}
        return own if alone else self._gradients

    def kind(self, node: str) -> str:
        """Return the kind that colours a node; computed tensors outrank parameters."""
        kinds = {_any_slot(role).kind for role in self._tree.get(node, {}).values()}
        return next((kind for kind in _KINDS if kind in kinds), "computed")

    def lead(self, node: str) -> Slot:
        """Return the slot that represents a node: its first role, first iteration, forward."""
        return _any_slot(self._tree[node][self.roles(node)[0]])

    def first_slot(self, node: str, role: str) -> Slot:
        """Return the slot that represents one role of a node: its first iteration, forward."""
        return _any_slot(self._tree[node][role])

    # --- records -----------------------------------------------------------------------------

    def types(self) -> list[str]:
        """Return the types of execution to offer: "" (all training steps), types and tags."""
        return self.now("types", self._types)

    def _types(self) -> list[str]:
        records = self.run.records
        train = set(records["type"][records["mode"] == "train"]) if len(records) else set()
        labels = [t for t in self.run.types if train != {t} and t not in NO_SERIES]
        return ["", *labels, *(tag for tag in self.run.tags if tag not in self.run.types)]

    def steps(self, type_: str) -> Steps:
        """Return the distinct steps recorded for a type of execution, ascending."""
        return self.now(("steps", type_), lambda: self._steps(type_))

    def _steps(self, type_: str) -> Steps:
        if not type_ and len(self.run.steps):
            return np.unique(np.asarray(self.run.steps, dtype=np.int64))
        records = self.run.records
        chosen = records["step"]
        if type_ and type_ in self.run.types:
            chosen = chosen[records["type"] == type_]
        elif type_:
            chosen = chosen[[type_ in tags for tags in records["tags"]]]
        return np.unique(np.asarray(chosen, dtype=np.int64))

    def row(self, step: int, type_: str, over: str) -> Rows:
        """Return all statistics of all slots of one record (`Run.row`)."""
        key = ("row", step, type_, over)
        return self.ever(
            key, lambda: Rows(self.run.arrays.row(step, type=type_ or None, over_batch=over))
        )

    def shape(self, slot: Slot, at: Selection) -> tuple[int, ...]:
        """Return a slot's shape at the selected step, or its first shape if it is not recorded."""
        found = self.shape_if_recorded(slot, at)
        return slot.shape if found is None else found

    def shape_if_recorded(self, slot: Slot, at: Selection) -> tuple[int, ...] | None:
        """Return a slot's shape at the selected step; None if it is not recorded or damaged."""
        if not self.run.reshaped:
            return slot.shape
        if at.step is None:
            return None
        step, type_ = at.step, at.type or None

        def read() -> dict[int, tuple[int, ...] | None]:
            try:
                return self.run.arrays.shapes(step, type=type_)
            except UnknownNameError:  # a step of another run
                return {}

        return self.ever(("shapes", step, at.type), read).get(slot.id)

    def sample_row(self, slot: Slot, step: int, type_: str) -> Rows:
        """Return the statistics of a slot's recorded samples at a step (`Run.sample_row`)."""
        key = ("sample_row", slot.id, step, type_)

        def read() -> Rows:
            frame = self._handle(slot).row(step, type=type_ or None)
            ids, values = frame.index.to_numpy(np.int64), frame.to_numpy(np.float32)
            found = arrays.Rows(ids, [str(name) for name in frame.columns], values)
            return Rows(found, **{name: frame.attrs[name] for name in ("batch_index", "labels")})

        return self.ever(key, read)

    def sample_labels(self, step: int | None, type_: str) -> list[str]:
        """Return the categories of the samples recorded at a step; empty without `samples.by`."""
        if step is None or self.ever("samples.by", lambda: self.run.spec.samples.by) is None:
            return []
        key = ("sample_labels", step, type_)
        labels = self.ever(key, lambda: self.run.samples(step, type=type_ or None)["label"])
        return [label for label in labels if label is not None]

    def series(self, slot: Slot, statistic: str, over: str, type_: str) -> pd.Series:
        """Return one aggregated statistic of a slot by step (`Run.series`)."""
        key = ("series", slot.id, statistic, over, type_)
        return self.now(
            key,
            lambda: self._handle(slot).series(statistic, over_batch=over, type=type_ or None),
        )

    def sample_series(self, slot: Slot, statistic: str, sample: int, type_: str) -> pd.Series:
        """Return a statistic by step, for one sample of a slot (`Run.sample_series`)."""
        key = ("samples", slot.id, statistic, type_)
        return self.now(key, lambda: self._handle(slot).samples(statistic, type=type_ or None))[
            sample
        ]

    def heat(self, statistic: str, pass_: str, over: str, type_: str) -> pd.DataFrame:
        """Return a statistic for all slots, at every step (`Run.heat`)."""
        key = ("heat", statistic, pass_, over, type_)

        def read() -> pd.DataFrame:
            found = self.run.arrays.heat(statistic, of=pass_, over_batch=over, type=type_ or None)
            return pd.DataFrame(found.values.T, found.ids, found.steps)

        return self.now(key, read)

    @property
    def long(self) -> bool:
        """Whether overviews show extremes of many records (`Run.arrays.extremes`)."""
        return self.run.arrays.long

    def extremes(
        self, statistic: str, slots: Sequence[int], over: str, type_: str
    ) -> arrays.Extremes:
        """Return the extremes of a statistic of some slots in spans of records."""
        ids = np.array(slots, np.int64)
        key = ("extremes", statistic, ids.tobytes(), over, type_)
        return self.now(
            key,
            lambda: self.run.arrays.extremes(
                statistic, ids=ids, over_batch=over, type=type_ or None
            ),
        )

    def slot_extremes(self, slot: Slot, statistic: str, over: str, type_: str) -> pd.DataFrame:
        """Return the extremes of a statistic of a slot in spans of records (`Slot.extremes`)."""
        key = ("slot_extremes", slot.id, statistic, over, type_)
        return self.now(
            key,
            lambda: self._handle(slot).extremes(statistic, over_batch=over, type=type_ or None),
        )

    def in_pass(self, pass_: str) -> list[int]:
        """Return the ids of the slots of a pass, ascending."""
        return [slot.id for slot in self.slots.values() if slot.pass_ == pass_]

    def window(
        self,
        statistic: str,
        slots: Sequence[int],
        within: tuple[float, float],
        over: str,
        type_: str,
    ) -> arrays.Heat:
        """Return a statistic of some slots at all steps of a window."""
        ids = np.array(slots, np.int64)
        key = ("window", statistic, ids.tobytes(), within, over, type_)
        return self.now(
            key,
            lambda: self.run.arrays.window(
                statistic, within, ids=ids, over_batch=over, type=type_ or None
            ),
        )

    def closely(self, within: tuple[float, float] | None, type_: str) -> bool:
        """Whether a window of a long run is short enough to read all its records."""
        if within is None:
            return False
        first, last = np.searchsorted(self.steps(type_), within)
        return bool(last - first <= WINDOW)

    def histograms(self, slot: Slot, type_: str) -> tuple[Any, Any, Any]:
        """Return the histograms of a slot over steps (`Run.histograms`)."""
        key = ("histograms", slot.id, type_)
        return self.now(key, lambda: self._handle(slot).histograms(type=type_ or None))

    def value(self, slot: Slot, step: int, type_: str) -> NDArray[Any]:
        """Return a slot's recorded values at a step; raises the same errors as `Run.value`."""
        key = ("value", slot.id, step, type_)
        return self.ever(key, lambda: self._handle(slot).value(step, type=type_ or None))

    def preview(self, slot: Slot, step: int, type_: str) -> Preview:
        """Return a slot's values at a step, or a preview of them (`Slot.preview`)."""
        key = ("preview", slot.id, step, type_)
        return self.ever(key, lambda: self._handle(slot).preview(step, type=type_ or None))

    def structure(self, step: int, type_: str) -> Structure | None:
        """Return the dependency graph valid at a step; most steps share one.

        Passes of a probe record no graph: they follow that of the nearest step of training.
        """
        step, type_ = self._graphed(step, type_)
        digest = self.run.structure_hash(step, type=type_ or None)
        return self.ever(
            ("structure", digest), lambda: self.run.structure(step, type=type_ or None)
        )

    def structure_hash(self, step: int, type_: str) -> str | None:
        """Return the hash of the graph valid at a step (`Run.structure_hash`)."""
        step, type_ = self._graphed(step, type_)
        return self.run.structure_hash(step, type=type_ or None)

    def _graphed(self, step: int, type_: str) -> tuple[int, str]:
        """Return the step and the type of execution whose graph is that of a record."""
        if not type_.startswith((PROBE_PREFIX, INTERVENTION_PREFIX)):
            return step, type_
        steps = self.steps("")
        return (int(steps[np.abs(steps - step).argmin()]), "") if len(steps) else (step, type_)

    def _handle(self, slot: Slot) -> Handle:
        return self.run.slot(slot.node, role=slot.role, of=slot.pass_, iteration=slot.iteration)

    # --- caches ------------------------------------------------------------------------------

    def ever(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return a cached result that never changes once recorded."""
        return self._lasting.get(key, compute)

    def now(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return a cached result that is valid until the next record."""
        return self._passing.get(key, compute)

    @property
    def spec(self) -> Spec:
        """The spec with which the run was recorded, which takes a millisecond to parse."""
        return self.now("spec", lambda: self.run.spec)

    @property
    def described(self) -> list[dict[str, Any]]:
        """What the run says about each module. It is not to be changed."""
        return self.now("described", lambda: self.run.document("modules") or [])

    @property
    def held(self) -> int:
        """Number of bytes in the caches of all ranks."""
        own = self._lasting.size + self._passing.size
        return own + sum(view.held for view in self._ranks.values())


def _slot(info: SlotInfo) -> Slot:
    return Slot(
        info.id,
        *info.key,
        info.kind,
        info.dtype,
        tuple(info.shape),
        info.batch_dim,
        info.module_class or "",
        tuple(info.names or ()),
    )


def _any_slot(iterations: dict[int, dict[str, Slot]]) -> Slot:
    passes = iterations[min(iterations)]
    return passes.get("forward") or next(iter(passes.values()))


def _role_rank(role: str, kind: str) -> tuple[int, list[str | int]]:
    """Sort key: outputs first, parameters last; digits in names are compared as numbers."""
    parts = [int(part) if part.isdecimal() else part for part in _NUMBERS.split(role)]
    if kind in ("parameter", "buffer"):
        return 2, parts
    return (0 if role.startswith("output") else 1), parts


_NUMBERS = re.compile(r"([0-9]+)")
