"""A compacted run has the same numbers in fewer bytes, whenever the compaction is killed."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comgra_decl.errors import DamagedRunError, StoreError
from comgra_decl.records import ScalarBatch
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.compaction import compact
from comgra_decl.store.copying import copy_run
from comgra_decl.store.layout import RecordColumn
from comgra_decl.store.verify import verify
from tests.store.test_damage import change_json
from tests.store.test_verify import contents, files_of
from tests.store.truth import Truth, meta_of
from tests.support.forked import Program

RECORDS = 1100
SLOTS = 8


class Killed(BaseException):
    """A stand-in for a process that ends here."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    """1100 records in small commits, values in a few of them, and 3000 logged metrics."""
    truth = Truth()
    path = tmp_path_factory.mktemp("compaction") / "run"
    writer = RunWriter.create(path, truth.meta)
    for number in range(RECORDS // 20):
        value = truth.rng.normal(size=(2, 5)).astype("float32")
        batch = truth.batch(20, range(SLOTS), values={1: value} if number % 7 == 0 else {})
        steps = np.arange(60) + 60 * number
        said = ScalarBatch(
            steps=steps, names=["loss"] * 60, types=["train"] * 60, values=np.sqrt(steps)
        )
        writer.commit([batch], [said])
        truth.keep([batch])
    writer.close()
    return path, truth


@pytest.fixture
def run(written: tuple[Path, Truth], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written[0], tmp_path / "run"))


def test_every_number_is_the_same_before_and_after(run: Path, written: tuple[Path, Truth]) -> None:
    before = Reader(written[0]).view
    result = compact(run)
    after = Reader(run).view
    written[1].check(after)
    assert after.scalars.tobytes() == before.scalars.tobytes()
    ours = [column for column in RecordColumn if column != RecordColumn.FORM]
    assert np.array_equal(after.records[:, ours], before.records[:, ours])
    assert verify(run).whole
    assert result.files_after < 8 < result.files_before
    assert result.bytes_after < 0.6 * result.bytes_before
    assert result.bytes_after == sum(len(content) for content in contents(run).values())


@pytest.mark.slow
def test_a_long_run_takes_hardly_more_than_its_statistics(tmp_path: Path) -> None:
    """At most 1.2 times the raw bytes of random numbers, which cannot be compressed."""
    truth = Truth(meta=meta_of(sample_count=0, bins=None, statistics=tuple("abcdefghij")))
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    for _ in range(128):
        writer.commit([truth.batch(8, range(64))])
    writer.close()
    raw = 1024 * 64 * len(truth.meta.columns) * 4
    before = sum(len(content) for content in contents(tmp_path / "run").values())
    after = compact(tmp_path / "run").bytes_after
    assert after <= 1.2 * raw
    assert after < 0.65 * before


def test_compacting_again_changes_nothing_to_speak_of(run: Path) -> None:
    once = compact(run)
    again = compact(run)
    assert again.bytes_before == once.bytes_after
    assert abs(again.bytes_after - again.bytes_before) < 1000


@pytest.mark.slow
def test_who_has_it_open_goes_on_after_a_refresh(run: Path, written: tuple[Path, Truth]) -> None:
    reader = Reader(run)
    reader.view.row("agg", 3)
    compact(run)
    assert reader.poll()
    written[1].check(reader.view)


def test_a_run_that_is_being_recorded_is_refused(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    for _ in range(2):
        before = contents(tmp_path / "run")
        with pytest.raises(StoreError, match=r"still being recorded.*cp --compact"):
            compact(tmp_path / "run")
        assert contents(tmp_path / "run") == before
        writer.commit([truth.batch(3, range(2))])
    writer.close()
    compact(tmp_path / "run")


def test_a_run_that_is_being_compacted_is_refused(run: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    handle = os.open(run / "trace.ocdbt", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(StoreError, match="already being compacted"):
            compact(run)
    finally:
        os.close(handle)
    compact(run)


def damage(run: Path, key: str) -> None:
    """Flips a bit of a key's value."""
    value = Reader(run).database.read_bytes(key)
    assert value
    (path,) = [path for path in files_of(run) if value in path.read_bytes()]
    content = bytearray(path.read_bytes())
    content[content.index(value) + len(value) // 2] ^= 8
    path.write_bytes(content)


@pytest.mark.slow
def test_a_damaged_run_stays_as_it_is(run: Path) -> None:
    damage(run, "agg/blk/c/1/0/2")
    (found,) = verify(run).damages
    assert found.where == "agg/blk"
    assert found.lost.endswith("single steps are intact")
    before = contents(run)
    with pytest.raises(DamagedRunError, match=r"damaged at 'agg/blk'.*nothing was changed"):
        compact(run)
    assert contents(run) == before


@pytest.mark.slow
def test_damage_of_what_is_there_twice_is_healed(run: Path, written: tuple[Path, Truth]) -> None:
    damage(run, "agg/row/c/77/0/0")
    (found,) = verify(run).damages
    assert (found.where, found.records) == ("agg/row", (77, 77))
    assert found.lost.endswith("curves over steps are intact")
    compact(run)
    assert verify(run).whole
    written[1].check(Reader(run).view)


def test_a_run_that_goes_on_meanwhile_stays_as_it_is(run: Path) -> None:
    def meanwhile(what: str, done: int, total: int) -> None:
        if what == "checking" and done == total:
            change_json(run, "head", time=1.0)

    with pytest.raises(StoreError, match="changed in the meantime"):
        compact(run, progress=meanwhile)
    assert verify(run).whole


def moments(monkeypatch: pytest.MonkeyPatch, die_at: int) -> Iterator[int]:
    """Makes the process die before its n-th rename; yields how many there were."""
    seen = [0]

    def dying(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if seen[0] == die_at:
                raise Killed
            seen[0] += 1
            return method(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for name in ("replace", "unlink"):
            patched.setattr(Path, name, dying(getattr(Path, name)))
        yield seen[0]


@pytest.mark.slow
def test_it_may_be_killed_before_any_change_of_a_name(
    run: Path, written: tuple[Path, Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving the data files and the manifest, and removing leftovers."""
    killed = 0
    for die_at in [0, 1, 2, 3, 30]:
        copy = Path(shutil.copytree(run, run.parent / f"killed {die_at}"))
        for _ in moments(monkeypatch, die_at):
            try:
                compact(copy)
            except Killed:
                killed += 1
        assert verify(copy).whole, die_at
        written[1].check(Reader(copy).view)
        compact(copy)
        assert not (copy / ".compacting").exists()
        assert len(files_of(copy)) < 6, "nothing of the first try is left"
        assert verify(copy).whole
    assert killed == 5


CHILD = """
import sys
from comgra_decl.store.compaction import compact
print("ready", flush=True)
compact(sys.argv[1])
print("done", flush=True)
"""


@pytest.mark.parametrize("attempts", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_it_may_be_killed_at_any_moment(
    run: Path, written: tuple[Path, Truth], attempts: int
) -> None:
    rng, killed = random.Random(1), 0
    for attempt in range(attempts):
        copy = Path(shutil.copytree(run, run.parent / f"kill -9, {attempt}"))
        child = Program(run.parent, "-c", CHILD, copy)
        child.wait_for("ready")
        time.sleep(rng.uniform(0, 0.25))
        child.kill()
        killed += "done" not in child.out.read_text()
        assert verify(copy).whole
        assert Reader(copy).view.n == RECORDS
        compact(copy)
    written[1].check(Reader(copy).view)
    assert killed or attempts == 1


def test_copies_may_leave_out_what_is_there_twice(
    run: Path, written: tuple[Path, Truth], tmp_path: Path
) -> None:
    copy = copy_run(run, tmp_path / "small", compact=True)
    written[1].check(Reader(copy).view)
    assert verify(copy).whole
    bytes_of = {folder: sum(map(len, contents(folder).values())) for folder in (run, copy)}
    assert bytes_of[copy] < 0.6 * bytes_of[run]
