"""Tracing with a `with` block."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest

import comgra_decl as comgra
from comgra_decl.errors import SpecError, StoreError
from tests.doors.conftest import FakeSession


def test_a_block_records_between_its_begin_and_its_end(
    sessions: list[FakeSession], tmp_path: Path
) -> None:
    with comgra.trace("light", root=tmp_path / "far", group="g", name="n") as session:
        assert [id(session)] == [id(made) for made in sessions]
        assert sessions[0].calls == ["start"]
        assert session.path == tmp_path / "far" / "g" / "n"
    assert sessions[0].calls == ["start", "finish"]
    assert sessions[0].spec.nodes == comgra.load_spec("light").nodes


@pytest.mark.usefixtures("sessions")
def test_a_relative_root_lies_in_the_current_folder(tmp_path: Path) -> None:
    with comgra.trace({"run": {"root": "here", "group": "g", "name": "n"}}) as session:
        assert session.path == tmp_path / "here" / "g" / "n"


def test_what_the_call_says_of_the_place_wins(sessions: list[FakeSession]) -> None:
    overrides = ["run.root=a", "run.group=b", "graph=false"]
    with comgra.trace("debug", overrides=overrides, root="c", name="x: [y}") as session:
        run = sessions[0].spec.run
        assert (run.root, run.group, run.name) == ("c", "b", "x: [y}")
        assert not sessions[0].spec.graph
        assert session.path is not None


def test_the_block_may_be_entered_again_and_inside_itself(sessions: list[FakeSession]) -> None:
    with comgra.trace(name="same") as outer:
        with comgra.trace(name="same") as inner:
            assert outer.path != inner.path
        assert [s.calls for s in sessions] == [["start"], ["start", "finish"]]
    with comgra.trace(name="same") as third:
        assert third.path is not None
        assert third.path.name == "same-3"


def test_a_function_can_be_traced_at_every_call(sessions: list[FakeSession]) -> None:
    @comgra.trace("debug", name="call")
    def train(steps: int) -> int:
        return steps + 1

    assert [train(1), train(2)] == [2, 3]
    assert [s.path.name for s in sessions if s.path] == ["call", "call-2"]


def test_an_error_of_the_training_passes_through(sessions: list[FakeSession]) -> None:
    with pytest.raises(ZeroDivisionError), comgra.trace():
        _ = 1 / 0
    assert sessions[0].calls == ["start", "failed ZeroDivisionError", "finish"]


def test_a_spec_that_is_wrong_is_said_before_anything_starts(sessions: list[FakeSession]) -> None:
    with pytest.raises(SpecError, match=r"comgra\.graph"), comgra.trace({"graph": 3}):
        pytest.fail("must not be reached")
    assert sessions == []


@pytest.mark.parametrize("error", [StoreError("disk full"), RuntimeError("our fault")])
def test_when_recording_cannot_start_the_training_goes_on(
    sessions: list[FakeSession],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(FakeSession, "fails_with", error)
    reached = False
    with caplog.at_level(logging.ERROR), comgra.trace() as session:
        reached = True
        assert session.path is None
    assert reached
    (record,) = caplog.records
    assert "nothing is recorded" in record.getMessage()
    assert sessions[0].calls[0] == "start"


@pytest.mark.usefixtures("sessions")
def test_off_records_nothing(tmp_path: Path) -> None:
    with comgra.trace("off") as session:
        assert session.path is None
    assert list(tmp_path.iterdir()) == []


def test_settings_of_the_program_are_those_of_the_run(sessions: list[FakeSession]) -> None:
    config = {"lr": 0.1, "api_key": "abc", "data": Path("here"), "layers": (1, 2)}
    with comgra.trace("light", config=config):
        pass
    with comgra.trace("light"):
        pass
    kept, none = (session.context.config for session in sessions)
    assert kept == {"lr": 0.1, "api_key": "(not saved)", "data": "here", "layers": [1, 2]}
    assert none is None
    with (
        pytest.raises(SpecError, match=r"got Namespace; pass vars\(args\)"),
        comgra.trace(
            "light",
            config=argparse.Namespace(lr=0.1),  # type: ignore[arg-type]
        ),
    ):
        pytest.fail("must not be reached")
