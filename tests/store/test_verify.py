"""Verification finds all damage, and reports what is lost and what can be recovered."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from comgra_decl.errors import FormatError, RunNotFoundError
from comgra_decl.store import Reader, RunWriter, layout
from comgra_decl.store.copying import copy_run
from comgra_decl.store.inventory import keys_of, regions
from comgra_decl.store.verify import Verdict, verify
from tests.store.test_damage import change_json, overwrite
from tests.store.truth import Truth
from tests.support.shortened import shortened

COMMITS = 20
EACH = 12  # records per commit; together more than a block


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    """A finished run of 240 records, most of them as rows and in blocks, with a value each."""
    truth = Truth()
    path = tmp_path_factory.mktemp("verify") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_OPEN_BLOCK_BYTES", 0)  # the shortest blocks
        _write(path, truth)
    return path, truth


def _write(path: Path, truth: Truth) -> None:
    writer = RunWriter.create(path, truth.meta)
    for number in range(COMMITS):
        value = truth.rng.normal(size=(2, 3)).astype("float32")
        batch = truth.batch(EACH, range(3 + number // 10), values={0: value})
        writer.commit([batch])
        truth.keep([batch])
    writer.close()


@pytest.fixture
def run(written: tuple[Path, Truth], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written[0], tmp_path / "run"))


def files_of(run: Path) -> list[Path]:
    """Returns all data files, oldest first."""
    files = list((run / "trace.ocdbt" / "d").iterdir())
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


def test_a_whole_run_is_whole(written: tuple[Path, Truth]) -> None:
    verdict = verify(written[0])
    assert verdict.whole
    assert (verdict.state, verdict.records) == ("finished", COMMITS * EACH)
    assert verdict.whole_version == verdict.version
    assert verdict.whole_step == written[1].infos[-1].step


def test_every_stored_chunk_is_one_that_is_checked(written: tuple[Path, Truth]) -> None:
    """Exactly the contents of the database, no more and no less."""
    reader = Reader(written[0])
    expected = {key for region in regions(reader.view) for key in keys_of(region)}
    stored = {key for key in reader.database.keys("", "\x7f") if "/c/" in key}
    assert expected == stored
    assert sum(region.chunks for region in regions(reader.view)) == len(stored)


def test_regions_are_cut_at_chunks_without_loss(written: tuple[Path, Truth]) -> None:
    for region in regions(Reader(written[0]).view):
        parts = list(region.parts(500))
        assert sum(part.elements for part in parts) == region.elements
        keys = [key for part in parts for key in keys_of(part)]
        assert sorted(keys) == sorted(keys_of(region))
        assert all(part.elements <= 500 or part.chunks == 1 for part in parts)


@pytest.mark.parametrize("seed", shortened(range(6), tried=3))
def test_a_flipped_bit_anywhere_in_the_data_is_found(run: Path, seed: int) -> None:
    """Unless it is in an unused part, in which case everything reads as before."""
    rng = random.Random(seed)
    path = rng.choice(files_of(run))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    verdict = verify(run)
    if verdict.whole:
        copy = copy_run(run, run.parent / "copy")
        assert verify(copy).records == COMMITS * EACH
    else:
        assert all(damage.lost and damage.reason for damage in verdict.damages)


def test_what_a_truncated_file_takes_away_is_named(run: Path, written: tuple[Path, Truth]) -> None:
    first = files_of(run)[5]
    first.write_bytes(first.read_bytes()[:50])
    verdict = verify(run)
    assert not verdict.whole
    rows = [damage for damage in verdict.damages if damage.where == "agg/row"]
    spans = [damage.records for damage in rows if damage.records is not None]
    assert len(spans) == len(rows)
    named = {at for first_one, last_one in spans for at in range(first_one, last_one + 1)}
    held = set(range(48, 60))  # from this commit; of others, what its index nodes refer to
    assert named & held
    assert max(named) < 60
    for damage in rows:
        assert damage.records is not None
        assert damage.steps == tuple(written[1].infos[record].step for record in damage.records)
        assert damage.lost == "statistics of slots 0 to 3; curves over steps are intact"
    facts = [damage for damage in verdict.damages if damage.where == "steps/000000000048.json"]
    assert "facts and values of records from 48 on" in {damage.lost for damage in facts}


@pytest.mark.slow
def test_all_that_was_whole_before_the_loss_can_be_rescued(
    run: Path, written: tuple[Path, Truth], tmp_path: Path
) -> None:
    for newest in files_of(run)[-3:]:
        newest.unlink()
    verdict = verify(run)
    assert [damage.where for damage in verdict.damages] == ["meta/run.json"]
    assert "cannot be opened" in verdict.damages[0].lost
    assert verdict.whole_version is not None
    assert verdict.whole_records is not None
    # of the three lost files, one was the end of the run, and two were commits
    assert verdict.whole_records == (COMMITS - 2) * EACH
    assert verdict.whole_step == written[1].infos[verdict.whole_records - 1].step
    rescued = copy_run(run, tmp_path / "rescued", version=verdict.whole_version)
    assert verify(rescued).whole
    written[1].check(Reader(rescued).view, upto=verdict.whole_records)


@pytest.mark.parametrize(
    "key",
    shortened(
        [
            "steps/000000000000.json",
            "agg/blk/c/0/0/3",
            "slots/",
            "lanes/",
            "kpi/row/c/239",
            "kpi/blk",
        ],
        tried=3,
    ),
)
def test_a_lost_key_is_found(run: Path, key: str) -> None:
    for found in Reader(run).database.keys(key, key + "\x7f") or [key]:
        overwrite(run, found, None)
    where = {damage.where.partition("/")[0] for damage in verify(run).damages}
    # a record's facts are reported as the record itself, all of which is lost with them
    assert where & {key.partition("/")[0], "record", "records"}


def test_numbers_that_are_missing_are_found(run: Path) -> None:
    change_json(run, "head", scalars=5)
    (damage,) = verify(run).damages
    assert damage.where == "scalars"
    assert "the head lists 5, but 0 exist" in damage.reason


def test_a_run_without_any_of_its_files_has_nothing_to_rescue(run: Path) -> None:
    shutil.rmtree(run / "trace.ocdbt" / "d")
    verdict = verify(run)
    assert not verdict.whole
    assert verdict.whole_version is None


def test_a_thousand_damages_are_not_told_one_by_one(run: Path) -> None:
    for path in files_of(run)[::2][:-1]:
        path.write_bytes(b"")
    verdict = verify(run)
    assert 0 < len(verdict.damages) <= 200


def test_a_run_being_written_is_checked_as_of_now(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    writer.commit([truth.batch(3, range(2))])
    seen: list[float] = []

    def meanwhile(what: str, done: int, total: int) -> None:
        assert what == "checking"
        seen.append(done / total)
        writer.commit([truth.batch(1, range(2))])

    verdict = verify(tmp_path / "run", progress=meanwhile)
    assert (verdict.whole, verdict.records, verdict.state) == (True, 3, "live")
    assert seen == sorted(seen)
    assert seen[-1] == 1
    writer.close()


def test_no_run_and_a_newer_run_are_no_damage(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError):
        verify(tmp_path / "nothing")
    change_json(run, "head", min_reader=99)
    with pytest.raises(FormatError):
        verify(run)


def test_checking_changes_nothing(run: Path) -> None:
    before = contents(run)
    assert isinstance(verify(run), Verdict)
    assert contents(run) == before


def contents(folder: Path) -> dict[str, bytes]:
    """Returns every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
