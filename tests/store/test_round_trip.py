"""What was written is read back, bit for bit."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comgra_decl.records import SlotKey, StepBatch, Structure
from comgra_decl.store import Reader, RunWriter, surviving
from comgra_decl.store.layout import RAW_DTYPES, SYSTEM_COLUMNS
from tests.store.truth import Truth, meta_of, slot_info
from tests.support.shortened import shortened


def write(path: Path, truth: Truth, *commits: Any) -> RunWriter:
    writer = RunWriter.create(path, truth.meta)
    for commit in commits:
        batches = commit if isinstance(commit, list) else [commit]
        writer.commit(batches)
        truth.keep(batches)
    return writer


def test_a_run_without_records_is_waiting_and_empty(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "run", meta_of())
    reader = Reader(tmp_path / "run")
    assert reader.state == "waiting"
    assert reader.view.n == 0
    assert reader.view.slots == []
    assert reader.view.series("agg", 0, 0).shape == (0,)


def test_records_of_one_commit_are_read_back(tmp_path: Path) -> None:
    truth = Truth()
    write(tmp_path / "run", truth, truth.batch(3, [0, 1, 2]))
    truth.check(Reader(tmp_path / "run").view)


@pytest.mark.parametrize(
    "sizes",
    shortened([[127, 1, 1, 127, 1], [128], [129], [5, 300, 2, 128, 77], [1] * 130], tried=4),
)
def test_blocks_and_rows_agree_whatever_the_sizes_of_the_commits(
    tmp_path: Path, sizes: list[int]
) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    for size in sizes:
        batch = truth.batch(size, range(5))
        writer.commit([batch])
        truth.keep([batch])
    truth.check(Reader(tmp_path / "run").view)


def test_several_structures_share_a_commit(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    for first in (0, 10):
        batches = []
        for slots in ([0, 1, 2], [first + 3, 1], [2, 0], []):
            batch = truth.batch(40, slots)
            batches.append(batch)
            truth.keep([batch])
        writer.commit(batches)
    truth.check(Reader(tmp_path / "run").view)


@pytest.mark.slow
def test_slots_beyond_the_first_chunk_appear_later(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    # 300 slots are ten times the chunk width chosen at the start
    for records, slots in ((100, range(3)), (60, range(300)), (150, range(310)), (1, [299])):
        batch = truth.batch(records, slots)
        writer.commit([batch])
        truth.keep([batch])
    view = Reader(tmp_path / "run").view
    assert len(view.slots) == 310
    truth.check(view)


@pytest.mark.slow
def test_many_slots_from_the_start_use_several_chunks_and_smaller_blocks(tmp_path: Path) -> None:
    truth = Truth()
    writer = write(tmp_path / "run", truth, truth.batch(2, range(3000)))
    assert writer.block_steps == 128
    batch = truth.batch(127, [0, 255, 256, 2999])
    writer.commit([batch])
    truth.keep([batch])
    truth.check(Reader(tmp_path / "run").view)


COMMITS = given(
    commits=st.lists(
        st.lists(
            st.tuples(
                st.sampled_from([1, 2, 3, 31, 64, 127, 128, 129, 256]),
                st.lists(st.integers(0, 40), unique=True, max_size=6),
            ),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 1000),
    bins=st.sampled_from([None, 4]),
    samples=st.sampled_from([0, 2]),
)


@COMMITS
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
def test_any_sequence_of_batches_is_read_back(
    commits: list[list[tuple[int, list[int]]]], seed: int, bins: int | None, samples: int
) -> None:
    read_back(commits, Truth(seed, meta_of(bins=bins, sample_count=samples)))


@pytest.mark.slow
@COMMITS
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_any_of_many_sequences_of_batches_is_read_back(
    commits: list[list[tuple[int, list[int]]]], seed: int, bins: int | None, samples: int
) -> None:
    read_back(commits, Truth(seed, meta_of(bins=bins, sample_count=samples)))


def read_back(commits: list[list[tuple[int, list[int]]]], truth: Truth) -> None:
    """Writes batches of records with some slots each, commit by commit, and reads them back."""
    with TemporaryDirectory() as folder:
        writer = RunWriter.create(Path(folder) / "run", truth.meta)
        reader = Reader(Path(folder) / "run")
        for commit in commits:
            batches = []
            for records, slots in commit:
                batch = truth.batch(records, slots)
                truth.keep([batch])
                batches.append(batch)
            writer.commit(batches)
            assert reader.poll()
        truth.check(reader.view)


def test_values_keep_dtype_and_shape(tmp_path: Path) -> None:
    truth = Truth()
    dtypes = [getattr(ml_dtypes, name, None) or name for name in sorted(RAW_DTYPES)]
    values = {
        slot: np.array([[0, 1, 0], [1, 0, 1]]).astype(dtype) for slot, dtype in enumerate(dtypes)
    }
    write(tmp_path / "run", truth, truth.batch(3, range(len(dtypes)), values=values))
    truth.check(Reader(tmp_path / "run").view)


def test_values_may_change_shape_be_scalar_empty_or_large(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    for shape in ((2,), (2, 0), (2, 5, 7), (2, 700, 300), (1, 1 << 21), (2, 5, 7)):
        for slot in (0, 1):
            values = {slot: truth.rng.normal(size=shape).astype(np.float32)}
            batch = truth.batch(2, [0, 1], values=values)
            writer.commit([batch])
            truth.keep([batch])
    truth.check(Reader(tmp_path / "run").view)


def test_values_are_stored_only_of_the_records_that_have_them(tmp_path: Path) -> None:
    truth = Truth()
    batches: list[StepBatch] = []
    for slots in ([0], [], [0, 1], [], [1]):
        values = {slot: np.full((2, 3), len(batches), np.int64) for slot in slots}
        batches.append(truth.batch(2, [0, 1], values=values))
        truth.keep(batches[-1:])
    RunWriter.create(tmp_path / "run", truth.meta).commit(batches)
    view = Reader(tmp_path / "run").view
    truth.check(view)
    assert view.value(2, 0) is None
    assert view.value(0, 0, sample=2) is None


def test_one_sample_of_a_value_is_read_alone(tmp_path: Path) -> None:
    truth = Truth()
    value = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    write(tmp_path / "run", truth, truth.batch(1, [0], values={0: value}))
    found = Reader(tmp_path / "run").view.value(0, 0, sample=1)
    assert found is not None
    assert np.array_equal(found, value[1])


def test_a_dtype_without_a_name_in_zarr_is_widened(tmp_path: Path) -> None:
    truth = Truth()
    value = np.array([[0.5, 2.0]]).astype(ml_dtypes.float8_e4m3)
    write(tmp_path / "run", truth, truth.batch(1, [0], values={0: value}))
    found = Reader(tmp_path / "run").view.value(0, 0)
    assert found is not None
    assert found.dtype == np.float32
    assert found.tolist() == [[0.5, 2.0]]


def test_kpis_that_are_nan_differ_from_missing_ones(tmp_path: Path) -> None:
    from comgra_decl.query.tables import kpis_table

    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    for names in (["loss"], [], ["loss", "acc"], [f"kpi {i}" for i in range(40)], ["acc"] * 1):
        batch = truth.batch(70, [0], kpis=names)
        writer.commit([batch])
        truth.keep([batch])
    view = Reader(tmp_path / "run").view
    expected = [
        (truth.infos[record].step, name, repr(value))
        for record, kpis in enumerate(truth.kpis)
        for name, value in sorted(kpis.items(), key=lambda item: view.names("kpi").index(item[0]))
    ]
    table = kpis_table(view)
    found = zip(table["step"], table["name"], map(repr, table["value"].tolist()), strict=True)
    assert list(found) == expected
    assert table["value"].isna().any()
    assert len(view.names("kpi")) + SYSTEM_COLUMNS > 48  # spread over several chunks


def test_graphs_documents_and_slots_are_read_back(tmp_path: Path) -> None:
    truth = Truth()
    keys = [SlotKey("a", "output", 0, "forward"), SlotKey("b", "output.x[1]", 2, "grad:2")]
    graph = Structure("cafe", keys, ["input", "computed"], [(0, 1, True)], [".item() in f"])
    writer = write(tmp_path / "run", truth, truth.batch(1, [0], structure=graph))
    for number in range(3):
        batch = truth.batch(1, [0], documents={"report": {"number": number}})
        writer.commit([batch])
        truth.keep([batch])
    view = Reader(tmp_path / "run").view
    assert view.structure("cafe") == graph
    assert view.document("report") == {"number": 2}
    assert view.document("modules") is None
    assert view.slots == [slot_info(0)]


def test_counts_use_two_bytes_only_if_they_fit(tmp_path: Path) -> None:
    assert meta_of().counts_dtype == "uint16"
    meta = meta_of(spec={"histogram": {"bins": 4, "elements": None}})
    assert meta.counts_dtype == "uint32"
    truth = Truth(meta=meta)
    batch = truth.batch(1, [0])
    assert batch.counts is not None
    batch.counts[:] = 3_000_000_000
    write(tmp_path / "run", truth, batch)
    truth.check(Reader(tmp_path / "run").view)


@pytest.mark.parametrize("name", ["plain", "with blank", "Läufe/中文 🔬", "a%20b?#&", "x" * 200])
def test_odd_and_relative_paths_work(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    truth = Truth()
    write(Path(name), truth, truth.batch(2, [0]))
    truth.check(Reader(tmp_path / name).view)
    truth.check(Reader(f"./sub/../{name}").view)


@pytest.mark.parametrize("at_once", shortened([1, 7, 64, 8192], tried=1))
def test_the_facts_of_records_are_read_in_parts(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surviving, "_AT_ONCE", at_once)
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    reader: Reader | None = None
    for size in (1, 300, 40):
        batch = truth.batch(size, [0])
        writer.commit([batch])
        truth.keep([batch])
        reader = reader or Reader(tmp_path / "run")
        reader.poll()
        truth.check(reader.view)
    parts: list[int] = []
    real = surviving.FactsReader.facts

    def counting(self: Any, first: int, last: int) -> Any:
        for part in real(self, first, last):
            parts.append(len(part))
            yield part

    monkeypatch.setattr(surviving.FactsReader, "facts", counting)
    truth.check(Reader(tmp_path / "run").view)
    assert sum(parts) == 341
    assert max(parts) <= at_once
