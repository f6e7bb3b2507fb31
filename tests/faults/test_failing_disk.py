"""On a failing disk (EIO), training continues, records remain, and readers name the problem."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import comgra_decl as comgra
from comgra_decl.query import Run, list_runs
from comgra_decl.store.verify import verify
from tests.faults.failing import FailingDisk
from tests.faults.failing_program import BEFORE, STEPS, Training
from tests.support.shortened import shortened

ROOT = Path(__file__).parents[2]
CALLS = ("fsync", "write", "rename", "open")
CASES = [
    ("fsync", "middle"),
    *((call, "middle") for call in CALLS[1:]),
    *((call, moment) for call in CALLS for moment in ("creation", "end")),
]


@pytest.fixture
def disk(tmp_path: Path) -> FailingDisk:
    (tmp_path / "runs").mkdir()
    return FailingDisk(tmp_path / "disk", under=tmp_path / "runs")


def untraced() -> Training:
    training = Training()
    for _ in range(STEPS):
        training.step()
    return training


@pytest.mark.slow
@pytest.mark.parametrize("case", shortened(CASES, tried=1), ids="-".join)
def test_a_training_goes_on_when_the_disk_fails(
    disk: FailingDisk, tmp_path: Path, case: tuple[str, str]
) -> None:
    _, moment = case
    root = tmp_path / "runs"
    module = "tests.faults.failing_program"
    command = [sys.executable, "-m", module, str(root), str(disk.calls), *case]
    with (tmp_path / "err").open("w") as err:
        program = subprocess.Popen(
            command,
            cwd=ROOT,
            env=disk.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    assert program.stdout is not None
    losses = [float(word) for word in program.stdout.readline().split()]
    said = (tmp_path / "err").read_text()
    plain = untraced()
    assert losses == plain.losses, said
    runs = list_runs(root)
    states = [run.state for run in runs]
    assert program.poll() is None, "the state was read while the program lives"
    program.communicate()
    assert program.returncode == 0, said
    assert "Input/output error" in said
    assert "Traceback" not in said
    if moment == "creation":
        assert runs == []
        return
    assert states == ["stopped"]
    (run,) = (comgra.open_run(run.path) for run in runs)
    assert str(run.path) in said
    assert verify(run.path).whole
    kept = run.steps.tolist()
    assert kept == list(range(STEPS if moment == "end" else BEFORE))
    means = run.series("1", "mean").to_numpy()
    np.testing.assert_allclose(means, plain.means[: len(kept)], rtol=1e-5, atol=1e-7)


READING = """
import sys
from pathlib import Path
import comgra_decl as comgra
path, switch = Path(sys.argv[1]), Path(sys.argv[2], sys.argv[3])

def look():
    run = comgra.open_run(path)
    node = run.nodes[0]
    return run, run.series(node, "mean")

run, expected = look()
switch.touch()
try:
    look()
except comgra.ComgraError as error:
    print("refused", error)
switch.unlink()
again, found = look()
assert found.equals(expected) and again.damage == []
"""


def recorded(root: Path) -> Run:
    training = Training()
    with comgra.trace("debug", root=root, group="g", name="r") as session:
        for _ in range(3):
            training.step()
    assert session.path is not None
    return comgra.open_run(session.path)


@pytest.mark.parametrize("call", ["read", pytest.param("open", marks=pytest.mark.slow)])
def test_a_disk_that_fails_while_a_run_is_read_is_reported_and_may_recover(
    disk: FailingDisk, tmp_path: Path, call: str
) -> None:
    run = recorded(tmp_path / "runs")
    command = [sys.executable, "-c", READING, str(run.path), str(disk.calls), call]
    done = subprocess.run(
        command, cwd=ROOT, env=disk.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"refused {run.path}")
    assert "Input/output error" in done.stdout
