"""While a run is recorded, the files of its commits are merged, and nobody who reads it notices."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comgra_decl.errors import UnknownNameError
from comgra_decl.records import ScalarBatch
from comgra_decl.store import Reader, RunWriter, index, merging
from comgra_decl.store.appending import append_to
from comgra_decl.store.compaction import compact
from comgra_decl.store.copying import copy_run, pinned
from comgra_decl.store.index import Part, Search, answer_to, part_of, question_of
from comgra_decl.store.verify import verify
from tests.store import kills
from tests.store.test_verify import files_of
from tests.store.truth import Truth, meta_of

FAN = 4


class Here:
    """A search in this process, which is faster; some tests start the real one."""

    def __init__(self, question: dict[str, Any]) -> None:
        try:
            self._answer = answer_to(question)
        except ValueError as error:  # the process would fail
            raise OSError(str(error)) from error

    def ended(self, *, wait: bool) -> bool:
        return True

    def found(self) -> Part:
        return part_of(self._answer)

    def stop(self) -> None:
        pass


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges four files at a time, so that a short run has files of several tiers."""
    monkeypatch.setattr(merging, "FAN", FAN)
    monkeypatch.setattr(merging, "Search", Here)


def merged(writer: RunWriter) -> int:
    """Merges what there is to merge; returns the number of parts it took."""
    parts = 0
    while writer.merge_files(wait=True):
        parts += 1
    return parts


def data_files(run: Path) -> set[str]:
    return {path.name for path in (run / "trace.ocdbt" / "d").iterdir()}


def most_files(commits: int) -> int:
    """The bound in docs/scale.md: of each tier, those to remove, and lists of old versions."""
    tiers = 1 + math.ceil(math.log(max(2, commits), FAN))
    return FAN * (tiers + 2) + tiers


def record(writer: RunWriter, truth: Truth, commits: int) -> int:
    """Makes commits and merges after each; returns the largest number of files there was."""
    most = 0
    for number in range(commits):
        value = truth.rng.normal(size=(2, 5)).astype("float32")
        batch = truth.batch(1 + number % 3, range(5), values={1: value} if number % 7 == 0 else {})
        steps, values = np.array([number]), np.array([1.5])
        said = ScalarBatch(steps=steps, names=["loss"], types=["train"], values=values)
        writer.commit([batch], [said])
        truth.keep([batch])
        merged(writer)
        most = max(most, len(data_files(Path(writer._db.path).parent)))
    return most


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Truth]]:
    path, truth = tmp_path_factory.mktemp("merging") / "run", Truth()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(merging, "FAN", FAN)
        patched.setattr(merging, "Search", Here)
        writer = RunWriter.create(path, truth.meta)
        record(writer, truth, 120)
        yield path, truth
        writer.close()


def test_a_run_has_few_files_while_it_is_recorded(tmp_path: Path) -> None:
    counts = {}
    for commits in (20, 80):
        truth = Truth()
        writer = RunWriter.create(tmp_path / str(commits), truth.meta)
        counts[commits] = record(writer, truth, commits)
        assert counts[commits] <= most_files(commits)
        truth.check(Reader(tmp_path / str(commits)).view)
        writer.close()
    assert counts[80] < 2 * counts[20], "more than the commits of a tier were merged"


@pytest.mark.slow
def test_a_long_run_has_few_files_while_it_is_recorded(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    assert record(writer, truth, 1100) <= most_files(1100) < 1100 / 20
    truth.check(Reader(tmp_path / "run").view)
    assert verify(tmp_path / "run").whole


def test_a_run_is_whole_after_merging(recorded: tuple[Path, Truth]) -> None:
    path, truth = recorded
    assert verify(path).whole
    reader = Reader(path)
    truth.check(reader.view)
    assert reader.view.scalars["value"].tolist() == [1.5] * 120


def test_an_open_view_can_still_be_read_after_its_files_are_gone(tmp_path: Path) -> None:
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    record(writer, truth, 10)
    count = len(truth.infos)
    view = Reader(run).view
    before = data_files(run)
    record(writer, truth, 60)
    assert not before & data_files(run), "every file of that time was removed"
    truth.check(view, count)
    assert not view.damage


def test_an_old_version_that_is_being_read_keeps_its_files(tmp_path: Path) -> None:
    """As of a copy or a verification that takes long."""
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    record(writer, truth, 10)
    count, old, there = len(truth.infos), pinned(run), data_files(run)
    record(writer, truth, 40)
    assert there <= data_files(run)
    truth.check(old.view, count)
    del old
    record(writer, truth, 40)
    assert not there & data_files(run)


def test_a_run_can_be_copied_and_compacted_after_merging(
    recorded: tuple[Path, Truth], tmp_path: Path
) -> None:
    path, truth = recorded
    copy = copy_run(path, tmp_path / "copy")
    truth.check(Reader(copy).view)
    small = copy_run(path, tmp_path / "small", compact=True)
    truth.check(Reader(small).view)
    same = Path(shutil.copytree(path, tmp_path / "same"))
    (same / "last_seen.json").unlink(missing_ok=True)
    compact(same)
    truth.check(Reader(same).view)
    assert verify(same).whole


def test_a_resumed_run_is_merged_on(tmp_path: Path) -> None:
    truth, run = Truth(), tmp_path / "run"
    for _ in range(3):
        if run.exists():
            writer, _ = append_to(run, meta_of())
        else:
            writer = RunWriter.create(run, truth.meta)
        record(writer, truth, 21)
        merged(writer)
        writer.close()
    assert len(data_files(run)) <= most_files(3 * 22)
    truth.check(Reader(run).view)
    assert verify(run).whole


@pytest.mark.slow
def test_a_run_with_many_files_has_few_after_it_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    monkeypatch.setattr(merging, "FAN", 10_000)
    record(writer, truth, 200)
    writer.close()
    assert len(data_files(run)) > 200
    monkeypatch.setattr(merging, "FAN", FAN)
    writer, _ = append_to(run, meta_of())
    record(writer, truth, 3 * FAN)
    assert len(data_files(run)) <= most_files(200)
    truth.check(Reader(run).view)


def test_the_end_of_a_run_removes_what_is_no_longer_needed(tmp_path: Path) -> None:
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    record(writer, truth, 3 * FAN)
    retired = {name for _, names in noted(run).retired for name in names}
    assert retired <= data_files(run)
    assert len(retired) >= FAN
    writer.close()
    assert not retired & data_files(run)
    assert verify(run).whole
    truth.check(Reader(run).view)


def noted(run: Path) -> merging._Noted:
    return merging._read_noted(Reader(run).database)


def test_files_that_are_large_enough_are_not_merged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "PART_BYTES", 10_000)
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    record(writer, truth, 60)
    complete = [name for name, tier in writer._merger._noted.tiers.items() if tier == merging._FULL]
    large = set(complete)
    assert large
    record(writer, truth, 60)
    assert large <= data_files(run)
    truth.check(Reader(run).view)


def test_a_damaged_run_is_not_merged(tmp_path: Path) -> None:
    """An older version of it, which is intact, can still be recovered."""
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    record(writer, truth, 2)
    _, first, *_ = sorted(files_of(run), key=lambda path: path.stat().st_mtime_ns)
    first.write_bytes(first.read_bytes()[:50])
    there = data_files(run)
    record(writer, truth, 5 * FAN)
    assert there <= data_files(run)
    assert len(data_files(run)) > 5 * FAN
    verdict = verify(run)
    assert verdict.damages
    assert verdict.whole_version


@pytest.mark.parametrize("lost", [1, 3])
def test_the_newest_intact_version_is_found_although_old_ones_are_gone(
    tmp_path: Path, lost: int
) -> None:
    """As after a power failure, when the newest files are empty."""
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    counts = []
    for _ in range(50):
        record(writer, truth, 1)
        counts.append(len(truth.infos))
    while writer._merger._work is not None or writer._merger._commits < FAN - 1:
        record(writer, truth, 1)
        counts.append(len(truth.infos))
    for path in sorted(files_of(run), key=lambda path: path.stat().st_mtime_ns)[-lost:]:
        path.write_bytes(b"")
    verdict = verify(run)
    assert verdict.damages
    assert verdict.whole_records == counts[-1 - lost]
    copy = copy_run(run, tmp_path / "copy", version=verdict.whole_version)
    truth.check(Reader(copy).view, verdict.whole_records)
    with pytest.raises(UnknownNameError, match=r"has no version 9.*merging files and compaction"):
        copy_run(run, tmp_path / "old", version=9)


def question(run: Path, **options: Any) -> dict[str, Any]:
    files = {f"d/{name}" for name in data_files(run)}
    return question_of(run / "trace.ocdbt", old=files, keys=10**6, size=10**12, **options)


def test_a_search_finds_every_key_whose_value_is_in_a_file(tmp_path: Path) -> None:
    """Small values are in the index itself, and go with its nodes."""
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    batch = truth.batch(3, range(5), values={1: np.zeros((2, 500), np.float32)})
    writer.commit([batch])
    database = Reader(run).database
    large = {key for key in database.keys("", "\x7f") if len(database.read_bytes(key) or b"") > 100}
    found = {key.decode() for key in part_of(answer_to(question(run))).keys}
    assert large <= found
    assert len(large) > 5


def test_a_search_of_a_part_goes_on_where_the_last_one_ended(
    recorded: tuple[Path, Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is searched by a process of its own."""
    run = recorded[0]
    whole = part_of(answer_to(question(run)))
    monkeypatch.setattr(index, "MOST_NODES", 5)
    keys: list[bytes] = []
    after: bytes | None = b""
    parts = 0
    while after is not None:
        asked = question(run, after=after)
        search = Search(asked) if not parts else Here(asked)
        part = search.found()
        keys, after, parts = [*keys, *part.keys], part.after, parts + 1
    assert keys == whole.keys
    assert parts > 3


def test_a_commit_does_not_wait_for_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []

    class Endless(Here):
        def ended(self, *, wait: bool) -> bool:
            return False

        def stop(self) -> None:
            ends.append(self)

    monkeypatch.setattr(merging, "Search", Endless)
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    for _ in range(4 * FAN):
        batch = truth.batch(1, range(5))
        writer.commit([batch])
        truth.keep([batch])
        assert not writer.merge_files()
    assert not ends
    writer.close()
    assert len(ends) == 1, "the process would go on after the end of the run"
    truth.check(Reader(run).view)


@pytest.mark.parametrize("failure", ["frozen", "missing", "no answer"])
def test_a_run_is_recorded_on_if_its_files_cannot_be_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """As in a program that contains Python: its own file must not be started again."""
    monkeypatch.setattr(merging, "Search", Search)
    if failure == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    elif failure == "missing":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    else:
        monkeypatch.setattr(index, "__file__", str(tmp_path / "missing.py"))
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    record(writer, truth, 2 * FAN)
    assert len(data_files(run)) >= 2 * FAN
    truth.check(Reader(run).view)


class Killed(BaseException):
    """A stand-in for a process that ends here."""


@pytest.mark.parametrize("moment", range(1, 12))
def test_a_writer_may_be_killed_before_every_change_of_a_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Before each part, before the list of files, before each removal."""
    truth, run = Truth(), tmp_path / "run"
    writer = RunWriter.create(run, truth.meta)
    monkeypatch.setattr(merging, "_PART_KEYS", 20)
    seen = [0]

    def dying(call: object) -> object:
        def counted(*arguments: object, **options: object) -> object:
            seen[0] += 1
            if seen[0] == moment * 3:
                raise Killed
            return call(*arguments, **options)  # type: ignore[operator]

        return counted

    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "_write_again", dying(RunWriter._write_again))
        patched.setattr(merging.Merger, "_remove", dying(merging.Merger._remove))
        with pytest.raises(Killed):
            record(writer, truth, 60)
    assert verify(run).whole
    writer.release()
    del writer
    view = Reader(run).view
    assert view.n == len(truth.infos)
    truth.check(view)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_writer_that_merges_may_be_killed_while_others_read(tmp_path: Path, seed: int) -> None:
    """No acknowledged record is lost, and no reader misses a file."""
    records, polls, acknowledged = kills.kill_once(tmp_path / "run ä", seed, merging=True)
    assert records >= acknowledged > 0
    assert polls
    assert verify(tmp_path / "run ä").whole
