"""Programs that nobody tuned to, with the `debug` preset: what is wrong is named, and nothing else.

See `ordinary_programs.py`. Each one is a process of its own, and nothing is set faster for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.record import ordinary_programs
from tests.record.test_around import AROUND
from tests.support.forked import forked

FILE = Path(ordinary_programs.__file__)
FILLING = ("dqn", "workers")
"""Healthy programs whose memory grows at first; they run for as long as a leak needs to be told."""

pytestmark = pytest.mark.slow


def traced(name: str, seconds: float, folder: Path, *, file: Path = FILE) -> Run:
    """Run a program of a file with the `debug` preset."""
    command: list[Any] = ["-m", "comgra_decl", "--spec", "debug", "run.root=runs", file]
    result = forked(folder, *command, name, seconds, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    return comgra.open_run(folder / "runs")


def found(run: Run, rule: str) -> pd.Series[Any]:
    """Return the first finding of a rule."""
    table = run.findings()
    assert rule in set(table["rule"]), table[["rule", "node", "message"]].to_string()
    return table[table["rule"] == rule].iloc[0]


@pytest.mark.parametrize("program", ordinary_programs.HEALTHY, ids=lambda each: each.__name__)
def test_a_healthy_program_gets_no_finding_about_what_is_around_the_network(
    program: Any, tmp_path: Path
) -> None:
    name = program.__name__
    run = traced(name, 45 if name in FILLING else 15, tmp_path)
    assert run.steps[-1] >= 5
    assert run.state == "finished"
    assert run.ending is None
    table = run.findings()
    around = table[table["rule"].isin(AROUND)]
    assert around.empty, around["message"].to_list()


def test_the_leak_is_named_with_the_list_that_holds_it(tmp_path: Path) -> None:
    message = found(traced("leak", 60, tmp_path), "growing_memory")["message"]
    # the same list has one name in each function that can be running
    assert re.search(r"`(self\.logs in Trainer\.\w+|trainer\.logs in leak) \(", message), message


def test_the_starved_loader_is_named(tmp_path: Path) -> None:
    message = found(traced("starve", 20, tmp_path), "input_bound")["message"]
    assert "pass before the model is called" in message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_copy_is_named_with_its_line(tmp_path: Path) -> None:
    message = found(traced("host_copy", 15, tmp_path), "synchronising_call")["message"]
    lines = FILE.read_text().splitlines()
    number = 1 + next(k for k, line in enumerate(lines) if "y.detach().cpu()" in line)
    assert f"{FILE.name}:{number}" in message


def test_the_stalled_worker_is_named_with_its_state(tmp_path: Path) -> None:
    run = traced("hang", 0, tmp_path)
    assert "had not ended after" in found(run, "stalled_step")["message"]
    texts = run.notes()["text"]
    (note,) = texts[texts.str.contains("has not ended")]
    assert "waiting for data" in note
    assert "DataLoader of Remote, workers; batch 162 is from worker 0:" in note
