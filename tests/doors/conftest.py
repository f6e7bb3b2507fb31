"""A stand-in for the session, for tests that cover only the entry points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from comgra_decl.record.context import RunContext
from comgra_decl.record.placement import create_run_folder
from comgra_decl.spec import Spec


class FakeSession:
    """Stores what it was given, and counts the calls."""

    made: list[FakeSession] = []  # noqa: RUF012  (cleared before each test)
    fails_with: BaseException | None = None

    def __init__(self, spec: Spec, *, context: RunContext) -> None:
        self.spec = spec
        self.context = context
        self.path: Path | None = None
        self.calls: list[str] = []
        self.made.append(self)

    def start(self) -> None:
        self.calls.append("start")
        if self.fails_with is not None:
            raise self.fails_with
        if self.spec.enabled:
            self.path = create_run_folder(self.spec.run, self.context)

    def failed(self, error: BaseException) -> None:
        self.calls.append(f"failed {type(error).__name__}")

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[FakeSession]]:
    """All sessions created during the test, in a separate folder."""
    monkeypatch.setattr("comgra_decl.record.session.Session", FakeSession)
    monkeypatch.setattr(FakeSession, "fails_with", None)
    monkeypatch.chdir(tmp_path)
    FakeSession.made.clear()
    yield FakeSession.made
    FakeSession.made.clear()
