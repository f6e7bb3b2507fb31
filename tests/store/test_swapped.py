"""Data is bound to its key: a data file in the wrong place is reported, never trusted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from comgra_decl.errors import DamagedRunError
from comgra_decl.store import Reader, RunWriter, layout
from comgra_decl.store.compaction import compact
from comgra_decl.store.copying import copy_run
from comgra_decl.store.database import Database, encode, new_context
from comgra_decl.store.layout import document_key, log_key, step_key
from comgra_decl.store.scalars import ROW, packed, unpacked
from comgra_decl.store.sums import packed as packed_sums
from comgra_decl.store.sums import unpacked as unpacked_sums
from comgra_decl.store.verify import verify
from tests.store.test_damage import change_json, overwrite
from tests.store.truth import SHAPE, Truth, meta_of

COMMITS, RECORDS = 10, 8  # of a commit; a block has 32
ONE, OTHER = 66, 74  # records after the last complete block, from two commits


def written(path: Path, *, version: int = 4) -> Truth:
    truth = Truth(meta=replace(meta_of(), bound=version > 2, tells_shapes=version > 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_OPEN_BLOCK_BYTES", 0)  # the shortest blocks
        return _written(path, truth)


def _written(path: Path, truth: Truth) -> Truth:
    writer = RunWriter.create(path, truth.meta)
    values = {0: np.arange(12, dtype=np.float32).reshape(2, 6)}
    for number in range(COMMITS):
        values = {0: values[0] + number}
        batch = truth.batch(RECORDS, range(4), values=values)
        writer.commit([batch])
        truth.keep([batch])
    writer.close()
    return truth


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    path = tmp_path_factory.mktemp("swapped") / "run"
    return path, written(path)


@pytest.fixture
def run(base: tuple[Path, Truth], tmp_path: Path) -> Path:
    shutil.copytree(base[0], tmp_path / "run")
    return tmp_path / "run"


def kv(run: Path) -> Database:
    return Database(run, new_context(cache_bytes=0))


def swap(run: Path, one: str, other: str) -> None:
    """Replaces the data under one key with that under another."""
    value = kv(run).read_bytes(one)
    assert value is not None
    overwrite(run, other, value)


@pytest.mark.parametrize("family", ["agg", "smp", "hist", "kpi"])
def test_a_chunk_of_another_record_is_not_read_as_this_ones(run: Path, family: str) -> None:
    rest = {"kpi": "/0", "agg": "/0/0", "hist": "/0/0", "smp": "/0/0/0"}[family]
    swap(run, f"{family}/row/c/{ONE}{rest}", f"{family}/row/c/{OTHER}{rest}")
    verdict = verify(run)
    (damage,) = verdict.damages
    assert damage.records == (OTHER, OTHER) or damage.where == "record"  # if its facts are lost
    assert "is not the one written at this position" in damage.reason
    view = Reader(run).view
    if family in ("agg", "smp"):
        heat = view.heat(family)
        assert np.isnan(heat[OTHER]).all()
        assert not np.isnan(heat[ONE]).all()
    with pytest.raises(DamagedRunError):
        view.row(family, OTHER)


def test_a_chunk_of_another_block_is_not_read_as_this_ones(
    base: tuple[Path, Truth], run: Path
) -> None:
    swap(run, "agg/blk/c/0/0/0", "agg/blk/c/1/0/0")
    assert not verify(run).whole
    base[1].check(Reader(run).view)  # its records are read from their rows


def test_a_chunk_of_raw_values_is_bound_to_its_record(run: Path) -> None:
    database = kv(run)
    found = [key for key in database.keys("raw/", "raw/\x7f") if f"/c/{ONE}/" in key]
    assert found
    for key in found:
        swap(run, key.replace(f"/c/{ONE}/", f"/c/{OTHER}/"), key)
    with pytest.raises(DamagedRunError, match="is not the one"):
        Reader(run).view.value(ONE, 0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (log_key("slots", 0), log_key("names", 0)),
        (log_key("names", 0), log_key("slots", 0)),
        (step_key(0), log_key("slots", 0)),
    ],
)
def test_json_of_another_key_is_refused(run: Path, one: str, other: str) -> None:
    swap(run, one, other)
    with pytest.raises(DamagedRunError, match="its checksum does not match"):
        _ = Reader(run).view


def test_an_older_revision_of_a_document_is_refused(run: Path) -> None:
    name = document_key("report")
    overwrite(run, name, encode({"entries": {}}, f"{name}@3"))
    change_json(run, "head", documents={"report": 4})
    reader = Reader(run)
    with pytest.raises(DamagedRunError, match="its checksum does not match"):
        reader.view.read_document("report")


def test_numbers_and_checksums_are_bound_to_their_key() -> None:
    rows = np.zeros(3, ROW)
    assert len(unpacked(packed(rows, "a"), "a")) == 3
    with pytest.raises(ValueError, match="checksum"):
        unpacked(packed(rows, "a"), "b")
    known = {"agg/row": {0: 1, 1: 2}, "kpi/row": {0: 7}}
    assert unpacked_sums("a", packed_sums("a", known)) == known
    with pytest.raises(ValueError, match="checksum"):
        unpacked_sums("b", packed_sums("a", known))


def swaps(run: Path) -> Iterator[tuple[Path, Path]]:
    files = sorted((run / "trace.ocdbt" / "d").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    rng = np.random.default_rng(5)
    for _ in range(12):
        one, other = rng.choice(len(files), 2, replace=False)
        yield files[one], files[other]


@pytest.mark.slow
def test_any_data_file_in_the_place_of_another_gives_no_wrong_number(
    base: tuple[Path, Truth], run: Path
) -> None:
    truth = base[1]
    expected = Reader(base[0]).view
    tables = {family: expected.heat(family) for family in ("agg", "smp")}
    read = 0
    for one, other in swaps(run):
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        verdict = verify(run)
        try:
            view = Reader(run, context=new_context(cache_bytes=0)).view
            for family, whole in tables.items():
                heat = view.heat(family)
                there = ~np.isnan(heat) & ~np.isnan(whole[: view.n])
                assert np.array_equal(heat[there], whole[: view.n][there]), (one, other)
            assert view.n == expected.n or not verdict.whole
            read += 1
        except DamagedRunError:
            assert not verdict.whole
        one.write_bytes(kept)
    assert read
    truth.check(Reader(run).view)


def test_an_old_head_is_not_taken_for_the_newest(run: Path) -> None:
    """The newest data file is replaced by an older one, which contains an older head."""
    database = kv(run)
    head = database.read_json("head")
    value = encode({**head, "generation": head["generation"] - 1}, "head")
    overwrite(run, "head", value)
    with pytest.raises(DamagedRunError, match="an older data file has replaced a newer"):
        Reader(run)
    assert not verify(run).whole


def test_copies_and_compacted_runs_keep_their_checksums(
    base: tuple[Path, Truth], run: Path, tmp_path: Path
) -> None:
    copy = copy_run(run, tmp_path / "copy")
    small = copy_run(run, tmp_path / "small", compact=True)
    compact(run)
    for path in (copy, small, run):
        assert verify(path).whole, verify(path).damages
        base[1].check(Reader(path).view)
        view = Reader(path).view
        assert view.sums is not None


@pytest.mark.parametrize("version", [2, 3])
def test_a_run_of_a_format_before_is_read_copied_and_compacted(
    tmp_path: Path, version: int
) -> None:
    """In version 2, checksums cover only the content; before version 3, records store no shapes."""
    truth = written(tmp_path / "run", version=version)
    reader = Reader(tmp_path / "run")
    assert reader.database.read_json("meta/run.json")["version"] == version
    assert bool(reader.database.keys("sums/", "sums/\x7f")) == (version > 2)
    assert {reader.view.shape(slot, 0) for slot in range(4)} == {SHAPE}
    assert verify(tmp_path / "run").whole
    copy_run(tmp_path / "run", tmp_path / "copy", compact=True)
    compact(tmp_path / "run")
    for name in ("run", "copy"):
        truth.check(Reader(tmp_path / name).view)
        assert verify(tmp_path / name).whole
        assert Reader(tmp_path / name).meta.bound is (version > 2)
        assert Reader(tmp_path / name).meta.tells_shapes is False


@pytest.mark.parametrize("version", [2, 3])
def test_a_run_of_a_format_before_is_resumed_in_it(tmp_path: Path, version: int) -> None:
    truth = written(tmp_path / "run", version=version)
    writer = RunWriter.resume(Reader(tmp_path / "run"), truth.meta)
    batch = truth.batch(3, range(4))
    writer.commit([batch])
    writer.close()
    truth.keep([batch])
    truth.check(Reader(tmp_path / "run").view)
    assert verify(tmp_path / "run").whole
