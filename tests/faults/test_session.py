"""Errors in the store and in its thread, as seen by an entire traced program."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import comgra_decl as comgra
from comgra_decl.errors import ComgraError, NoMemoryError, StoreError
from comgra_decl.record.session import Session
from comgra_decl.records import RawStep
from comgra_decl.stats import Reducer
from comgra_decl.store import RunWriter, WriterThread
from comgra_decl.store.usage import Usage
from tests.faults.program import SPEC, training
from tests.store.test_full_disk import in_namespace
from tests.store.threads import until
from tests.support.shortened import shortened
from tests.ways.proof import Outcome, Told, attached, same, seeded

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

STEPS = 12


def train(_: Told) -> Outcome:
    return training(_, STEPS)


def traced(tmp_path: Path, at: Callable[[Session], None] = lambda _: None) -> tuple[Outcome, Path]:
    """Trains with tracing; `at` is called once recording has begun."""
    spec = {**SPEC, "schedule": {"first": 100}, "store": {"commit_interval": 0.0}}
    with comgra.trace(spec, root=tmp_path, group="g") as session:
        at(session)
        found = seeded(train, Told(listening=False))
    assert isinstance(session.path, Path)
    return found, session.path


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return seeded(train, Told(listening=False))


def stopped(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the messages about the end of recording, without findings about the program."""
    return [r.getMessage() for r in caplog.records if "recording has stopped" in r.message]


def broken(after: int, error: BaseException) -> Callable[..., Any]:
    """Makes a commit fail after some that succeed."""
    original, commits = RunWriter.commit, 0

    def commit(writer: RunWriter, *args: Any, **kwargs: Any) -> Any:
        nonlocal commits
        commits += 1
        if commits > after:
            raise error
        return original(writer, *args, **kwargs)

    return commit


def committed(put: Callable[[WriterThread, RawStep], None]) -> Callable[..., None]:
    """Passes on a step and waits for its commit, so that there is one attempt per step."""

    def wait(thread: WriterThread, raw: RawStep) -> None:
        put(thread, raw)
        until(lambda: thread._failed or not thread._bytes)

    return wait


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "error",
    [StoreError("the folder is gone"), PermissionError(13, "read-only"), MemoryError("no more")],
    ids=["store", "read-only", "memory"],
)
def test_a_commit_that_fails(
    plain: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    after: int,
    error: BaseException,
) -> None:
    before = attached()
    monkeypatch.setattr(RunWriter, "commit", broken(after, error))
    monkeypatch.setattr(WriterThread, "put", committed(WriterThread.put))
    with caplog.at_level(logging.ERROR, "comgra_decl"):
        found, path = traced(tmp_path)
    same(plain, found)
    assert attached() == before
    said = stopped(caplog)
    assert len(said) == 1
    assert str(path) in said[0]
    if after:
        assert len(comgra.open_run(path).records) >= 1, "what was committed is still read"


def test_statistics_that_fail_on_the_writers_thread(
    plain: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def finalise(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("in a statistic")

    monkeypatch.setattr("comgra_decl.stats.finalise", finalise)
    with caplog.at_level(logging.ERROR, "comgra_decl"):
        found, _ = traced(tmp_path)
    same(plain, found)
    assert len(stopped(caplog)) == 1


def holds_run(path: Path) -> bool:
    try:
        comgra.open_run(path)
    except ComgraError:
        return False
    return True


def test_a_run_whose_folder_is_removed_meanwhile(
    plain: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def remove(session: Session) -> None:
        path = session.path
        assert isinstance(path, Path)
        until(lambda: holds_run(path))  # before that, the thread would create it again
        while path.exists():  # the thread may add a file to a folder while it is being emptied
            shutil.rmtree(path, ignore_errors=True)

    with caplog.at_level(logging.ERROR, "comgra_decl"):
        found, path = traced(tmp_path, remove)
    same(plain, found)
    (said,) = stopped(caplog)
    assert "was removed, moved or unmounted" in said
    assert "another writer" not in said
    assert "kept in" not in said
    assert str(path) in said


def test_no_memory_to_reduce_a_tensor(
    plain: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original, calls = Reducer.add_anew, 0

    def add_anew(reducer: Reducer, *args: Any, **kwargs: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 200:
            raise MemoryError("no room for the sums of a tensor")
        return original(reducer, *args, **kwargs)

    before = attached()
    monkeypatch.setattr(Reducer, "add_anew", add_anew)
    monkeypatch.setattr(Reducer, "add_known", lambda *_: None)
    with caplog.at_level(logging.ERROR, "comgra_decl"):
        found, path = traced(tmp_path)
    same(plain, found)
    assert attached() == before
    assert calls < 220, "tracing stopped within that step"
    (said,) = [record for record in caplog.records if record.exc_info]
    assert said.exc_info is not None
    assert isinstance(said.exc_info[1], MemoryError)
    assert "tracing has stopped" in said.getMessage()
    run = comgra.open_run(path)
    assert len(run.records) >= 1, "what was committed is still read"
    assert (run.state, run.error) == ("stopped", "MemoryError: no room for the sums of a tensor")


def test_a_system_that_refuses_memory(
    plain: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Imitates what `test_memory_pressure` shows with a real limit."""
    asked = 0

    def demand(size: int) -> None:
        nonlocal asked
        asked += 1
        if asked > 8:
            raise NoMemoryError(f"the system refuses {size} bytes")

    before = attached()
    monkeypatch.setattr("comgra_decl.record.session.demand", demand)
    with caplog.at_level(logging.ERROR, "comgra_decl"):
        found, path = traced(tmp_path)
    same(plain, found)
    assert attached() == before
    (said,) = stopped(caplog)
    assert "the system refuses" in said
    assert asked < 14, "tracing stopped with that record"
    assert comgra.open_run(path).path == path


@pytest.mark.parametrize("where", ["_pause", "_share", "_release"])
def test_a_writers_thread_that_dies_between_commits(
    plain: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    original = getattr(WriterThread, where)

    def dies(thread: WriterThread, *args: Any) -> Any:
        if thread._pace._since is not None:  # something has been committed
            raise SystemExit("the thread is ended")  # nobody catches it by accident
        return original(thread, *args)

    before = attached()
    monkeypatch.setattr(WriterThread, where, dies)
    with caplog.at_level(logging.ERROR, "comgra_decl"):
        found, path = traced(tmp_path)
    same(plain, found)
    assert attached() == before
    assert len(stopped(caplog)) == 1
    assert len(comgra.open_run(path).records) >= 1, "what was committed is still read"


class Unheard(BaseException):
    """Not an Exception, so nobody catches it by accident."""


@pytest.mark.parametrize(
    "kind", shortened([SystemExit, KeyboardInterrupt, GeneratorExit, Unheard, StoreError], tried=2)
)
@pytest.mark.parametrize("where", ["start", "factory"])
def test_a_writers_thread_that_dies_at_its_start(
    plain: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    kind: type[BaseException],
) -> None:
    def dies(*_: Any) -> Any:
        raise kind

    if where == "start":
        monkeypatch.setattr(Usage, "start", dies)
    else:
        monkeypatch.setattr(RunWriter, "create", dies)
    before = attached()
    with caplog.at_level(logging.ERROR, "comgra_decl"):
        found, path = traced(tmp_path)
    same(plain, found)
    assert attached() == before
    (said,) = stopped(caplog)
    assert kind.__name__ in said
    assert said.endswith(f"there is no run in {path}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writers_thread_that_dies_before_anything_of_ours_is_called(
    plain: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def profiler(*_: Any) -> None:
        if threading.current_thread().name == "comgra-writer":
            raise Unheard

    threading.setprofile(profiler)
    try:
        with caplog.at_level(logging.ERROR, "comgra_decl"):
            found, path = traced(tmp_path)
    finally:
        threading.setprofile(None)
    same(plain, found)
    (said,) = stopped(caplog)
    assert "the writer thread has died" in said
    assert said.endswith(f"there is no run in {path}")


def test_recording_that_stops_while_the_programs_logging_is_broken(
    plain: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def broken_filter(_: logging.LogRecord) -> bool:
        if threading.current_thread().name == "comgra-writer":
            raise Unheard
        return False

    log = logging.getLogger("comgra_decl")
    monkeypatch.setattr(log, "filters", [broken_filter])
    monkeypatch.setattr(RunWriter, "commit", broken(2, StoreError("the disk burns.")))
    monkeypatch.setattr(WriterThread, "put", committed(WriterThread.put))
    found, path = traced(tmp_path)
    same(plain, found)
    told = capfd.readouterr().err
    assert "Traceback" not in told
    expected = (
        "comgra: recording has stopped because the store cannot be written (the disk burns); "
        f"training continues unaffected, and everything committed so far is kept in {path}"
    )
    assert told.splitlines() == [expected]
    assert comgra.open_run(path).error == "StoreError: the disk burns."


FULL_DISK = """
import logging
import sys
from pathlib import Path
import warnings

from tests.faults.test_session import *

warnings.simplefilter("ignore")
folder = Path(sys.argv[1])
WriterThread.__init__.__kwdefaults__["patience"] = 0.3
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("comgra_decl").addHandler(handler)


def train_and_fill(told):
    train(told)
    try:
        with (folder / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))
    except OSError:
        pass
    return train(told)


def train_twice(told):
    train(told)
    return train(told)


plain = seeded(train_twice, Told(listening=False))
spec = {**SPEC, "schedule": {"first": 100}, "store": {"commit_interval": 0.0}}
with comgra.trace(spec, root=folder, group="g") as session:
    found = seeded(train_and_fill, Told(listening=False))
same(plain, found)
assert len([text for text in said if "the store cannot be written" in text]) == 1, said
records = len(comgra.open_run(session.path).records)
assert 0 < records < 2 * STEPS * 2, records
print("survived")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs Linux namespaces")
def test_a_disk_that_fills_up_and_stays_full(tmp_path: Path) -> None:
    if in_namespace("true", tmp_path).returncode:
        pytest.skip("this machine does not allow mounting in a namespace")
    script = tmp_path / "script.py"
    folder = tmp_path / "small"
    folder.mkdir()
    script.write_text(FULL_DISK)
    done = in_namespace(f'PYTHONPATH=. "{sys.executable}" "{script}" "$0"', folder)
    assert done.stdout.endswith("survived\n"), done.stderr
