"""A finding opens pdb at the next module call in a terminal; otherwise the spec is rejected."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import comgra_decl as comgra
from comgra_decl.doors import checked_spec
from comgra_decl.errors import SpecError
from comgra_decl.rules import Finding
from comgra_decl.rules.actions import Actions
from comgra_decl.spec.rules import FindingSpec

PROGRAM = """
import sys, time
import torch
import comgra_decl as comgra
model = torch.nn.Linear(2, 2)  # without modules inside, whose calls could be the next ones
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
changes = ["schedule.first=100000", "store.commit_interval=0", "on_finding.break=error"]
end = time.monotonic() + 60
with comgra.trace("debug", root=sys.argv[1], overrides=changes):
    step = -1
    while time.monotonic() < end:
        step += 1
        given = torch.full((3, 2), float("nan") if step > 5 else 1.0)
        answer = model(given)  # here
        answer.sum().backward()
        optimizer.step()
        time.sleep(0.01)
        if getattr(sys, "went_on", 0) and step > sys.went_on + 5:
            break
print("ended well at", step > 5)
"""


def run_in_terminal(tmp_path: Path, typed: str) -> subprocess.CompletedProcess[str]:
    """Runs the program with a terminal as standard input, into which `typed` is typed."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, typed.encode())
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        return subprocess.run(
            [sys.executable, str(program), str(tmp_path / "runs")],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.slow
def test_the_program_stops_at_its_call_of_the_model_is_stepped_through_and_goes_on(
    tmp_path: Path,
) -> None:
    typed = "p 'bad:', bool(given.isnan().all())\nnext\nsys.went_on = step\nnext\ncontinue\n"
    ended = run_in_terminal(tmp_path, typed)
    assert ended.returncode == 0, ended.stderr
    assert "because of nonfinite" in ended.stderr
    assert "answer = model(given)  # here" in ended.stdout  # the line at which it stops
    assert "('bad:', True)" in ended.stdout
    assert "-> answer.sum().backward()" in ended.stdout  # stepping is in the program itself
    assert "-> optimizer.step()" in ended.stdout
    assert ended.stdout.rstrip().endswith("ended well at True")


@pytest.mark.slow
def test_quit_ends_the_program(tmp_path: Path) -> None:
    ended = run_in_terminal(tmp_path, "quit\n")
    assert ended.returncode == 1
    assert "stopped in the debugger" in ended.stderr


@pytest.mark.parametrize("limit", ["error", "warning", "hint"])
def test_without_a_terminal_the_spec_is_refused(tmp_path: Path, limit: str) -> None:
    with (
        pytest.raises(SpecError, match="requires a terminal as standard input"),
        comgra.trace("debug", root=tmp_path, overrides=[f"on_finding.break={limit}"]),
    ):
        pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("more", [{"enabled": False}, {"dry_run": True}])
def test_what_traces_nothing_needs_no_terminal(more: dict[str, Any]) -> None:
    spec = checked_spec.declared({"on_finding": {"break": "error"}, **more})
    assert spec.on_finding.break_ == "error"


def test_only_findings_that_are_bad_enough_stop_it() -> None:
    stopped: list[str] = []
    spec = FindingSpec.model_validate({"break": "error"})
    actions = Actions(spec, run="r", note=lambda _: None, interrupt=stopped.append)
    found = Finding(
        rule="flat", severity="warning", first_step=1, last_step=2, message="It is.", advice="Look."
    )
    actions(found)
    assert stopped == []
    actions(Finding(**{**vars(found), "severity": "error"}))
    assert stopped == ["flat: It is. Look."]
