"""Unusual surroundings of a training run: clocks, permissions, other processes, many modules."""

from __future__ import annotations

import itertools
import os
import stat
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.export import export_run
from comgra_decl.query import Run
from comgra_decl.store.verify import verify
from tests.support.forked import Program, forked

SPEC = {"nodes": {"all": {"select": "**", "capture": ["output"]}}, "schedule": {"first": 1000}}


def train(root: Path, steps: int = 40) -> tuple[Run, list[float]]:
    """Trains and returns the run, and the losses as the program saw them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with comgra.trace(SPEC, root=root, group="g", name="r") as session:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 3)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert session.path is not None
    assert verify(session.path).whole
    return comgra.open_run(session.path), losses


def told(run: Run) -> list[float]:
    numbers = run.kpis()
    return [float(value) for value in numbers[numbers["name"] == "loss"]["value"]]


def test_a_clock_that_goes_back_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jumps by an hour at each reading, unlike any real clock."""
    now, back = time.time(), itertools.count()
    monkeypatch.setattr(time, "time", lambda: now - 3600 * next(back))
    run, losses = train(tmp_path)
    monkeypatch.undo()
    assert run.steps.tolist() == list(range(40))
    assert told(run) == losses
    assert run.state == "finished"


def test_what_is_written_is_for_whom_the_mask_of_the_process_lets_in(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        run, losses = train(tmp_path)
    finally:
        os.umask(before)
    assert told(run) == losses
    modes = [path.stat().st_mode for path in (tmp_path / "g").rglob("*")]
    assert modes
    assert not any(stat.S_IMODE(mode) & 0o077 for mode in modes)


SHOW = "from comgra_decl.cli.main import main; main(['show', *__import__('sys').argv[1:]])"

PROGRAM = """
import sys
from pathlib import Path
from tests.faults.test_surroundings import told, train
run, losses = train(Path(sys.argv[1]))
assert told(run) == losses
print(run.path.name)
"""


def test_programs_that_begin_at_once_under_one_name_are_runs_of_their_own(tmp_path: Path) -> None:
    begun = [Program(Path(__file__).parents[2], "-c", PROGRAM, tmp_path) for _ in range(2)]
    ended = [program.ended() for program in begun]
    assert [done.returncode for done in ended] == [0, 0]
    names = [done.stdout.strip() for done in ended]
    assert sorted(names) == ["r", "r-2"]


ZONED = """
import time
from datetime import datetime
from pathlib import Path
import torch
from torch import nn
import comgra_decl as comgra

time.tzset()
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
with comgra.trace("debug", root="runs", group="g") as session:
    begun = datetime.now()
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    comgra.note("noted")
print(session.path.name, begun.isoformat(), *losses)
"""


@pytest.mark.parametrize(("zone", "hours"), [("EAST-14", 14), ("WEST+12", -12)])
def test_a_time_zone_shifts_the_name_of_a_run_and_nothing_else(
    tmp_path: Path, zone: str, hours: int
) -> None:
    before = time.time()
    done = forked(tmp_path, "-c", ZONED, env={"TZ": zone})
    assert done.returncode == 0, done.stderr
    name, begun, *losses = done.stdout.split()
    run = comgra.open_run(tmp_path / "runs" / "g" / name)
    assert told(run) == [float(loss) for loss in losses]
    assert run.steps.tolist() == [*range(5)]
    assert before <= run.started <= time.time()
    there = timezone(timedelta(hours=hours))
    named = datetime.strptime(name, "%Y-%m-%d_%H-%M-%S").replace(tzinfo=there)
    assert abs(named - datetime.fromisoformat(begun).replace(tzinfo=there)) < timedelta(minutes=1)
    assert abs(named.timestamp() - run.started) < 60
    for elsewhere in ("EAST-14", "WEST+12"):
        shown = forked(tmp_path, "-c", SHOW, str(run.path), env={"TZ": elsewhere})
        assert shown.returncode == 0, shown.stderr
        assert name in shown.stdout


@pytest.mark.parametrize("length", [256, 400])
def test_a_name_longer_than_file_names_may_be_is_recorded_read_and_exported(
    tmp_path: Path, length: int
) -> None:
    name = "n" * length
    model = nn.ModuleDict({name: nn.Linear(3, 2)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = []
    with comgra.trace("debug", root=tmp_path, group="g", name="r") as session:
        for _ in range(3):
            optimizer.zero_grad()
            output = model[name](torch.randn(4, 3))
            output.square().mean().backward()
            optimizer.step()
            expected.append(output.mean().item())
    assert session.path is not None
    assert verify(session.path).whole
    run = comgra.open_run(session.path)
    assert name in run.nodes
    assert run.series(name, "mean").tolist() == pytest.approx(expected, rel=1e-5)
    for how in ("csv", "npz", "zarr"):
        made = export_run(run, tmp_path / how, how)
        assert made.exists()
    shown = forked(tmp_path, "-c", SHOW, str(run.path))
    assert shown.returncode == 0, shown.stderr


@pytest.mark.slow
def test_twenty_thousand_modules_are_recorded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20_000)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.ones(1, 2)
    seen: list[dict[str, torch.Tensor]] = []
    handles = [
        module.register_forward_hook(
            lambda _m, _a, out, name=name: seen[-1].update({name: out.detach().clone()})
        )
        for name, module in model.named_modules()
        if name
    ]
    with comgra.trace(SPEC, root=tmp_path, group="g", name="r") as session:
        for _ in range(3):
            seen.append({})
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    for handle in handles:
        handle.remove()
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert run.steps.tolist() == [0, 1, 2]
    for step in range(3):
        means = run.row(step)["mean"]
        outputs = means.xs(("output", 0, "forward"), level=("role", "iteration", "pass"))
        outputs = outputs[outputs.index.isin(list(seen[step]))]
        assert len(outputs) == 20_000
        expected = torch.stack([seen[step][name].mean() for name in outputs.index])
        found = torch.tensor(outputs.to_numpy(), dtype=torch.float32)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


BEHIND_LINKS = """
import sys
import torch
from torch import nn
import comgra_decl as comgra

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 3)

    def forward(self, x, kind=None):
        return self.line(x)

spec = {
    "nodes": {"all": {"select": "**", "capture": ["output", "output_grad"]}},
    "types": {"by": {"input": "kind", "value": True}},
    "graph": True,
}
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with comgra.trace(spec, root="runs", name="r") as session:
    x = torch.randn(4, 3)
    answer = model(x, kind="warm")
    loss_a = answer.square().mean()
    loss_b = answer.abs().mean()
    loss_a.backward(retain_graph=True)
    loss_b.backward()
    optimizer.step()
run = comgra.open_run(session.path)
print(torch.__file__.startswith(sys.argv[1]), comgra.__file__.startswith(sys.argv[1]))
print(run.records["type"].tolist(), sorted({*run.slots["pass"]}))
"""


@pytest.mark.slow
def test_an_environment_behind_links_is_an_environment(tmp_path: Path) -> None:
    """Names of losses and values of arguments are found in frames of the program."""
    (tmp_path / "environment").symlink_to(sys.prefix)
    (tmp_path / "code").symlink_to(Path(comgra.__file__).parents[1])
    (tmp_path / "train.py").write_text(BEHIND_LINKS)
    ended = subprocess.run(
        [tmp_path / "environment" / "bin" / "python", "train.py", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "code"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert not ended.returncode, ended.stderr
    assert ended.stdout.splitlines() == [
        "True True",
        "['warm'] ['forward', 'grad', 'grad:loss_b']",
    ]
