"""Tracing any script: it must run as if Python itself had started it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from comgra_decl.doors.script import Call, UsageError, main, parse, require_script
from comgra_decl.query import list_runs, open_run
from tests.doors.conftest import FakeSession
from tests.support.forked import forked
from tests.support.programs import (
    SCRIPT,
    TRAINING,
    interpreter_kept,
    loss_of,
    plain_loss,
    python,
)
from tests.support.shortened import shortened


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("train.py", Call(script="train.py")),
        ("train.py a --b c=1 -m", Call(script="train.py", arguments=["a", "--b", "c=1", "-m"])),
        ("--spec light train.py", Call(spec="light", script="train.py")),
        ("--spec=my.yaml train.py", Call(spec="my.yaml", script="train.py")),
        (
            "schedule.every=5 --spec off ~nodes.weights= graph=false t.py x=1",
            Call(
                spec="off",
                overrides=["schedule.every=5", "~nodes.weights=", "graph=false"],
                script="t.py",
                arguments=["x=1"],
            ),
        ),
        ("-m pkg.train --x", Call(script="pkg.train", module=True, arguments=["--x"])),
        ("a=1 -m pkg", Call(overrides=["a=1"], script="pkg", module=True)),
    ],
)
def test_everything_behind_the_script_is_the_scripts(line: str, call: Call) -> None:
    assert parse(line.split()) == call


def test_a_script_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=3.py").touch()
    assert parse(["lr=3.py"]).script == "lr=3.py"


@pytest.mark.parametrize("line", ["", "a=1", "--spec", "-m", "--nonsense train.py", "--spec debug"])
def test_a_line_that_makes_no_sense_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        parse(line.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script in its own folder, and a module."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "tell.py").write_text(SCRIPT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "tell.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    "line", shortened(["code/tell.py a --spec=1", "-m package.tell a -m"], tried=1)
)
def test_a_program_cannot_tell_that_it_is_run_by_us(folder: Path, line: str) -> None:
    plain = python(folder, *line.split())
    traced = python(folder, "-m", "comgra_decl", "--spec", "off", *line.split())
    assert plain.stdout.count("\n") == 3
    assert plain.stdout == traced.stdout


def test_the_console_command_is_the_same_door(folder: Path) -> None:
    code = "import sys; from comgra_decl.cli.main import main; main()"
    plain = python(folder, "code/tell.py", "--help")
    traced = forked(folder, "-c", code, "run", "--spec=off", "code/tell.py", "--help")
    assert plain.stdout == traced.stdout


def test_a_training_is_recorded_and_stays_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{TRAINING}\ntrain()\nraise KeyError('mine')\n")
    traced = forked(tmp_path, "-m", "comgra_decl", "schedule.every=2", "train.py", "x")
    assert traced.returncode == 1
    assert traced.stderr.endswith("KeyError: 'mine'\n")
    assert loss_of(traced.stdout) == plain_loss()
    run = open_run(tmp_path / "runs" / "train")
    assert run.state == "failed"
    assert list(run.steps) == list(range(11))
    assert run.facts["script"] == str(tmp_path / "train.py")
    assert run.facts["command"][-3:] == ["schedule.every=2", "train.py", "x"]
    assert f"comgra: recording to {run.path}" in traced.stderr


@pytest.mark.parametrize(
    ("ending", "code", "last_words"),
    [
        pytest.param("raise KeyError('mine')", 1, "KeyError: 'mine'\n", marks=pytest.mark.slow),
        pytest.param("import sys; sys.exit(7)", 7, "", marks=pytest.mark.slow),
        pytest.param("import sys; sys.exit('message')", 1, "message\n", marks=pytest.mark.slow),
        pytest.param("import os; os._exit(3)", 3, "", marks=pytest.mark.slow),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_however_a_script_ends_so_does_the_program(
    tmp_path: Path, ending: str, code: int, last_words: str
) -> None:
    (tmp_path / "train.py").write_text(f"{ending}\n")
    done = python(tmp_path, "-m", "comgra_decl", "--spec", "off", "train.py")
    assert done.returncode == code
    assert done.stderr.endswith(last_words)


@pytest.mark.parametrize(
    ("ending", "calls"),
    [
        ("pass", []),
        ("1 / 0", ["failed ZeroDivisionError"]),
        ("raise SystemExit(3)", ["failed SystemExit"]),
        ("raise KeyboardInterrupt", ["failed KeyboardInterrupt"]),
    ],
)
def test_the_run_is_finished_however_the_script_ends(
    sessions: list[FakeSession], ending: str, calls: list[str]
) -> None:
    Path("train.py").write_text(ending)
    ends = suppress(ZeroDivisionError, SystemExit, KeyboardInterrupt)
    with ends, interpreter_kept():
        main(["--spec", "light", "train.py"])
    assert [session.calls for session in sessions] == [["start", *calls, "finish"]]
    assert sessions[0].context.job == "train"


@pytest.mark.slow
def test_classes_of_the_script_travel_to_other_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing, pickle\n"
        "class Local:\n    value = 3\n"
        "def work(x): return x.value + 1\n"
        "if __name__ == '__main__':\n"
        "    assert isinstance(pickle.loads(pickle.dumps(Local())), Local)\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [Local()]))\n"
    )
    traced = python(tmp_path, "-m", "comgra_decl", "--spec", "off", "train.py")
    assert traced.stdout == "[4]\n", traced.stderr


def test_a_wrong_spec_ends_the_program_before_the_training(folder: Path) -> None:
    done = forked(folder, "-m", "comgra_decl", "schedule.evry=2", "graph=3", "code/tell.py")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "comgra: the spec has 2 problems:" in done.stderr
    assert "comgra.schedule: unknown key 'evry'" in done.stderr
    assert "comgra.graph: 3 is not true or false" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs").exists()


def test_a_script_that_is_missing_is_said(tmp_path: Path) -> None:
    done = forked(tmp_path, "-m", "comgra_decl", "trian.py")
    assert done.returncode == 2
    assert "script 'trian.py' does not exist" in done.stderr


@pytest.mark.parametrize("command", ["batch-mixing", "import", "send"])
def test_each_command_that_is_typed_in_place_of_a_script_is_pointed_to(command: str) -> None:
    with pytest.raises(UsageError, match=f"type `comgra-decl {command}`"):
        require_script(Call(script=command))


@pytest.mark.slow
def test_a_command_that_is_typed_in_place_of_a_script_is_pointed_to(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "comgra_decl", "diagnose", "runs")
    assert done.returncode == 2
    assert "type `comgra-decl diagnose`" in done.stderr


def test_a_root_that_cannot_be_written_does_not_stop_the_script(folder: Path) -> None:
    (folder / "runs").write_text("in the way")
    plain = python(folder, "code/tell.py")
    traced = forked(folder, "-m", "comgra_decl", "code/tell.py")
    assert traced.stdout == plain.stdout
    assert traced.returncode == 0
    assert "nothing is recorded: cannot create a run" in traced.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.slow
def test_what_was_committed_survives_a_kill(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"{TRAINING}\nimport time\ntrain()\ntrain(1)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "comgra_decl", "store.commit_interval=0.05", "train.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        _wait_for_record(tmp_path / "runs", 11)
        process.kill()
    run = open_run(tmp_path / "runs")
    assert run.steps[-1] >= 11
    assert run.state in ("live", "stopped")


def _wait_for_record(root: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any((run.last_step or 0) >= step for run in list_runs(root)):
            return
        time.sleep(0.05)
    pytest.fail("the record was never committed")
