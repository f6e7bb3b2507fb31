"""Joined statistics on disk are those that joining the ranks gives, or they are not used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError, StoreError
from comgra_decl.query import Run, open_run
from comgra_decl.query.ranks.member import Member
from comgra_decl.query.ranks.reader import JoinedReader
from comgra_decl.store import RunWriter, appending
from comgra_decl.store.compaction import compact
from comgra_decl.store.copying import copy_run, databases
from tests.cli.test_exit_codes import code
from tests.store.test_damage import overwrite
from tests.store.truth import Truth, meta_of
from tests.support.shortened import shortened

SLOTS = 7


def write(folder: Path, seed: int, *, ranks: int = 3, records: int = 300) -> Path:
    """Ranks with slots and records that some of them lack, and evaluations."""
    rng = np.random.default_rng(seed)
    for rank in range(ranks):
        facts = {"run": "x", "world_size": ranks, "recorded": list(range(ranks)), "rank": rank}
        truth = Truth(seed=seed + rank, meta=meta_of(started=1.0, facts={"ranks": facts}))
        writer = RunWriter.create(folder / "ranks" / str(rank) if rank else folder, truth.meta)
        for first in range(0, records, 20):
            type_ = "eval" if first % 100 == 60 else "train"
            chosen = rng.permutation(SLOTS)[: rng.integers(1, SLOTS)]
            batch = truth.batch(20, sorted(chosen.tolist()), type_=type_)
            truth.infos += batch.steps
            if rng.random() < 0.9:
                writer.commit([batch])
            else:  # the records are missing on this rank, but their slots are not
                truth.announced -= {slot.id for slot in batch.new_slots}
        writer.close()
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("joined") / "run", 3)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


@contextmanager
def ranks_unread() -> Iterator[None]:
    """Fail if the statistics of a rank are read."""

    def refuse(*_: object) -> None:
        raise AssertionError("the ranks were joined")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Member, "tile", refuse)
        patch.setattr(Member, "series", refuse)
        yield


def numbers(run: Run) -> dict[str, NDArray[Any]]:
    """Return everything that joined statistics serve."""
    found: dict[str, NDArray[Any]] = {}
    for over_batch in ("mean", "std", "abs_max"):
        for statistic in run.statistics:
            for type_ in (None, "eval"):
                key = f"{statistic} {over_batch} {type_}"
                heat = run.heat(statistic, over_batch=over_batch, type=type_)
                found[key] = heat.to_numpy()
                slot = run.slot(run.nodes[-1])
                series = slot.series(statistic, over_batch=over_batch, type=type_)
                extremes = slot.extremes(statistic, over_batch=over_batch, type=type_)
                found |= {f"{key} series": series.to_numpy(), f"{key} pairs": extremes.to_numpy()}
    return found


def assert_same(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> None:
    assert one.keys() == other.keys()
    for key, values in one.items():
        np.testing.assert_array_equal(values, other[key], err_msg=key)


@pytest.mark.parametrize("seed", shortened(range(4), tried=1))
def test_joined_statistics_are_those_of_joining_the_ranks(tmp_path: Path, seed: int) -> None:
    folder = write(tmp_path / "run", seed, ranks=2 + seed % 3, records=200 + 80 * seed)
    before = numbers(open_run(folder))
    JoinedReader(folder).join()
    with ranks_unread():
        after = numbers(open_run(folder))
    assert_same(before, after)


def test_everything_else_still_comes_from_the_ranks(folder: Path) -> None:
    before = open_run(folder)
    JoinedReader(folder).join()
    after = open_run(folder)
    step = int(before.steps[0])
    assert before.row(step).equals(after.row(step))
    assert before.samples(step).equals(after.samples(step))
    assert after.ranks == [0, 1, 2]
    assert after.rank(1).heat("std").equals(before.rank(1).heat("std"))


def test_a_copy_and_a_compacted_run_keep_them(folder: Path, tmp_path: Path) -> None:
    before = numbers(open_run(folder))
    JoinedReader(folder).join()
    copy_run(folder, tmp_path / "copy")
    for part in databases(folder):
        compact(part)
    for run in (folder, tmp_path / "copy"):
        with ranks_unread():
            assert_same(before, numbers(open_run(run)))


@pytest.mark.slow
def test_damaged_statistics_are_joined_again(folder: Path) -> None:
    before = numbers(open_run(folder))
    joined = JoinedReader(folder).join()
    overwrite(joined, "agg/blk/c/0/0/0", b"garbage")
    run = open_run(folder)
    assert_same(before, numbers(run))
    assert run.damage == []


@pytest.mark.slow
def test_statistics_of_an_earlier_state_are_not_used(folder: Path) -> None:
    joined = JoinedReader(folder).join()
    for rank in range(3):
        facts = {"run": "x", "world_size": 3, "recorded": [0, 1, 2], "rank": rank}
        truth = Truth(seed=9, meta=meta_of(started=1.0, facts={"ranks": facts}))
        place = folder / "ranks" / str(rank) if rank else folder
        writer, past = appending.append_to(place, truth.meta)
        truth.announced = {slot.id for slot in past.slots}
        writer.commit([truth.batch(5, [past.slots[0].id])])
        writer.close()
    stale = numbers(open_run(folder))
    shutil.rmtree(joined)
    assert_same(numbers(open_run(folder)), stale)


def test_a_damaged_rank_is_not_joined(folder: Path) -> None:
    overwrite(folder / "ranks" / "1", "agg/blk/c/0/0/0", b"garbage")
    overwrite(folder / "ranks" / "1", "agg/row/c/30/0/0", b"garbage")
    with pytest.raises(DamagedRunError, match="Nothing was joined"):
        JoinedReader(folder).join()
    assert not (folder / "ranks" / "joined").exists()


def test_a_run_that_lacks_a_rank_is_not_joined(folder: Path) -> None:
    shutil.rmtree(folder / "ranks" / "2")
    with pytest.raises(StoreError, match="lacks the data of rank 2"):
        JoinedReader(folder).join()


def test_the_command_joins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = numbers(open_run(folder))
    for _ in range(2):  # the second time replaces the first
        assert code("compact", str(folder), "--join", "--json") == 0
        told = json.loads(capsys.readouterr().out)
    assert told["joined"] == str(folder / "ranks" / "joined")
    with ranks_unread():
        assert_same(before, numbers(open_run(folder)))


def test_a_run_of_one_process_has_nothing_to_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    writer.commit([truth.batch(5, [0])])
    writer.close()
    assert code("compact", str(tmp_path / "run"), "--join") == 2
    assert "recorded by one process" in capsys.readouterr().err
