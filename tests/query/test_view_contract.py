"""A run of one process and the same run of two ranks read alike: one contract, checked by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from comgra_decl.query.ranks.reader import JoinedReader, open_reader
from comgra_decl.query.view import RecordView
from comgra_decl.records import (
    STATISTICS,
    Axis,
    Note,
    ScalarBatch,
    SlotInfo,
    SlotKey,
    StepBatch,
    StepInfo,
    StoredPreview,
    Structure,
)
from comgra_decl.store import Reader, RunMeta, RunWriter
from comgra_decl.store.layout import SYSTEM_COLUMNS, RecordColumn
from tests.support.fake_statistics import reduce, statistics

RECORDS, BATCH, SAMPLES, BINS = 300, 8, 4, 6
"""More records than one block of 256, so that both forms of storage are read."""

PREVIEWED = 51
"""The record with a preview of the weight."""

PREVIEW_AXES = (Axis("out", "first", 3), Axis("in", "all", 5))

LATE = 20
"""The first record that has the last slot."""

OUTPUT, WEIGHT, EVAL_ONLY = 0, 1, 2
SLOTS = [
    SlotInfo(
        OUTPUT, SlotKey("net", "output", 0, "forward"), "computed", "float32", (BATCH, 3), 0, "Net"
    ),
    SlotInfo(
        WEIGHT, SlotKey("net", "weight", 0, "forward"), "parameter", "float32", (3, 5), None, "Net"
    ),
    SlotInfo(
        EVAL_ONLY,
        SlotKey("net.head", "output", 0, "forward"),
        "computed",
        "float32",
        (BATCH, 2),
        0,
        "Head",
    ),
]
MODULES = [{"path": "net", "node": "net", "parameters": {}}]
GRAPH = Structure("0123abcd", [SLOTS[0].key], ["computed"], [])


def tensor(slot: SlotInfo, record: int) -> NDArray[np.float32]:
    """Returns the whole tensor in a record, from all ranks."""
    return np.random.default_rng([slot.id, record]).normal(size=slot.shape).astype(np.float32)


def rows_of(slot: SlotInfo, record: int) -> NDArray[np.float32]:
    """Returns its statistics per sample, [samples, STATISTICS]; a parameter is one sample."""
    whole = tensor(slot, record)
    rows = whole.reshape(len(whole), -1) if slot.batch_dim == 0 else whole.reshape(1, -1)
    return statistics(rows).astype(np.float32)


def present(record: int) -> list[SlotInfo]:
    return SLOTS if record >= LATE else SLOTS[:2]


def write(folder: Path, *, rank: int, world_size: int) -> None:
    """Writes what one of `world_size` processes records: its share of each batch."""
    share = BATCH // world_size
    facts: dict[str, Any] = {}
    if world_size > 1:
        facts["ranks"] = {"rank": rank, "world_size": world_size, "recorded": [*range(world_size)]}
    meta = RunMeta(
        statistics=STATISTICS,
        sample_count=SAMPLES // world_size,
        bins=BINS,
        spec={},
        config={},
        facts=facts,
        started=1.0,
    )
    writer = RunWriter.create(folder, meta)
    known: set[int] = set()
    for record in range(RECORDS):
        slots = [_of_rank(slot, share) for slot in present(record)]
        parts = [_share(slot, record, rank, share) for slot in slots]
        reduced = [
            reduce(part, slot, count=meta.sample_count, bins=BINS)
            for part, slot in zip(parts, slots, strict=True)
        ]
        values = {} if record % 50 else {s.id: p for s, p in zip(slots, parts, strict=True)}
        info = _info(record, share, meta.sample_count)
        if record == PREVIEWED:
            weight = tensor(SLOTS[WEIGHT], record)[:2]
            info.previews[WEIGHT] = StoredPreview(PREVIEW_AXES, weight)
        batch = StepBatch(
            steps=[info],
            slots=np.array([slot.id for slot in slots], np.int32),
            aggregates=np.stack([one[0] for one in reduced])[None],
            samples=np.stack([one[1] for one in reduced])[None],
            counts=np.stack([one[2] for one in reduced])[None],
            ranges=np.stack([one[3] for one in reduced])[None],
            values=[values],
            kpis=[{"loss": float(record)}],
            new_slots=[slot for slot in slots if slot.id not in known],
            new_structures=[GRAPH] if record == 0 else [],
            documents={"modules": MODULES} if record == 0 else {},
            rows=np.array([1 if slot.batch_dim is None else share for slot in slots]),
        )
        known |= {slot.id for slot in slots}
        writer.commit([batch], [_said()] if record == 0 else [])
    writer.close()


def _of_rank(slot: SlotInfo, share: int) -> SlotInfo:
    return slot if slot.batch_dim is None else replace(slot, shape=(share, *slot.shape[1:]))


def _share(slot: SlotInfo, record: int, rank: int, share: int) -> NDArray[np.float32]:
    whole = tensor(SLOTS[slot.id], record)
    return whole if slot.batch_dim is None else whole[rank * share : (rank + 1) * share]


def _info(record: int, batch: int, samples: int) -> StepInfo:
    kind = "eval" if record % 7 == 6 else "train"
    return StepInfo(
        step=record,
        time=100.0 + record,
        type=kind,
        mode=kind,
        structure=GRAPH.hash,
        batch_size=batch,
        samples=[*range(samples)],
        cost=0.5,
        extra={"tags": ["long"]} if record == 3 else {},
    )


def _said() -> ScalarBatch:
    notes = [Note(0, "train", 5.0, "hello")]
    return ScalarBatch(np.array([0, 1]), np.array([0.5, 0.25]), ["lr", "lr"], ["train"] * 2, notes)


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two ranks"])
def view(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RecordView:
    world_size: int = request.param
    run = tmp_path_factory.mktemp("contract") / "run"
    for rank in range(world_size):
        write(run / "ranks" / str(rank) if rank else run, rank=rank, world_size=world_size)
    reader = open_reader(run)
    assert isinstance(reader, JoinedReader if world_size > 1 else Reader)
    return reader.view


class TestRecordView:
    """What `RecordView` promises, for each of its implementations."""

    def test_it_has_all_records_and_slots(self, view: RecordView) -> None:
        assert view.n == RECORDS
        assert [slot.key for slot in view.slots] == [slot.key for slot in SLOTS]
        assert [slot.id for slot in view.slots] == [slot.id for slot in SLOTS]
        assert view.meta.statistics == STATISTICS
        assert view.meta.sample_count == SAMPLES

    def test_records_hold_the_facts_of_each_step(self, view: RecordView) -> None:
        steps = view.records[:, RecordColumn.STEP]
        np.testing.assert_array_equal(steps, np.arange(RECORDS))
        np.testing.assert_array_equal(view.records[:, RecordColumn.BATCH_SIZE], BATCH)
        np.testing.assert_array_equal(view.records[:, RecordColumn.COST], 0.5)
        modes = [view.names("mode")[int(code)] for code in view.records[:, RecordColumn.MODE]]
        assert modes == ["eval" if record % 7 == 6 else "train" for record in range(RECORDS)]

    def test_nothing_is_superseded_resumed_or_damaged(self, view: RecordView) -> None:
        assert not view.superseded.any()
        assert not view.superseded_scalars.any()
        assert len(view.superseded) == RECORDS
        assert [session.record for session in view.sessions] == [0]
        view.look_for_damage()
        assert view.damage == []
        assert view.lost("agg", OUTPUT) is None
        assert view.lost("hist", OUTPUT) is None

    def test_scalars_and_notes_are_there_once(self, view: RecordView) -> None:
        names = [view.names("scalar")[code] for code in view.scalars["name"]]
        assert names == ["lr", "lr"]
        np.testing.assert_array_equal(view.scalars["step"], [0, 1])
        np.testing.assert_array_equal(view.scalars["value"], [0.5, 0.25])
        assert [(note.step, note.text) for note in view.notes] == [(0, "hello")]

    def test_further_facts_of_a_record(self, view: RecordView) -> None:
        assert view.extra(3).get("tags") == ["long"]
        assert "tags" not in view.extra(4)
        assert len(view.samples(0)) == SAMPLES

    def test_documents_and_graphs(self, view: RecordView) -> None:
        assert view.document("modules") == MODULES
        assert view.document("nothing") is None
        graph = view.structure(GRAPH.hash)
        assert graph is not None
        assert graph.hash == GRAPH.hash

    def test_a_row_reaches_to_the_slots_that_it_has(self, view: RecordView) -> None:
        assert all(view.has_column(LATE, slot.id) for slot in SLOTS)

    @pytest.mark.parametrize("record", [0, LATE - 1, LATE, 255, 256, RECORDS - 1])
    def test_a_row_is_what_numpy_computes(self, view: RecordView, record: int) -> None:
        row = view.row("agg", record)
        for slot in present(record):
            expect_aggregates(row[slot.id], slot, record, view)

    def test_a_part_of_a_row_is_that_part(self, view: RecordView) -> None:
        whole = view.row("agg", 260)
        np.testing.assert_array_equal(view.row("agg", 260, OUTPUT), whole[OUTPUT])
        np.testing.assert_array_equal(view.row("agg", 260, OUTPUT, 2), whole[OUTPUT, 2])

    def test_rows_are_the_rows_of_each_record(self, view: RecordView) -> None:
        found = view.rows("agg", 250, 262)
        assert found.shape[:2] == (12, len(SLOTS))
        for at, record in enumerate(range(250, 262)):
            expect_same(found[at], view.row("agg", record))

    @pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: f"{slot.key.node}.{slot.key.role}")
    def test_a_series_is_a_slot_over_all_records(self, view: RecordView, slot: SlotInfo) -> None:
        column = view.meta.columns.index("mean.mean")
        series = view.series("agg", slot.id, column)
        expected = [
            rows_of(slot, record)[:, 0].mean() if slot in present(record) else np.nan
            for record in range(RECORDS)
        ]
        np.testing.assert_allclose(series, expected, rtol=1e-4, atol=1e-6)

    def test_heat_is_all_series_of_a_column(self, view: RecordView) -> None:
        column = view.meta.columns.index("abs_max.mean")
        heat = view.heat("agg", column)
        assert heat.shape == (RECORDS, len(SLOTS))
        for slot in SLOTS:
            expect_same(heat[:, slot.id], view.series("agg", slot.id, column))

    def test_a_tile_is_a_part_of_heat(self, view: RecordView) -> None:
        column = view.meta.columns.index("std.mean")
        heat = view.heat("agg", column)
        found = view.tile(column, slice(250, 270), slice(1, 3))
        np.testing.assert_array_equal(found, heat[250:270, 1:3])
        np.testing.assert_array_equal(view.tile(column, slice(0, 5), slice(0, 1)), heat[:5, :1])

    def test_extremes_are_those_of_heat(self, view: RecordView) -> None:
        column = view.meta.columns.index("mean.mean")
        chosen = view.records[:, RecordColumn.MODE] == view.names("mode").index("train")
        found = view.extremes(column, slice(0, 3), chosen, slice(0, RECORDS))
        heat = np.where(chosen[:, None], view.heat("agg", column), np.nan)
        for span, part in enumerate((slice(0, 256), slice(256, RECORDS))):
            np.testing.assert_array_equal(found.low[span], np.nanmin(heat[part], axis=0))
            np.testing.assert_array_equal(found.high[span], np.nanmax(heat[part], axis=0))
        np.testing.assert_array_equal(heat[found.low_at, np.arange(3)], found.low)
        np.testing.assert_array_equal(heat[found.high_at, np.arange(3)], found.high)

    def test_a_metric_is_a_series_too(self, view: RecordView) -> None:
        at = view.names("kpi").index("loss")
        np.testing.assert_array_equal(view.series("kpi", SYSTEM_COLUMNS + at), np.arange(RECORDS))

    @pytest.mark.parametrize("record", [LATE, 256])
    def test_samples_are_those_of_the_batch(self, view: RecordView, record: int) -> None:
        """In rank order; each rank records the same number of its own samples."""
        places = np.array(view.samples(record))
        assert (places >= 0).all()
        found = view.row("smp", record)[OUTPUT]
        np.testing.assert_allclose(
            found[:, 0], rows_of(SLOTS[OUTPUT], record)[_taken(view), 0], rtol=1e-4
        )

    @pytest.mark.parametrize("record", [0, 256])
    def test_histograms_count_every_element_once(self, view: RecordView, record: int) -> None:
        counts = view.row("hist", record)
        assert counts[OUTPUT].sum() == tensor(SLOTS[OUTPUT], record).size
        assert counts[WEIGHT].sum() == tensor(SLOTS[WEIGHT], record).size

    def test_shapes_are_those_of_the_slot_table(self, view: RecordView) -> None:
        assert not view.reshaped
        assert view.shapes == []
        assert view.shape(WEIGHT, 0) == (3, 5)
        assert view.shape(WEIGHT, 1) is None

    def test_values_are_the_tensors_themselves(self, view: RecordView) -> None:
        assert view.value_slots(50) == [OUTPUT, WEIGHT, EVAL_ONLY]
        assert view.value_slots(51) == []
        weight = view.value(50, WEIGHT)
        output = view.value(50, OUTPUT)
        assert output is not None
        np.testing.assert_array_equal(weight, tensor(SLOTS[WEIGHT], 50))
        np.testing.assert_array_equal(output, tensor(SLOTS[OUTPUT], 50))
        np.testing.assert_array_equal(view.value(50, OUTPUT, 1), output[1])
        np.testing.assert_array_equal(view.value(50, OUTPUT, 1, slice(0, 2)), output[1, :2])
        assert view.value(51, OUTPUT) is None

    def test_previews_have_their_axes(self, view: RecordView) -> None:
        found = view.preview(PREVIEWED, WEIGHT)
        assert found is not None
        assert found.axes == PREVIEW_AXES
        np.testing.assert_array_equal(found.values, tensor(SLOTS[WEIGHT], PREVIEWED)[:2])
        assert view.preview(PREVIEWED, OUTPUT) is None
        assert view.preview(PREVIEWED + 1, WEIGHT) is None
        assert view.value(PREVIEWED, WEIGHT) is None

    def test_members_of_the_protocol_are_all_tried_here(self, view: RecordView) -> None:
        source = Path(__file__).read_text()
        members = [
            name for name in (*RecordView.__annotations__, *vars(RecordView)) if name[0] != "_"
        ]
        assert len(members) > 20
        for name in members:
            assert f"view.{name}" in source, name
            assert hasattr(view, name)


def _taken(view: RecordView) -> Sequence[int]:
    """Returns the recorded positions in the batch: the first ones of each rank's share."""
    ranks = len(getattr(view, "ranks", [0]))
    share, each = BATCH // ranks, SAMPLES // ranks
    first = [0, 2, 4, 6] if ranks == 1 else [0, 2]  # evenly spaced over a process's samples
    return [rank * share + at for rank in range(ranks) for at in first[:each]]


def expect_aggregates(
    found: NDArray[np.float32], slot: SlotInfo, record: int, view: RecordView
) -> None:
    rows = rows_of(slot, record).astype(np.float64)
    for place, name in enumerate(STATISTICS):
        if name == "std" and slot.batch_dim is None:
            continue
        column = rows[:, place]
        expected = {"mean": column.mean(), "std": column.std(), "abs_max": np.abs(column).max()}
        for aggregate, value in expected.items():
            at = view.meta.columns.index(f"{name}.{aggregate}")
            assert found[at] == pytest.approx(value, rel=1e-3, abs=1e-5), (name, aggregate)


def expect_same(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Equal where both have slots; those that came later are NaN."""
    upto = min(len(found), len(expected))
    np.testing.assert_allclose(found[:upto], expected[:upto], rtol=1e-5, equal_nan=True)
    assert np.isnan(found[upto:]).all() if found.dtype.kind == "f" else True
