"""Levels of detail: exact extremes of every 256 records, from few reads, whatever is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from comgra_decl.records import AGGREGATES, SlotInfo, SlotKey, StepBatch, StepInfo
from comgra_decl.store import Reader, RunMeta, RunWriter, appending, levels
from comgra_decl.store.compaction import compact
from comgra_decl.store.database import Database, new_context
from comgra_decl.store.layout import LEVELS, SYSTEM_COLUMNS, RecordColumn
from comgra_decl.store.levels import SPAN, Extremes
from comgra_decl.store.verify import verify
from comgra_decl.store.view import View
from tests.store.test_damage import overwrite

STATISTICS = ("l2", "nonfinite")
TOGETHER = 4
GROUP = TOGETHER * SPAN
LONG = 2 * GROUP
"""As in a store that writes four spans together, so that few records fill several keys."""


def meta_of() -> RunMeta:
    facts: dict[str, Any] = {"spec": {}, "config": None, "facts": {}, "started": 1e9}
    return RunMeta(statistics=STATISTICS, sample_count=0, bins=None, **facts)


def batch(first: int, count: int, slots: int = 2, types: tuple[str, ...] = ("train",)) -> StepBatch:
    """Records with missing values, infinities and equal values; `types` alternate."""
    rng = np.random.default_rng(first)
    shape = count, slots, len(STATISTICS), len(AGGREGATES)
    values = rng.integers(-40, 40, shape).astype(np.float32)
    values[rng.random(values.shape) < 0.05] = np.nan
    values[rng.random(values.shape) < 0.001] = np.inf
    values[:, :, 1] = rng.random(values[:, :, 1].shape) < 0.001  # non-finite elements
    names = [types[(first + i) % len(types)] for i in range(count)]
    new = [
        SlotInfo(i, SlotKey(f"n{i}", "output", 0, "forward"), "computed", "float32", (2,), 0, "N")
        for i in range(slots)
    ]
    return StepBatch(
        steps=[
            StepInfo(step=first + i, time=1e9, type=name, mode=name) for i, name in enumerate(names)
        ],
        slots=np.arange(slots, dtype=np.int32),
        aggregates=values,
        samples=np.empty((count, slots, 0, len(STATISTICS)), np.float32),
        counts=None,
        ranges=None,
        values=[{}] * count,
        kpis=[{}] * count,
        new_slots=[] if first else new,
        new_structures=[],
    )


def write(path: Path, records: int, *, commit: int = 600, **how: Any) -> Path:
    writer = RunWriter.create(path, meta_of())
    for first in range(0, records, commit):
        writer.commit([batch(first, min(commit, records - first), **how)])
    writer.close()
    return path


@contextmanager
def counted(view: View) -> Iterator[dict[str, int]]:
    """Count the keys of levels and the chunks of statistics that a view reads."""
    counts = {"keys": 0, "chunks": 0}
    tile, derived = view.tile, view._db.read_derived

    def of_tile(column: int, records: slice, slots: slice) -> NDArray[np.float32]:
        edge = view.n // SPAN * SPAN
        blocks = min(records.stop, edge) // SPAN - min(records.start, edge) // SPAN
        rows = max(records.stop, edge) - max(records.start, edge)
        counts["chunks"] += blocks + rows
        return tile(column, records, slots)

    def of_keys(keys: list[str], *, most: int) -> list[bytes | None]:
        found = derived(keys, most=most)
        counts["keys"] += len(keys)
        return found

    view.tile, view._db.read_derived = of_tile, of_keys  # type: ignore[method-assign, assignment]
    yield counts


def overview(view: View, chosen: NDArray[np.bool_] | None = None) -> Extremes:
    mask = np.ones(view.n, bool) if chosen is None else chosen
    return view.extremes(0, slice(0, len(view.slots)), mask, slice(0, view.n))


def expected(view: View, chosen: NDArray[np.bool_] | None = None) -> dict[str, NDArray[Any]]:
    """Return the extremes by numpy, from the whole table."""
    table = view.heat("agg", 0).astype(float)
    table[~np.ones(view.n, bool) if chosen is None else ~chosen] = np.nan
    padded = np.full((-(-view.n // SPAN) * SPAN, table.shape[1]), np.nan)
    padded[: view.n] = table
    spans = padded.reshape(-1, SPAN, table.shape[1])
    none = np.isnan(spans).all(1)
    start = np.arange(len(spans))[:, None] * SPAN
    low = np.where(np.isnan(spans), np.inf, spans).min(1)
    high = np.where(np.isnan(spans), -np.inf, spans).max(1)
    first_low, first_high = (spans == low[:, None]).argmax(1), (spans == high[:, None]).argmax(1)
    return {
        "low": np.where(none, np.nan, low),
        "high": np.where(none, np.nan, high),
        "low_at": np.where(none, -1, start + first_low),
        "high_at": np.where(none, -1, start + first_high),
    }


def assert_exact(view: View, chosen: NDArray[np.bool_] | None = None) -> None:
    found = overview(view, chosen)
    for name, values in expected(view, chosen).items():
        np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)


@pytest.fixture(scope="module", autouse=True)
def small_groups() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "_TOGETHER", TOGETHER)
        patch.setattr(levels, "_GROUP", GROUP)
        patch.setattr(levels, "LONG", LONG)
        yield patch


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four groups and a half, and an open block."""
    return write(tmp_path_factory.mktemp("levels") / "run", 4 * GROUP + GROUP // 2 + 100)


@pytest.fixture
def run(long_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(long_run, tmp_path / "run"))


def levels_of(run: Path) -> list[str]:
    return Database(run, new_context(cache_bytes=0)).keys(LEVELS, LEVELS + "\x7f")


def test_extremes_are_exact_and_read_no_record(long_run: Path) -> None:
    view = Reader(long_run).view
    with counted(view) as counts:
        assert_exact(view)
    assert counts == {"keys": 5, "chunks": 0}


def reads_of_an_overview(path: Path, records: int) -> int:
    view = Reader(write(path, records, commit=20_000, slots=1)).view
    with counted(view) as counts:
        assert_exact(view)
    return sum(counts.values())


def real_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "_TOGETHER", 64)
    monkeypatch.setattr(levels, "_GROUP", 64 * SPAN)
    monkeypatch.setattr(levels, "LONG", 1 << 16)


@pytest.mark.slow
def test_ten_times_the_records_take_no_more_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_groups(monkeypatch)
    short, long = (reads_of_an_overview(tmp_path / str(n), n) for n in (7_000, 70_000))
    assert short == 1 + 7_000 // SPAN + 7_000 % SPAN
    assert long == 5


@pytest.mark.slow
def test_a_hundred_times_the_records_take_at_most_half_as_many_more_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_groups(monkeypatch)
    short, long = (reads_of_an_overview(tmp_path / str(n), n) for n in (10_000, 1_000_000))
    assert short == 1 + 39 + 16
    assert long <= 1.5 * short


def test_a_part_of_a_run_is_read_from_its_own_spans(long_run: Path) -> None:
    view = Reader(long_run).view
    found = view.extremes(0, slice(1, 2), np.ones(view.n, bool), slice(2_000, 3_000))
    spans = slice(2_000 // SPAN, -(-3_000 // SPAN))
    assert found.first == spans.start * SPAN
    np.testing.assert_array_equal(found.low[:, 0], expected(view)["low"][spans, 1])


def test_kinds_of_records_are_told_apart(tmp_path: Path) -> None:
    """Training and evaluation alternate, so each has its own extremes in each span."""
    path = write(tmp_path / "run", LONG + 1000, types=("train", "train", "eval"))
    view = Reader(path).view
    modes = view.records[:, RecordColumn.MODE]
    for mode in np.unique(modes):
        with counted(view) as counts:
            assert_exact(view, modes == mode)
        assert counts["chunks"] == 0
    assert_exact(view)


def test_records_that_the_level_mixes_are_read_themselves(long_run: Path) -> None:
    view = Reader(long_run).view
    chosen = np.ones(view.n, bool)
    chosen[[700, 3000]] = False  # as if a later session had repeated these two steps
    with counted(view) as counts:
        assert_exact(view, chosen)
    assert counts["chunks"] == 2


def damaged(value: bytes) -> bytes:
    return value[:200] + bytes([value[200] ^ 1]) + value[201:]


@pytest.mark.parametrize("how", ["deleted", "empty", "a flipped bit", "another statistic's", "all"])
def test_a_damaged_level_changes_no_number(run: Path, how: str) -> None:
    database = Database(run, new_context(cache_bytes=0))
    keys = levels_of(run)
    wrong = [key for key in keys if key.endswith("/0/0")]
    for key in keys if how == "all" else wrong[1:3]:
        value = database.read_bytes(key)
        assert value is not None
        other = database.read_bytes(key.replace("/0/0", "/1/0"))
        forms = {"empty": b"", "a flipped bit": damaged(value), "another statistic's": other}
        overwrite(run, key, forms.get(how))
    view = Reader(run).view
    assert_exact(view)
    assert not view.damage
    assert verify(run).whole


def test_a_level_of_other_records_is_ignored(run: Path, tmp_path: Path) -> None:
    """As if the database had been put together from two runs."""
    other = write(tmp_path / "other", LONG + 1000, types=("eval",))
    source = Database(other, new_context(cache_bytes=0))
    for key in levels_of(run):
        overwrite(run, key, source.read_bytes(key) or b"")
    assert_exact(Reader(run).view)


def test_a_run_that_is_being_written_reads_the_rest_from_its_blocks(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", meta_of())
    reader = Reader(tmp_path / "run")
    for first in range(0, 3 * GROUP, 500):
        writer.commit([batch(first, 500)])
    reader.poll()
    assert_exact(reader.view)
    writer.close()
    reader.poll()
    assert_exact(reader.view)


def test_a_resumed_run_continues_its_levels(run: Path) -> None:
    writer, past = appending.append_to(run, meta_of())
    n = past.view.n
    writer.commit([batch(n, 1500)])
    writer.close()
    view = Reader(run).view
    assert view.n == n + 1500
    with counted(view) as counts:
        assert_exact(view)
    assert counts["chunks"] == 0


def test_a_failed_commit_leaves_no_trace_in_the_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter.create(tmp_path / "run", meta_of())
    for first in range(0, LONG + 1000, 700):
        part = batch(first, 700)
        with monkeypatch.context() as broken:
            broken.setattr("comgra_decl.store.commit.Commit.finish", _fail)
            with pytest.raises(OSError, match="full"):
                writer.commit([part])
        writer.commit([part])
    writer.close()
    view = Reader(tmp_path / "run").view
    with counted(view) as counts:
        assert_exact(view)
    assert counts["chunks"] == 0


def _fail(_: object) -> None:
    raise OSError("full")


def test_compaction_writes_the_levels_anew(run: Path) -> None:
    before = levels_of(run)
    for key in before:
        overwrite(run, key, None)
    compact(run)
    assert levels_of(run) == before
    view = Reader(run).view
    with counted(view) as counts:
        assert_exact(view)
    assert counts["chunks"] == 0


def test_a_short_run_keeps_what_is_complete(tmp_path: Path) -> None:
    path = write(tmp_path / "run", LONG - 50, commit=333)
    assert len(levels_of(path)) == len(STATISTICS) * len(AGGREGATES)  # those of the first group
    assert_exact(Reader(path).view)


def test_more_slots_than_one_key_holds_and_slots_that_appear_later(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", meta_of())
    few = batch(0, GROUP, slots=3)
    writer.commit([few])
    many = batch(GROUP, GROUP, slots=70)
    new = batch(0, 1, slots=70).new_slots[3:]
    writer.commit([replace(many, new_slots=new)])
    writer.close()
    view = Reader(tmp_path / "run").view
    with counted(view) as counts:
        assert_exact(view)
    assert counts["chunks"] == 4  # of the slots that did not exist in the first group


@pytest.mark.parametrize("block", [32, 128])
def test_short_blocks_make_up_a_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """As in a run of many slots, whose blocks have fewer records; it is resumed within a span."""
    monkeypatch.setattr("comgra_decl.store.layout.block_steps", lambda _: block)
    run = write(tmp_path / "run", LONG + 3 * block + 5, commit=90, types=("train", "eval"))
    n = LONG + 3 * block + 5
    writer, _ = appending.append_to(run, meta_of())
    for first in range(n, 2 * LONG + 50, 90):
        writer.commit([batch(first, 90, types=("train", "eval"))])
    writer.close()
    view = Reader(run).view
    modes = view.records[:, RecordColumn.MODE]
    for mode in np.unique(modes):
        with counted(view) as counts:
            assert_exact(view, modes == mode)
        assert counts["chunks"] == 0


def test_a_span_with_many_kinds_of_records_keeps_no_more_than_tells_so() -> None:
    values = np.zeros((32, 3, 2), np.float32)
    facts = np.zeros((32, SYSTEM_COLUMNS))
    facts[:, levels._KIND] = np.arange(32)[:, None]
    first, second = levels._entries(0, values, facts), levels._entries(32, values, facts + 32)
    whole = levels._joined(first, second)
    most = levels._MOST_KINDS + 1
    assert [len(first), len(second), len(whole)] == [most] * 3
    assert {entry.count for entry in whole} == {64}
