"""The last sign of life of each rank, and which one stopped first."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.query.ranks import heartbeats
from comgra_decl.query.ranks.heartbeats import Heartbeat, first_stopped, heartbeat_of, stopped_text
from comgra_decl.store import Reader
from comgra_decl.store.last_seen import FILE, write_last_seen
from tests.ranks.launching import environment, free_port
from tests.support.fake_run import FakeRun
from tests.support.forked import Program
from tests.viewer.app.test_ranks import Rank

LOOP = """
import os, sys, torch, torch.distributed as dist
import comgra_decl as comgra

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
spec = {"nodes": {"all": {"select": "**"}}, "schedule": {"first": 10**6},
        "run": {"root": sys.argv[1], "group": "g", "name": "run"}}
with comgra.trace(spec):
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
"""


def beats(*states: tuple[str, int | None, float]) -> list[Heartbeat]:
    return [Heartbeat(rank, *state) for rank, state in enumerate(states)]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (beats(("live", 5, 100.0), ("live", 5, 101.0)), None),
        (beats(("finished", 5, 100.0), ("finished", 5, 90.0)), None),
        (beats(("stopped", 5, 100.0)), None),
        (
            beats(("stopped", 5, 114.0), ("stopped", 4, 100.0), ("live", 5, 120.0)),
            "rank 1 of 3 stopped first, at or after step 4, 14 s before rank 0",
        ),
        (
            beats(("live", 5, 120.0), ("stopped", None, 120.0)),
            "rank 1 of 2 stopped first",
        ),
        (
            beats(("silent", 5, 30.0), ("live", 6, 120.0), ("live", 6, 118.0)),
            "rank 0 of 3 no longer responds, at or after step 5; rank 1 was seen 90 s later",
        ),
        (beats(("silent", 5, 30.0), ("silent", 6, 31.0)), None),  # perhaps the machine slept
    ],
)
def test_the_rank_that_stopped_first_is_named(found: list[Heartbeat], text: str | None) -> None:
    assert stopped_text(found) == text
    if text is None and len(found) > 1:
        assert first_stopped(found) is None


def test_the_machine_is_named_if_there_are_several() -> None:
    """A rank that stops with its machine is looked for there."""
    found = [Heartbeat(0, "live", 5, 120.0, "node-1"), Heartbeat(1, "stopped", 5, 120.0, "node-2")]
    assert stopped_text(found) == "rank 1 of 2 on 'node-2' stopped first, at or after step 5"
    found[0] = Heartbeat(0, "live", 5, 120.0, "node-2")
    assert stopped_text(found) == "rank 1 of 2 stopped first, at or after step 5"


def test_a_rank_reports_more_often_than_it_records(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=["a"], layers=1)
    fake.write(3)
    reader = Reader(fake.path)
    recorded = heartbeat_of(2, reader)
    assert (recorded.rank, recorded.state, recorded.step) == (2, "live", 2)
    later = recorded.seen + 50
    (fake.path / FILE).write_text(json.dumps({"time": later, "step": 17}))
    here = socket.gethostname()
    assert heartbeat_of(2, reader, now=later + 59) == Heartbeat(2, "live", 17, later, here)
    assert heartbeat_of(2, reader, now=later + 61).state == "silent"
    (fake.path / FILE).write_text("{")  # half written
    assert heartbeat_of(2, reader) == recorded
    fake.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_stops_while_the_others_wait_for_it_is_named(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "SILENT", 6.0)
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    port = free_port()
    ranks = [
        Program(tmp_path, script, tmp_path / "runs", env=environment(rank, 3, port))
        for rank in range(3)
    ]
    try:
        run = wait_for_steps(tmp_path / "runs" / "g" / "run", ranks=3)
        assert named(run) is None
        pid = ranks[1].process.pid
        assert pid is not None
        os.kill(pid, how)
        end = time.monotonic() + 120
        while named(run) is None and time.monotonic() < end:
            time.sleep(0.2)
            run.refresh()
        assert str(named(run)).startswith("rank 1 of 3 ")
        assert run.heartbeats["step"].tolist()[1] >= 3
    finally:
        for program in ranks:
            program.kill()


@pytest.mark.parametrize("command", ["ls", "show", "diagnose"])
def test_the_commands_name_a_rank_that_no_longer_responds(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(heartbeats, "SILENT", -1.0)
    monkeypatch.setenv("COLUMNS", "200")
    run = tmp_path / "g" / "run"
    ranks = [Rank(path, rank) for rank, path in enumerate((run, run / "ranks" / "1"))]
    for rank in ranks:
        rank.write(4)
    write_last_seen(run, {"time": time.time() + 1000, "step": 7})
    with pytest.raises(SystemExit):
        main([command, str(tmp_path if command == "ls" else run)])
    assert "rank 1 of 2 no longer responds, at or after step 3" in capsys.readouterr().out
    for rank in ranks:
        rank.close()


def named(run: comgra.Run) -> str | None:
    return run.first_stopped


def wait_for_steps(path: Path, ranks: int) -> comgra.Run:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            run = comgra.open_run(path)
            if len(run.ranks) == ranks and len(run.steps) > 3:
                return run
        except comgra.ComgraError:  # it is being created
            pass
        time.sleep(0.1)
    raise AssertionError("the ranks do not train")
