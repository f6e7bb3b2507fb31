"""A damaged run is reported as such: which key, and why."""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.errors import (
    DamagedRunError,
    FormatError,
    RunNotFoundError,
    UnwrittenRunError,
)
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.commit import Commit
from comgra_decl.store.database import Database, encode, new_context, newest_version
from tests.store.truth import Truth, meta_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with two blocks, some rows and a step log without a graph."""
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    for size in (1, 1023, 20):
        writer.commit([truth.batch(size, range(4))])
    writer.close()
    return tmp_path / "run"


def read_everything(run: Path) -> None:
    view = Reader(run).view
    for family in ("agg", "smp", "hist"):
        view.heat(family)
        for record in range(view.n):
            view.row(family, record)
    for record in range(view.n):
        view.check_json_facts(record)


def overwrite(run: Path, key: str, value: bytes | None) -> None:
    """Changes a key as a writer would: the head states its version."""
    database = Database(run, new_context(cache_bytes=0))
    commit = Commit(database)
    commit._futures.append(commit._kv.write(key, value))
    if key != "head" and (head := database.read_bytes("head")):
        said = json.loads(head.rpartition(b"\n")[0])
        said["generation"] = (newest_version(run) or 1) + 1
        commit.put_json("head", said)
    commit.finish()


def change_json(run: Path, key: str, **changes: Any) -> None:
    found = Database(run, new_context(cache_bytes=0)).read_json(key)
    if key == "head":
        found["generation"] = (newest_version(run) or 1) + 1
    overwrite(run, key, encode({**found, **changes}, key))


def sealed(text: bytes, key: str) -> bytes:
    """Returns a key's value with a correct checksum, whatever the content."""
    return text + b"\n%08x" % zlib.crc32(text, zlib.crc32(key.encode()))


def test_the_undamaged_run_reads(run: Path) -> None:
    read_everything(run)


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="no run in"):
        Reader(tmp_path / "nothing")


def test_a_newer_format_is_refused(run: Path) -> None:
    change_json(run, "meta/run.json", version=9, min_reader=9)
    with pytest.raises(FormatError, match=r"version 9.*Upgrade comgra-decl"):
        Reader(run)


def test_an_older_format_is_refused(run: Path) -> None:
    change_json(run, "meta/run.json", version=1, min_reader=1)
    with pytest.raises(FormatError, match=r"version 1;.*Open it with the version that wrote it"):
        Reader(run)


def test_a_newer_head_is_refused(run: Path) -> None:
    change_json(run, "head", min_reader=9)
    with pytest.raises(FormatError, match="Upgrade"):
        Reader(run)


def test_unknown_members_are_no_problem(run: Path) -> None:
    change_json(run, "meta/run.json", version=99, later_addition=[1, 2])
    read_everything(run)


def test_something_else_in_the_place_of_a_run(run: Path) -> None:
    overwrite(run, "meta/run.json", encode({"format": "holiday-pictures"}, "meta/run.json"))
    with pytest.raises(DamagedRunError, match=r"meta/run.json"):
        Reader(run)


@pytest.mark.parametrize("manifest", [b"", b"no manifest at all"])
def test_a_damaged_manifest_is_named(run: Path, manifest: bytes) -> None:
    (run / "trace.ocdbt" / "manifest.ocdbt").write_bytes(manifest)
    with pytest.raises(DamagedRunError, match=r"manifest\.ocdbt"):
        Reader(run)


def test_a_missing_manifest_is_named(run: Path) -> None:
    (run / "trace.ocdbt" / "manifest.ocdbt").unlink()
    age(run)
    with pytest.raises(DamagedRunError, match=r"'manifest\.ocdbt' is missing"):
        Reader(run)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_run_killed_before_its_first_commit_is_told(tmp_path: Path, manifest: bool) -> None:
    run = tmp_path / "run"
    (run / "trace.ocdbt").mkdir(parents=True)
    if manifest:
        overwrite(run, "any", b"1")
        os.utime(run / "trace.ocdbt" / "manifest.ocdbt", (1e9, 1e9))
    age(run)
    with pytest.raises(UnwrittenRunError, match=r"nothing was written.*can be deleted"):
        Reader(run)


def test_a_run_without_its_data_files(run: Path) -> None:
    shutil.rmtree(run / "trace.ocdbt" / "d")
    with pytest.raises(DamagedRunError, match=r"meta/run\.json|manifest"):
        Reader(run)


@pytest.mark.parametrize("key", ["steps/000000000000.json", "slots/000000000000.json"])
def test_a_missing_or_broken_key_is_named(run: Path, key: str) -> None:
    overwrite(run, key, b"[1, 2")
    with pytest.raises(DamagedRunError, match=key):
        read_everything(run)
    overwrite(run, key, None)
    with pytest.raises(DamagedRunError, match=rf"'{key}' is missing"):
        read_everything(run)


def test_deep_json_does_not_take_the_reader_down(run: Path) -> None:
    overwrite(run, "slots/000000000000.json", sealed(b"[" * 100_000, "slots/000000000000.json"))
    with pytest.raises(DamagedRunError, match="slots/"):
        read_everything(run)


def test_a_replaced_run_is_noticed_by_an_open_reader(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunWriter.create(run, meta_of())
    reader = Reader(run)
    shutil.rmtree(run)
    with pytest.raises(DamagedRunError):
        reader.poll()
    truth = Truth()
    writer = RunWriter.create(run, truth.meta)
    batch = truth.batch(2, [0])
    writer.commit([batch])
    truth.keep([batch])
    with pytest.raises(DamagedRunError):
        reader.poll()
    truth.check(Reader(run).view)


def age(run: Path) -> None:
    """Makes the database look as if it had not been touched for a minute."""
    then = time.time() - 60
    os.utime(run / "trace.ocdbt", (then, then))
