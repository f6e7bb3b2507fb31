"""Damage hides only what it affects; no number is ever wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comgra_decl.errors import DamagedRunError
from comgra_decl.query import open_run
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.compaction import compact
from comgra_decl.store.database import Database, new_context
from comgra_decl.store.layout import ArrayForm
from comgra_decl.store.salvage import Salvage, TooLargeError
from comgra_decl.store.view import View
from tests.store.test_damage import overwrite
from tests.store.truth import Truth, same
from tests.support.shortened import examples, shortened

FAMILIES = ("agg", "smp", "hist")


@pytest.fixture
def truth() -> Truth:
    return Truth()


@pytest.fixture
def run(tmp_path: Path, truth: Truth) -> Path:
    """Records 0 to 255 exist as rows and as a block, up to 511 as a block, then 20 rows."""
    writer = RunWriter.create(tmp_path / "g" / "run", truth.meta)
    for size, slots in ((1, 4), (255, 40), (256, 40), (20, 40)):
        batch = truth.batch(size, range(slots))
        writer.commit([batch])
        truth.keep([batch])
    writer.close()
    assert Reader(tmp_path / "g" / "run").view.tables.forms["kpi/blk"].chunk[0] == 256
    return tmp_path / "g" / "run"


def damage(run: Path, *keys: str) -> None:
    for key in keys:
        assert Database(run, new_context(cache_bytes=0)).read_bytes(key), key
        overwrite(run, key, b"rubbish")


def chunks(run: Path, name: str) -> list[str]:
    return Database(run, new_context(cache_bytes=0)).keys(f"{name}/c/", f"{name}/c0")


def whole_but(view: View, truth: Truth, family: str, records: slice) -> None:
    """All numbers of a family are correct, except in records in which every slot lost some."""
    expected = truth._dense(family, view, view.n)
    found = view.heat(family)[:, : expected.shape[1]]
    gone = np.zeros(view.n, bool)
    gone[records] = True
    assert same(found[~gone], expected[~gone])
    for slot in (0, 39):
        lost = view.lost(family, slot)
        assert lost is not None
        assert lost.tolist() == gone.tolist()
        series = view.series(family, slot)
        assert same(series[~gone], expected[~gone, slot])
        if series.dtype.kind == "f":
            assert np.isnan(series[gone]).all()


@pytest.mark.parametrize("family", shortened(FAMILIES, tried=1))
def test_a_damaged_block_is_read_from_its_rows(run: Path, truth: Truth, family: str) -> None:
    damage(run, *[key for key in chunks(run, f"{family}/blk") if key.split("/")[3] == "0"])
    view = Reader(run).view
    truth.check(view)
    assert view.damage == []


@pytest.mark.parametrize("family", shortened(FAMILIES, tried=1))
def test_a_damaged_row_is_read_from_its_block(run: Path, truth: Truth, family: str) -> None:
    damage(run, *[key for key in chunks(run, f"{family}/row") if key.split("/")[3] == "7"])
    truth.check(Reader(run).view)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_nowhere_else_is_missing_and_said(
    run: Path, truth: Truth, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(run, *[key for key in chunks(run, f"{family}/blk") if key.split("/")[3] == "1"])
    view = Reader(run).view
    whole_but(view, truth, family, slice(256, 512))
    (loss,) = view.damage
    assert f"of steps {256 * 3} to {511 * 3} are missing" in loss
    assert f"'{family}/blk' is damaged" in loss
    assert [record.getMessage() for record in caplog.records] == [f"comgra: {loss}"]


def test_a_compacted_run_has_no_other_copy(run: Path, truth: Truth) -> None:
    compact(run)
    damage(run, *[key for key in chunks(run, "agg/blk") if key.split("/")[3] == "0"])
    whole_but(Reader(run).view, truth, "agg", slice(0, 256))


def test_a_damaged_record_of_the_open_block_is_the_only_one_missing(
    run: Path, truth: Truth
) -> None:
    damage(run, *[key for key in chunks(run, "agg/row") if key.split("/")[3] == "520"])
    view = Reader(run).view
    whole_but(view, truth, "agg", slice(520, 521))
    assert "of step 1560 are missing" in view.damage[0]
    with pytest.raises(DamagedRunError, match="agg/row"):
        view.row("agg", 520)


def test_a_record_of_many_tensors_is_shown_without_those_that_are_damaged(tmp_path: Path) -> None:
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    batch = truth.batch(3, range(300))
    writer.commit([batch])
    truth.keep([batch])
    writer.close()
    damage(run, "agg/row/c/1/1/0", "hist/row/c/1/1/0")
    view = Reader(run).view
    expected = truth._dense("agg", view, 3)[1]
    assert same(view.row("agg", 1)[:256], expected[:256])
    assert np.isnan(view.row("agg", 1)[256:]).all()
    assert same(view.row("agg", 1, 255), expected[255])
    for refused in (("agg", 1, 256), ("hist", 1), ("hist", 1, 299)):
        with pytest.raises(DamagedRunError, match=f"{refused[0]}/row"):
            view.row(*refused)
    assert view.damage[0] == "statistics of step 3 are missing: 'agg/row' is damaged"
    assert same(view.row("hist", 1, 255), truth._dense("hist", view, 3)[1, 255])


def test_one_damaged_chunk_costs_its_own_slots_and_column_only(run: Path, truth: Truth) -> None:
    (key,) = [key for key in chunks(run, "agg/blk") if key.endswith("c/1/0/3")]
    form = Reader(run).view.tables.forms["agg/blk"]
    damage(run, key)
    view = Reader(run).view
    expected = truth._dense("agg", view, view.n)
    heat, width = view.heat("agg"), form.chunk[1]
    assert np.isnan(heat[256:512, :width, 3]).all()
    heat[256:512, :width, 3] = expected[256:512, :width, 3]
    assert same(heat[:, :40], expected)
    assert same(view.series("agg", 0, 2), expected[:, 0, 2])
    assert same(view.rows("agg", 500, 530)[:, :40, 4], expected[500:530, :, 4])
    assert all("'agg/blk' is damaged" in loss for loss in view.damage)


def test_a_run_shows_what_is_left_and_says_what_is_not(run: Path) -> None:
    damage(run, *[key for key in chunks(run, "agg/blk") if key.split("/")[3] == "1"])
    damage(run, *[key for key in chunks(run, "hist/blk") if key.split("/")[3] == "1"])
    opened = open_run(run)
    assert opened.damage == []
    series = opened.series("node 0", "mean")
    assert len(series) == 532
    steps, counts, ranges = opened.slot("node 1").histograms()
    assert len(steps) == len(counts) == len(ranges) < 300, "none of zeros"
    assert not set(steps.tolist()) & set(range(256 * 3, 512 * 3))
    assert len(opened.damage) == 2
    assert opened.report["damage"] == opened.damage
    for chunk in opened.chunks():
        found = chunk.histograms(1)
        assert found is not None
        lost = (chunk.steps >= 256 * 3) & (chunk.steps < 512 * 3)
        assert np.isnan(found[1][lost]).all()


def test_lost_histograms_are_left_out_where_their_statistics_are_whole(run: Path) -> None:
    before, *_ = open_run(run).slot("node 1").histograms()
    damage(run, *[key for key in chunks(run, "hist/blk") if key.split("/")[3] == "1"])
    steps, counts, _ = open_run(run).slot("node 1").histograms()
    lost = {step for step in before.tolist() if 256 * 3 <= step < 512 * 3}
    assert lost
    assert steps.tolist() == [step for step in before.tolist() if step not in lost]
    assert counts.any(axis=1).all()


def test_want_of_memory_is_no_damage() -> None:
    def read(*_: Any) -> Any:
        raise TooLargeError("it requires 9.9 GB of memory")

    damage: list[str] = []
    form = ArrayForm("agg/row", "float32", (10, 10), (1, 10), "NaN")
    salvage = Salvage(read, {"agg/row": form}, np.zeros((10, 12)), damage)
    with pytest.raises(TooLargeError):
        salvage.read("agg/row", slice(0, 10), 3)
    assert damage == []


boxes = st.tuples(st.integers(0, 19), st.integers(1, 20), st.integers(0, 11), st.integers(1, 12))


@settings(max_examples=examples(60))
@given(
    st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 1)), max_size=12), boxes
)
def test_whatever_is_damaged_everything_else_is_there(
    broken: set[tuple[int, int, int]], box: tuple[int, int, int, int]
) -> None:
    """Chunks of 4 x 3 x 2 of an array of 20 x 12 x 4, some of which cannot be read."""
    data = np.random.default_rng(0).normal(size=(20, 12, 4)).astype(np.float32)
    chunk = (4, 3, 2)

    def read(_: str, *index: int | slice) -> Any:
        grid = [np.arange(20)[index[0]], np.arange(12)[index[1]], np.arange(4)]
        grid[2] = grid[2][index[2]] if len(index) > 2 else grid[2]
        sets = [
            set(np.atleast_1d(places) // size) for places, size in zip(grid, chunk, strict=True)
        ]
        if any(all(at in held for at, held in zip(b, sets, strict=True)) for b in broken):
            raise DamagedRunError("NOT_FOUND: it is gone")
        return data[index]

    damage: list[str] = []
    form = ArrayForm("agg/row", "float32", data.shape, chunk, "NaN")
    records = np.arange(20.0)[:, None] * np.ones(12)
    salvage = Salvage(read, {"agg/row": form}, records, damage)
    first, last, low, high = box
    last, high = max(first + 1, last), max(low + 1, high)
    found = salvage.read("agg/row", slice(first, last), slice(low, high))
    gone = np.zeros(data.shape, bool)
    for a, b, c in broken:
        gone[a * 4 : a * 4 + 4, b * 3 : b * 3 + 3, c * 2 : c * 2 + 2] = True
    expected = np.where(gone, np.nan, data)[first:last, low:high]
    assert same(found, expected.astype(np.float32))
    single = salvage.read("agg/row", slice(first, last), low, 1)
    assert same(single, np.where(gone, np.nan, data)[first:last, low, 1].astype(np.float32))
    assert bool(damage) == bool(np.isnan(expected).any()) or math.isnan(single.sum())
