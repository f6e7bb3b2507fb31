"""Whether a run's writer is still alive."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.store import Reader, RunWriter, meta
from comgra_decl.store.meta import FolderHandle, holds_folder, writer_alive, writer_identity
from tests.store.truth import meta_of


def test_this_process_lives_however_long_ago_it_committed() -> None:
    assert writer_alive(writer_identity(), last_commit=0.0)


def test_a_process_that_ended_does_not() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    identity = {**writer_identity(), "pid": ended.pid}
    assert not writer_alive(identity, last_commit=time.time())


def test_a_killed_process_that_nobody_waited_for_does_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    started = meta._process_start(child.pid)
    identity = {**writer_identity(), "pid": child.pid, "process_start": started}
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    assert not writer_alive(identity, last_commit=time.time())
    child.wait()


def test_another_process_with_the_same_number_is_not_the_writer() -> None:
    identity = {**writer_identity(), "process_start": "1"}
    assert not writer_alive(identity, last_commit=time.time())


def test_a_writer_elsewhere_is_judged_by_its_last_commit() -> None:
    identity = {**writer_identity(), "machine": "another one"}
    now = time.time()
    assert writer_alive(identity, last_commit=now - 10)
    assert not writer_alive(identity, last_commit=now - 3601)


def test_a_writer_that_says_nothing_of_itself_is_judged_by_its_last_commit() -> None:
    assert writer_alive({}, last_commit=time.time())
    assert not writer_alive({}, last_commit=0.0)


@pytest.mark.parametrize(
    "pid",
    [0, -1, -os.getpid(), True, 1.0, str(os.getpid()), None, [1], float("nan")],
    ids=["zero", "group", "own group", "bool", "float", "text", "none", "list", "nan"],
)
def test_a_number_that_cannot_be_a_process_says_nothing(pid: Any) -> None:
    identity = {**writer_identity(), "pid": pid, "process_start": None}
    assert writer_alive(identity, last_commit=time.time())
    assert not writer_alive(identity, last_commit=time.time() - 3601)


@pytest.mark.parametrize("pid", [2**22 + 1, 2**31, 2**70])
def test_a_number_that_no_process_has_is_that_of_one_that_ended(pid: int) -> None:
    identity = {**writer_identity(), "pid": pid}
    assert not writer_alive(identity, last_commit=time.time())


def test_a_commit_far_in_the_future_does_not_keep_a_writer_alive() -> None:
    identity = {**writer_identity(), "machine": "another one"}
    assert writer_alive(identity, last_commit=time.time() + 60)  # its clock is fast
    assert not writer_alive(identity, last_commit=time.time() + 1e6)


def test_a_writer_that_has_given_up_is_known_though_its_process_lives(tmp_path: Path) -> None:
    """It closes its handle of the folder, which does not need the disk."""
    handle = FolderHandle(tmp_path)
    identity = writer_identity(handle)
    assert holds_folder(identity, tmp_path)
    (tmp_path / "copy").mkdir()
    assert not holds_folder(identity, tmp_path / "copy")
    handle.close()
    assert not holds_folder(identity, tmp_path)
    handle.close()
    other = FolderHandle(tmp_path / "copy")  # by now, the number may be another file's
    assert not holds_folder(identity, tmp_path)
    other.close()


@pytest.mark.parametrize("changes", [{"handle": "x"}, {"handle": True}, {"machine": "another one"}])
def test_a_writer_whose_handle_cannot_be_asked_for_is_believed(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert holds_folder({**writer_identity(), "handle": 10**6, **changes}, tmp_path)
    assert holds_folder(writer_identity(), tmp_path)


def test_a_run_is_stopped_once_its_writer_gives_up_and_finished_once_it_has_closed(
    tmp_path: Path,
) -> None:
    writers = [RunWriter.create(tmp_path / name, meta_of()) for name in ("failed", "closed")]
    readers = [Reader(tmp_path / name) for name in ("failed", "closed")]
    assert [reader.state for reader in readers] == ["waiting", "waiting"]
    writers[0].release()
    writers[1].close()
    assert [reader.state for reader in readers] == ["stopped", "waiting"]
    assert [reader.poll() for reader in readers] == [False, True]
    assert [reader.state for reader in readers] == ["stopped", "finished"]
