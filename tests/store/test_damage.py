"""A damaged run is told as such: which key, and why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.errors import DamagedRunError, FormatError, RunNotFoundError
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.commit import Commit
from comgra_decl.store.database import Database, new_context
from tests.store.truth import Truth, meta_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with two blocks, some rows and a graph-less step log."""
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    for size in (1, 255, 20):
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
        view.samples(record)


def overwrite(run: Path, key: str, value: bytes | None) -> None:
    commit = Commit(Database(run, new_context(cache_bytes=0)))
    commit._futures.append(commit._kv.write(key, value))
    commit.finish()


def change_json(run: Path, key: str, **changes: Any) -> None:
    found = Database(run, new_context(cache_bytes=0)).read_json(key)
    overwrite(run, key, json.dumps({**found, **changes}).encode())


def test_the_undamaged_run_reads(run: Path) -> None:
    read_everything(run)


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="no run in"):
        Reader(tmp_path / "nothing")


def test_a_newer_format_is_refused(run: Path) -> None:
    change_json(run, "meta/run.json", version=9, min_reader=9)
    with pytest.raises(FormatError, match=r"version 9.*Upgrade comgra-decl"):
        Reader(run)


def test_a_newer_head_is_refused(run: Path) -> None:
    change_json(run, "head", min_reader=9)
    with pytest.raises(FormatError, match="Upgrade"):
        Reader(run)


def test_unknown_members_are_no_problem(run: Path) -> None:
    change_json(run, "meta/run.json", version=1, later_addition=[1, 2])
    read_everything(run)


def test_something_else_in_the_place_of_a_run(run: Path) -> None:
    overwrite(run, "meta/run.json", b'{"format": "holiday-pictures"}')
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
    overwrite(run, "slots/000000000000.json", b"[" * 100_000)
    with pytest.raises(DamagedRunError, match="slots/"):
        read_everything(run)


def test_a_missing_chunk_is_an_error_and_not_nan(run: Path) -> None:
    overwrite(run, "agg/blk/c/1/0/3", None)
    view = Reader(run).view
    with pytest.raises(DamagedRunError, match=r"agg/blk.*missing"):
        view.series("agg", 0, 3)
    view.series("agg", 0, 2)


def test_every_flipped_bit_is_noticed(run: Path) -> None:
    """Flips bits all over the data files: no read may give other numbers without an error."""
    files = sorted((run / "trace.ocdbt" / "d").iterdir(), key=lambda file: file.stat().st_size)
    largest = files[-1]
    whole = largest.read_bytes()
    noticed = 0
    for place in range(100, len(whole) - 100, len(whole) // 12):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        largest.write_bytes(damaged)
        noticed += told(run)
    largest.write_bytes(whole)
    assert noticed >= 10  # a few places hold what this reader never asks for


def told(run: Path) -> bool:
    """Whether reading everything, in a fresh process, ends in a DamagedRunError."""
    import subprocess
    import sys

    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from comgra_decl.errors import DamagedRunError\n"
        "from tests.store.test_damage import read_everything\n"
        "try: read_everything(Path(sys.argv[1]))\n"
        "except DamagedRunError: sys.exit(3)\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code, str(run), root], check=False)
    assert done.returncode in (0, 3)
    return done.returncode == 3


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_truncated_data_file_is_noticed(run: Path, keep: float) -> None:
    files = sorted((run / "trace.ocdbt" / "d").iterdir(), key=lambda file: file.stat().st_size)
    whole = files[-1].read_bytes()
    files[-1].write_bytes(whole[: int(len(whole) * keep)])
    assert told(run)


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
    import os
    import time

    then = time.time() - 60
    os.utime(run / "trace.ocdbt", (then, then))
