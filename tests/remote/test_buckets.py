"""A run in a bucket is written, read, resumed, listed, verified and copied like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import comgra_decl as comgra
from comgra_decl.errors import RunNotFoundError, StoreError
from comgra_decl.query import list_runs
from comgra_decl.store import Reader, RunWriter, merging
from comgra_decl.store.appending import append_to
from comgra_decl.store.compaction import compact
from comgra_decl.store.copying import copy_run, pinned
from comgra_decl.store.database import TransientStoreError, new_context, newest_version
from comgra_decl.store.layout import HEAD_KEY
from comgra_decl.store.location import Remote
from comgra_decl.store.remote import Objects
from comgra_decl.store.verify import verify
from tests.remote.server import BUCKET, fake_s3
from tests.store.truth import Truth, meta_of


def write(place: Remote | Path, *, commits: int = 3, close: bool = True) -> Truth:
    """Writes a small run with kept values."""
    truth = Truth()
    writer = RunWriter.create(place, truth.meta)
    for _ in range(commits):
        batch = truth.batch(5, range(3), values={0: np.ones((2, 4))})
        writer.commit([batch])
        truth.keep([batch])
    if close:
        writer.close()
    return truth


def test_what_is_written_is_read_bit_for_bit_while_it_grows(root: Remote) -> None:
    truth = Truth()
    writer = RunWriter.create(str(root), truth.meta)
    reader = Reader(root)
    assert reader.state == "waiting"
    for records in (1, 40, 3):
        batch = truth.batch(records, range(4))
        before = newest_version(root)
        writer.commit([batch])
        assert before is not None
        assert newest_version(root) == before + 1, "one commit is one version: it is atomic"
        truth.keep([batch])
        assert reader.poll()
        truth.check(reader.view)
        assert reader.state == "live"
    assert not reader.poll()
    writer.close()
    assert Reader(str(root)).state == "finished"


def test_objects_are_not_merged(root: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of an old version could not keep them."""
    monkeypatch.setattr(merging, "FAN", 2)
    writer = RunWriter.create(root, meta_of())
    truth = Truth()
    for count in range(1, 7):
        writer.commit([truth.batch(1, range(3))])
        assert not writer.merge_files(wait=True)
        assert len(Objects(root).names()) > count


def test_one_run_has_one_writer(root: Remote) -> None:
    truth = write(root, close=False)
    with pytest.raises(StoreError, match="already contains a run"):
        RunWriter.create(root, meta_of())
    with pytest.raises(StoreError, match="still being written, by process"):
        append_to(root, meta_of())
    reader = Reader(root)
    writer = RunWriter.resume(reader, meta_of())
    with pytest.raises(StoreError, match="another writer has changed this run"):
        RunWriter.resume(reader, meta_of())
    batch = truth.batch(2, range(3))
    writer.commit([batch])
    truth.keep([batch])
    truth.check(Reader(root).view)


def test_a_run_is_gone_on_with(root: Remote) -> None:
    truth = write(root)
    writer, past = append_to(root, meta_of())
    assert past.step == truth.infos[-1].step
    batch = truth.batch(7, range(3))
    writer.commit([batch])
    truth.keep([batch])
    writer.close()
    reader = Reader(root)
    truth.check(reader.view)
    assert len(reader.head["sessions"]) == 1


def test_runs_are_found_by_root_group_and_name(root: Remote) -> None:
    for name in ("train/first", "train/second", "other/one", "a/b/c/d/deep"):
        write(root / name, commits=1)
    found = {(run.group, run.name, run.state) for run in list_runs(str(root))}
    assert found == {
        ("train", "first", "finished"),
        ("train", "second", "finished"),
        ("other", "one", "finished"),
        ("d", "deep", "finished"),
    }
    run = comgra.open_run(f"{root}/train/first")
    assert (run.name, run.group, str(run.path)) == ("first", "train", f"{root}/train/first")
    assert comgra.open_run(root / "train").name == "second", "the newest one"
    assert comgra.open_run(root / "train" / "first" / "trace.ocdbt").name == "first"
    group = comgra.open_group(f"{root}/train/")
    assert group.names == ["first", "second"]
    assert [len(run.records) for run in group] == [5, 5]
    assert repr(run) == f"<Run '{root}/train/first': finished, 5 records>"


def test_nothing_there_is_told(root: Remote) -> None:
    assert list_runs(root) == []
    with pytest.raises(RunNotFoundError, match=r"there is no run in 's3://"):
        comgra.open_run(root)
    with pytest.raises(RunNotFoundError, match="there is no run in"):
        Reader(root)
    with pytest.raises(RunNotFoundError, match="there is no run in"):
        copy_run(root, root / "copy")


@pytest.mark.slow
def test_a_bucket_out_of_reach_is_no_damage_and_no_empty_list() -> None:
    nowhere = Remote("s3", "a-bucket", "runs")  # see `environment`: nothing listens
    for call in (list_runs, comgra.open_run, comgra.open_group, verify):
        with pytest.raises(StoreError, match=r"s3://a-bucket/runs.*retry attempts failed"):
            call(nowhere)


def test_what_cannot_be_read_for_now_is_never_shown_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Remote("s3", BUCKET, "run")
    with fake_s3() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        write(place, commits=1)
        reader = Reader(place, context=new_context(cache_bytes=0))  # which also keeps waits short
        view = reader.view
    for read in (reader.poll, lambda: view.series("agg", 0, 0), lambda: view.row("agg", 0)):
        with pytest.raises(TransientStoreError, match="cannot be read now"):
            read()
    assert view.damage == []


def test_copies_go_from_here_to_there_and_back(root: Remote, tmp_path: Path) -> None:
    truth = write(tmp_path / "run")
    (tmp_path / "run" / "spec.yaml").write_text("nodes: {}\n")
    (tmp_path / "run" / ".hydra").mkdir()
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text("lr: 1\n")
    (tmp_path / "run" / "away").symlink_to("/etc/hostname")
    there = copy_run(tmp_path / "run", f"{root}/there")
    assert str(there) == f"{root}/there"
    truth.check(Reader(there).view)
    assert verify(there).whole
    kept = [name for name in Objects(root / "there").names() if "trace.ocdbt" not in name]
    assert kept == [".hydra/config.yaml", "spec.yaml"]
    small = copy_run(there, root / "small", compact=True)
    truth.check(Reader(small).view)
    back = copy_run(there, tmp_path / "back")
    assert isinstance(back, Path)
    truth.check(Reader(back).view)
    assert (back / ".hydra" / "config.yaml").read_text() == "lr: 1\n"
    heads = [{**Reader(path).head, "generation": 0} for path in (back, tmp_path / "run")]
    assert heads[0] == heads[1]


def test_nothing_is_overwritten(root: Remote, tmp_path: Path) -> None:
    write(root / "run")
    with pytest.raises(StoreError, match="already exists; choose another"):
        copy_run(root / "run", root / "run")
    assert copy_run(root / "run", tmp_path) == tmp_path / "run"
    with pytest.raises(StoreError, match="already exists; choose another"):
        copy_run(root / "run", tmp_path)


def test_a_copy_that_breaks_off_leaves_nothing(
    root: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "run")
    write(root / "copy-of-another", commits=1)
    monkeypatch.setattr("comgra_decl.store.copying.copy_files", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        copy_run(tmp_path / "run", root / "copy")
    assert Objects(root / "copy").names() == []
    assert Reader(root / "copy-of-another").view.n == 5


def test_a_copy_under_way_is_no_run_yet(root: Remote, tmp_path: Path) -> None:
    write(tmp_path / "run")
    seen = []

    def look(*_: object) -> None:
        seen.append(list_runs(root))

    copy_run(tmp_path / "run", root / "copy", progress=look)
    assert seen
    assert not any(seen)


def test_objects_with_names_of_attackers_become_no_files(root: Remote, tmp_path: Path) -> None:
    write(root / "run", commits=1)
    objects = Objects(root / "run")
    for name in ("..\\up", "a\\..\\b", "c:d", "good/one"):
        objects.write(name, b"content")
    copy = copy_run(root / "run", tmp_path / "deep" / "copy")
    assert isinstance(copy, Path)
    beside = {path.name for path in copy.rglob("*") if "trace.ocdbt" not in str(path)}
    assert beside == {"good", "one"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy"]


def test_damage_in_a_bucket_is_found_and_told(root: Remote) -> None:
    write(root, commits=6)
    objects = Objects(root)
    data = [name for name in objects.names() if "/d/" in name]
    version = newest_version(root)
    objects.remove(data[0])
    verdict = verify(root)
    assert not verdict.whole
    assert verdict.version == version
    assert verdict.damages[0].reason


def test_a_version_of_the_past_can_be_read(root: Remote) -> None:
    truth = write(root, commits=2)
    newest = newest_version(root)
    assert newest is not None
    assert pinned(root, newest - 2).view.n == 5
    assert pinned(root).view.n == len(truth.infos)
    assert Reader(root).database.read_bytes(HEAD_KEY)


def test_a_run_in_a_bucket_is_not_compacted_in_place(root: Remote) -> None:
    write(root, commits=1)
    with pytest.raises(StoreError, match=r"comgra-decl cp --compact"):
        compact(root)


def test_ranks_in_a_bucket_are_joined(root: Remote) -> None:
    for rank in range(2):
        facts = {"ranks": {"rank": rank, "world_size": 2, "recorded": [0, 1]}}
        truth = Truth(rank, meta_of(facts=facts))
        place = root if rank == 0 else root / "ranks" / "1"
        writer = RunWriter.create(place, truth.meta)
        writer.commit([truth.batch(3, range(2))])
        writer.close()
    run = comgra.open_run(root)
    assert run.ranks == [0, 1]
    assert len(run.records) == 3
    assert [summary.name for summary in list_runs(root.parent)].count(root.name) == 1
    assert str(run.rank(1).path) == str(root)


def test_that_there_is_no_such_bucket_is_said_before_anything_is_written(
    root: Remote, tmp_path: Path
) -> None:
    nowhere = Remote("s3", "no-such-bucket", root.key)
    with pytest.raises(StoreError, match="no-such-bucket"):
        RunWriter.create(nowhere, meta_of())
    write(tmp_path / "run")
    with pytest.raises(StoreError, match="no-such-bucket"):
        copy_run(tmp_path / "run", nowhere)
