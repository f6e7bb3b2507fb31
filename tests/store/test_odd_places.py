"""Runs in unusual places: behind links, deeply nested, in read-only folders, beside pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from comgra_decl.errors import DamagedRunError, StoreError
from comgra_decl.query import open_run
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.appending import append_to
from comgra_decl.store.compaction import compact
from comgra_decl.store.copying import copy_run
from comgra_decl.store.layout import RecordColumn
from comgra_decl.store.verify import verify
from tests.store.test_verify import contents, files_of
from tests.store.truth import Truth, meta_of

POSIX = pytest.mark.skipif(os.name != "posix", reason="links and named pipes")


def written(run: Path) -> Truth:
    truth = Truth()
    writer = RunWriter.create(run, truth.meta)
    for size in (3, 130, 2):
        batch = truth.batch(size, range(4), values={0: np.ones((2, 3))})
        writer.commit([batch])
        truth.keep([batch])
    writer.close()
    return truth


@POSIX
def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk", target_is_directory=True)
    run = tmp_path / "runs" / "group" / "run"
    truth = written(run)
    truth.check(Reader(run).view)
    assert open_run(tmp_path / "runs").steps.tolist() == open_run(run).steps.tolist()
    assert verify(run).whole
    compact(run)
    truth.check(Reader(tmp_path / "disk" / "group" / "run").view)
    writer, _ = append_to(run, meta_of())
    writer.close()
    truth.check(Reader(copy_run(run, tmp_path / "copy")).view)


def test_a_path_may_be_very_long(tmp_path: Path) -> None:
    run = tmp_path
    while len(str(run)) < 3600:
        run = run / ("Läufe und noch mehr " * 5).strip()
    truth = written(run)
    truth.check(Reader(run).view)
    compact(run)
    assert verify(run).whole
    assert open_run(run).steps.tolist() == Reader(run).view.records[:, RecordColumn.STEP].tolist()


def test_a_path_that_is_too_long_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot create the run's folder"):
        RunWriter.create(tmp_path / ("x" * 300), meta_of())


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[tuple[Path, Truth]]:
    run = tmp_path / "run"
    truth = written(run)
    folders = [run, run / "trace.ocdbt", run / "trace.ocdbt" / "d"]
    for folder in folders:
        folder.chmod(0o555)
    yield run, truth
    for folder in folders:
        folder.chmod(0o755)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_can_be_read(read_only: tuple[Path, Truth]) -> None:
    run, truth = read_only
    before = contents(run)
    truth.check(Reader(run).view)
    assert verify(run).whole
    truth.check(Reader(copy_run(run, run.parent / "copy")).view)
    with pytest.raises(StoreError, match="PERMISSION_DENIED"):
        compact(run)
    with pytest.raises(StoreError, match="PERMISSION_DENIED"):
        append_to(run, meta_of())
    assert contents(run) == before


UNPRIVILEGED = """
import email.parser, fcntl, os, sys
from pathlib import Path
from comgra_decl.errors import StoreError
from comgra_decl.store import Reader
from comgra_decl.store.appending import append_to
from comgra_decl.store.compaction import compact
from comgra_decl.store.verify import verify
from tests.store.truth import meta_of
os.setgid(65534), os.setuid(65534)  # now that all is imported, wherever Python lies
run = Path(sys.argv[1])
print(Reader(run).view.n, verify(run).whole)
for act in (lambda: compact(run), lambda: append_to(run, meta_of())):
    try:
        act()
    except StoreError as error:
        print(error)
"""


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be another")
def test_another_user_can_read_and_not_write() -> None:
    with tempfile.TemporaryDirectory() as root:  # pytest's own is closed to other users
        Path(root).chmod(0o755)
        _check_other_user(Path(root) / "run")


def _check_other_user(run: Path) -> None:
    written(run)
    before = contents(run)
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(run)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-500:]
    first, compacting, resuming = done.stdout.splitlines()
    assert first == "135 True"
    assert "PERMISSION_DENIED" in compacting
    assert "PERMISSION_DENIED" in resuming
    assert contents(run) == before


@POSIX
@pytest.mark.parametrize("which", ["manifest", "data"])
def test_a_named_pipe_is_no_file_of_a_run(tmp_path: Path, which: str) -> None:
    """Nothing waits for a pipe to which nothing is written."""
    run = tmp_path / "run"
    written(run)
    path = run / "trace.ocdbt" / "manifest.ocdbt"
    if which == "data":
        path = next(file for file in files_of(run) if file.parent.name == "d")
    path.unlink()
    os.mkfifo(path)
    verdict = verify(run)
    assert not verdict.whole
    assert "is not a plain file" in f"{verdict.damages[0].where} {verdict.damages[0].reason}"
    for act in (compact, lambda run: copy_run(run, tmp_path / "copy")):
        with pytest.raises(DamagedRunError, match="is not a plain file"):
            act(run)
    assert not (tmp_path / "copy").exists()
    if which == "manifest":
        with pytest.raises(DamagedRunError, match="is not a plain file"):
            Reader(run)


@pytest.mark.slow
def test_a_flood_of_documents_is_not_read_to_open_a_run(tmp_path: Path) -> None:
    """Ten thousand documents, graphs and facts that are never read; measured by the bytes read."""
    from comgra_decl.store.commit import Commit
    from comgra_decl.store.database import Database, new_context

    run = tmp_path / "run"
    truth = written(run)
    database = Database(run, new_context(cache_bytes=0))
    flood = json.dumps(["x" * 100] * 100).encode()
    commit = Commit(database)
    for number in range(3000):
        for folder in ("docs", "graphs", "steps", "slots", "notes"):
            commit.put(f"{folder}/zz{number:06d}.json", flood)
    commit.put_json("head", {**database.read_json("head"), "generation": 99})
    commit.finish()
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))\n"
        "from comgra_decl.query import open_run\n"
        "run = open_run(sys.argv[1]); run.heat('mean'); print(len(run.records))\n"
        "print(next(int(l.split()[1]) for l in open('/proc/self/status') if l[:5] == 'VmHWM'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(run)], capture_output=True, text=True, check=True
    )
    records, kilobytes = map(int, done.stdout.split())
    assert records == 135
    assert kilobytes < 600_000
    truth.check(Reader(run).view)
