"""Faults of the store and of its thread, seen by a whole traced program."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import comgra_decl as comgra
from comgra_decl.errors import StoreError
from comgra_decl.launch.session import Session
from comgra_decl.store import RunWriter
from tests.faults.program import SPEC, training
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
    assert session.path is not None
    return found, session.path


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return seeded(train, Told(listening=False))


def stopped(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of the end of the recording (findings about the program are something else)."""
    return [r.getMessage() for r in caplog.records if "the store cannot be written" in r.message]


def broken(after: int, error: BaseException) -> Callable[..., Any]:
    """A commit that fails after some that have not."""
    original, commits = RunWriter.commit, 0

    def commit(writer: RunWriter, *args: Any, **kwargs: Any) -> Any:
        nonlocal commits
        commits += 1
        if commits > after:
            raise error
        return original(writer, *args, **kwargs)

    return commit


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


def test_a_run_whose_folder_is_removed_meanwhile(
    plain: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def remove(session: Session) -> None:
        assert session.path is not None
        shutil.rmtree(session.path)

    with caplog.at_level(logging.ERROR, "comgra_decl"):
        found, _ = traced(tmp_path, remove)
    same(plain, found)
    assert len(stopped(caplog)) <= 1
