"""Random records, kept for comparison with what the store returns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import AGGREGATES, SlotInfo, SlotKey, StepBatch, StepInfo, Structure
from comgra_decl.store import RunMeta
from comgra_decl.store.layout import RecordColumn
from comgra_decl.store.view import View

STATISTICS = ("mean", "std", "nonfinite")
SHAPE = (2, 3)
SHAPES = (SHAPE, SHAPE, SHAPE, (7, 3), (2, 3, 4), (0, 3), (), None)
SAMPLES, BINS = 2, 4


def meta_of(**changes: Any) -> RunMeta:
    """A small run: 3 statistics, 2 samples, 4 bins."""
    facts: dict[str, Any] = {
        "statistics": STATISTICS,
        "sample_count": SAMPLES,
        "bins": BINS,
        "spec": {"histogram": {"bins": BINS, "elements": 4096}},
        "config": None,
        "facts": {},
        "started": time.time(),
    }
    return RunMeta(**{**facts, **changes})


def slot_info(number: int) -> SlotInfo:
    key = SlotKey(f"node {number}", "output", 0, "forward")
    return SlotInfo(number, key, "computed", "float32", SHAPE, 0, "Linear")


class Truth:
    """Everything that was passed to the store, record by record."""

    def __init__(self, seed: int = 0, meta: RunMeta | None = None) -> None:
        self.meta = meta or meta_of()
        self.rng = np.random.default_rng(seed)
        self.infos: list[StepInfo] = []
        self.stats: list[dict[int, dict[str, Any]]] = []
        self.values: list[dict[int, NDArray[Any]]] = []
        self.kpis: list[dict[str, float]] = []
        self.announced: set[int] = set()
        self.codes: dict[tuple[int, ...], int] = {}  # of shapes, in order of appearance

    def batch(
        self,
        records: int,
        slots: Sequence[int],
        *,
        values: dict[int, NDArray[Any]] | None = None,
        kpis: Sequence[str] = ("loss",),
        type_: str = "train",
        structure: Structure | None = None,
        documents: dict[str, Any] | None = None,
    ) -> StepBatch:
        """Creates a batch of random records, to be committed before the next is created."""
        k, n, s = records, len(slots), len(self.meta.statistics)
        c, bins = self.meta.sample_count, self.meta.bins
        ids = np.array(slots, np.int32)
        new = set(range(max(slots, default=-1) + 1)) - self.announced
        self.announced |= new
        first = len(self.infos)
        batch = StepBatch(
            steps=[self._info(first + i, type_, structure) for i in range(k)],
            slots=ids,
            aggregates=self._floats((k, n, s, len(AGGREGATES))),
            samples=self._floats((k, n, c, s)),
            counts=self.rng.integers(0, 60000, (k, n, bins), np.uint32) if bins else None,
            ranges=self._floats((k, n, 2)) if bins else None,
            rows=self.rng.integers(1, 9, n),
            values=[dict(values or {}) for _ in range(k)],
            kpis=[{name: self._kpi() for name in kpis} for _ in range(k)],
            new_slots=[slot_info(number) for number in sorted(new)],
            new_structures=[structure] if structure else [],
            documents=documents or {},
            shapes=[SHAPES[at] for at in self.rng.integers(0, len(SHAPES), n)],
        )
        batch.aggregates[:, :, -1] = 0  # nonfinite is a number wherever something was recorded
        return batch

    def keep(self, batches: Iterable[StepBatch]) -> None:
        """Stores batches that were committed."""
        for batch in batches:
            self.infos += batch.steps
            self.values += batch.values
            self.kpis += batch.kpis
            for record in range(len(batch.steps)):
                self.stats.append(
                    {int(slot): self._parts(batch, record, i) for i, slot in enumerate(batch.slots)}
                )

    def check(self, view: View, upto: int | None = None) -> None:
        """Compares an entire view with what was passed to the store, bit for bit."""
        count = len(self.infos) if upto is None else upto
        assert view.n == count
        self._check_facts(view)
        dense = {name: self._dense(name, view, count) for name in self._families(view)}
        for name, expected in dense.items():
            width = expected.shape[1]
            assert same(view.heat(name)[:, :width], expected), name
            for slot in {0, width // 2, width - 1} & set(range(width)):
                assert same(view.series(name, slot), expected[:, slot]), (name, slot)
        for record in range(count):
            for name, expected in dense.items():
                row = view.row(name, record)
                assert same(row[: expected.shape[1]], expected[record, : len(row)]), (name, record)
                if name == "agg" and self.meta.tells_shapes:
                    self._check_shapes(view, record, row)
            self._check_record(view, record)

    def _check_shapes(self, view: View, record: int, row: NDArray[Any]) -> None:
        for slot, parts in self.stats[record].items():
            code = float(row[slot, self.meta.columns.index("shape")])
            told = view.shape(slot, code)
            assert told == (SHAPE if parts["shape"] is None else parts["shape"]), (record, slot)

    def _families(self, view: View) -> list[str]:
        if not view.slots:
            return []
        return ["agg"] + ["smp"] * bool(self.meta.sample_count) + ["hist"] * bool(self.meta.bins)

    def _check_facts(self, view: View) -> None:
        columns, infos = view.records, self.infos[: view.n]
        assert columns[:, RecordColumn.STEP].tolist() == [info.step for info in infos]
        assert columns[:, RecordColumn.TIME].tolist() == [info.time for info in infos]
        assert columns[:, RecordColumn.COST].tolist() == [info.cost for info in infos]
        types = [view.names("type")[int(code)] for code in columns[:, RecordColumn.TYPE]]
        assert types == [info.type for info in infos]

    def _check_record(self, view: View, record: int) -> None:
        info, values = self.infos[record], self.values[record]
        assert view.samples(record) == info.samples
        assert view.extra(record) == info.extra
        assert view.value_slots(record) == sorted(values)
        for slot, value in values.items():
            found = view.value(record, slot)
            assert found is not None
            assert found.dtype == value.dtype
            assert same(found, value)

    def _dense(self, name: str, view: View, count: int) -> NDArray[Any]:
        slots = max((slot for record in self.stats[:count] for slot in record), default=-1) + 1
        inner, dtype, fill = _form(name, self.meta)
        dense = np.full((count, slots, *inner), fill, dtype)
        for record, present in enumerate(self.stats[:count]):
            for slot, parts in present.items():
                dense[record, slot] = parts[name]
        return dense

    def _parts(self, batch: StepBatch, record: int, i: int) -> dict[str, Any]:
        assert batch.rows is not None
        columns = [batch.aggregates[record, i].ravel(), [batch.rows[i]]]
        shape = batch.shapes[i]
        if self.meta.tells_shapes:
            if shape is None or shape == SHAPE:
                columns.append([0])
            else:
                columns.append([self.codes.setdefault(shape, len(self.codes) + 1)])
        parts: dict[str, Any] = {"smp": batch.samples[record, i], "shape": shape}
        if self.meta.bins:
            assert batch.counts is not None
            assert batch.ranges is not None
            columns.append(batch.ranges[record, i])
            parts["hist"] = batch.counts[record, i]
        return parts | {"agg": np.concatenate(columns).astype(np.float32)}

    def _info(self, record: int, type_: str, structure: Structure | None) -> StepInfo:
        return StepInfo(
            step=record * 3,
            time=1e9 + record / 7,
            type=type_,
            mode="eval" if type_ == "eval" else "train",
            structure=structure.hash if structure else None,
            batch_size=int(self.rng.integers(1, 9)) if record % 5 else None,
            samples=[0, record % 2],
            cost=float(self.rng.random()),
            extra={"note": record} if record % 50 == 7 else {},
        )

    def _kpi(self) -> float:
        return float(self.rng.choice([self.rng.normal(), np.nan, np.inf]))

    def _floats(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        values = self.rng.normal(size=shape).astype(np.float32)
        values[self.rng.random(shape) < 0.05] = np.nan
        values[self.rng.random(shape) < 0.02] = np.inf
        return values


def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two arrays have equal shape, dtype and values; NaN equals NaN."""
    if a.shape != b.shape:
        return False
    if a.dtype.kind in "biu":
        return bool(np.array_equal(a, b))
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    return bool(np.array_equal(a.astype(wide), b.astype(wide), equal_nan=True))


def _form(name: str, meta: RunMeta) -> tuple[tuple[int, ...], str, float]:
    if name == "agg":
        return (len(meta.columns),), "float32", np.nan
    if name == "smp":
        return (meta.sample_count, len(meta.statistics)), "float32", np.nan
    assert meta.bins
    return (meta.bins,), meta.counts_dtype, 0
