"""Kills writers in mid-work: `python -m tests.faults.kills COUNT SEED [KIND,...]`.

Each writer is a separate program and is ended by SIGKILL: training runs as soon as a reader has
seen a certain number of their records, all others at some point during their work. Afterwards,
nothing that a reader has seen may be lost, every number must equal that of the same training run
without the kill, and `verify` must find no damage. The next copy or export finishes what a killed
one began.

A kill counts only in mid-work: SIGKILL ended the program (each of its ranks), and a training run
had not been closed. A kill that came too late is checked as well, and another one replaces it.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import Run
from comgra_decl.records import SlotKey
from comgra_decl.store.verify import Verdict, verify
from tests.ranks.launching import environment, free_port
from tests.support.forked import Program

STEPS = 120
TRAININGS = ("training", "ring", "ranks", "resume")
WORK = ("compact", "csv", "npz", "zarr", "copy")
KINDS = (*TRAININGS, *WORK)
SPEC: dict[str, Any] = {
    "nodes": {
        "all": {"select": "**", "capture": ["output", "output_grad"], "values": True},
        "weights": {"select": "**", "capture": ["parameter", "parameter_grad"]},
    },
    "schedule": {"first": 10_000},
    "samples": {"count": 2},
    "histogram": {},
    "store": {"commit_interval": 0.02},
    "rules": "off",
}
RING = {
    "schedule": {"first": 3, "every": 40},
    "keep": {"ring": 5, "when": [{"quantile": 0.7, "of": {"kpi": "error"}}]},
}
PATIENCE = 120


def train(folder: Path, spec: dict[str, Any], *, pause: float = 0.01) -> None:
    """Trains a small network from its checkpoint on, and saves one every ten steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept = folder / "checkpoint.pt"
    first = 0
    if kept.exists():
        saved = torch.load(kept, weights_only=False)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    if "run" in spec and first == 0:  # otherwise a fresh start could not be told from lost state
        spec = {**spec, "run": {**spec["run"], "resume_step": 0}}
    with comgra.trace(spec, root=folder, group="g", name=None if "run" in spec else "run"):
        for step in range(first, STEPS):
            if "run" in spec and step % 10 == 0:
                parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"step": step, **parts}, kept.with_suffix(".new"))
                kept.with_suffix(".new").rename(kept)
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            comgra.kpi("error", loss.detach().sqrt())
            optimizer.step()
            time.sleep(pause)  # so that it is killed while it trains, not after


def spec_of(kind: str) -> dict[str, Any]:
    """Returns the spec for a training run of this kind."""
    if kind == "ring":
        return {**SPEC, **RING}
    return {**SPEC, "run": {"resume": True}} if kind == "resume" else SPEC


TRAIN = "from pathlib import Path; from tests.faults import kills; kills.train(Path({!r}), {!r})"
ROOT = Path(__file__).parents[2]


def training(folder: Path, kind: str) -> list[Program]:
    """Starts a training run; with ranks, one program per rank."""
    code = TRAIN.format(str(folder), spec_of(kind))
    ranks = 2 if kind == "ranks" else 1
    port = free_port()
    given = [environment(rank, 2, port) if ranks > 1 else {} for rank in range(ranks)]
    return [Program(ROOT, "-c", code, env=env) for env in given]


WORKING = """
import sys, time
from pathlib import Path
import comgra_decl as comgra
from comgra_decl.export import export_run
from comgra_decl.store.compaction import compact
from comgra_decl.store.copying import copy_run
run, target, how = Path({!r}), Path({!r}), {!r}
Path({!r}).write_text("begun")
if how == "compact":
    compact(run)
elif how == "copy":
    copy_run(run, target)
else:
    export_run(comgra.open_run(run), target, how)
"""


def working(run: Path, target: Path, how: str) -> Program:
    """Starts to compact, copy or export a run."""
    begun = target.with_suffix(".begun")
    code = WORKING.format(str(run), str(target), how, str(begun))
    program = Program(ROOT, "-c", code)
    _until(begun.exists)
    return program


class Truth(NamedTuple):
    """Returns what the same training run records if it is not killed."""

    rows: dict[int, dict[SlotKey, bytes]]
    losses: dict[int, float]


def truth_of(run: Run) -> Truth:
    """Reads everything that is compared."""
    kpis = run.kpis()
    named = kpis[kpis.name == "loss"]
    rows = {
        int(chunk.steps[at]): {
            slot.key: chunk.aggregates[at, slot.id].tobytes()
            for slot in chunk.slots
            if not np.isnan(chunk.aggregates[at, slot.id]).all()
        }
        for chunk in run.chunks()
        for at in np.flatnonzero(chunk.train).tolist()
    }
    assert rows.keys() == {*run.steps.tolist()}
    return Truth(rows, dict(zip(named.step, named.value, strict=True)))


def differences(run: Run, truth: Truth) -> list[str]:
    """Returns how a run differs from that of the undisturbed training."""
    found = []
    mine = truth_of(run)
    for step, row in mine.rows.items():
        if step not in truth.rows:
            found.append(f"step {step} is none of the training")
        elif row != truth.rows[step]:
            found.append(f"other numbers at step {step}")
    found += [f"loss {s}" for s, v in mine.losses.items() if truth.losses.get(s) != v]
    return found


def seen(folder: Path) -> int:
    """Returns how many records a reader sees now."""
    try:
        return sum(len(run.steps) for run in _members(comgra.open_run(_run_of(folder))))
    except (comgra.ComgraError, FileNotFoundError, StopIteration):  # there is no run yet
        return 0


def _members(run: Run) -> list[Run]:
    return [run.rank(number) for number in run.ranks] if len(run.ranks) > 1 else [run]


def _run_of(folder: Path) -> Path:
    found = sorted(path for path in (folder / "g").iterdir() if path.is_dir())
    return next(path for path in found if not path.name.startswith("."))


class Kill(NamedTuple):
    """The outcome of one kill."""

    problems: list[str]
    is_in_work: bool


def _ends(programs: Sequence[Program]) -> bool:
    """Kills programs; returns whether each of them was ended by the kill."""
    for program in programs:
        program.kill()
    return all(program.process.exitcode == -signal.SIGKILL for program in programs)


def kill_training(kind: str, folder: Path, truth: Truth, chance: random.Random) -> Kill:
    """Kills a training run; one kind is resumed three times and killed in mid-work each time."""
    problems: list[str] = []
    in_work = True
    for _ in range(3 if kind == "resume" else 1):
        wanted = seen(folder) + chance.randrange(
            1, STEPS // (4 if kind in ("resume", "ring") else 1)
        )
        programs = training(folder, kind)
        ended = time.monotonic() + PATIENCE
        acknowledged = 0
        while acknowledged < wanted and any(p.process.is_alive() for p in programs):
            acknowledged = seen(folder)  # where it resumes, new steps replace later ones
            assert time.monotonic() < ended, f"{kind}: {acknowledged} of {wanted} records"
        killed = _ends(programs)
        members = _members(comgra.open_run(_run_of(folder)))
        in_work = in_work and killed and all(run.state == "stopped" for run in members)
        problems += _looked_at(folder, kind, truth, acknowledged)
    return Kill(problems, in_work)


def _looked_at(folder: Path, kind: str, truth: Truth, acknowledged: int) -> list[str]:
    run = comgra.open_run(_run_of(folder))
    there = seen(folder)
    problems = (
        [f"{acknowledged} records were seen, {there} are left"] if there < acknowledged else []
    )
    for member in _members(run):
        problems += differences(member, truth)
        steps = member.steps.tolist()
        if kind in ("training", "ranks") and steps != list(range(len(steps))):
            problems.append(f"gaps: {steps}")
    return problems + _damages(_run_of(folder))


def _damages(run: Path) -> list[str]:
    verdict: Verdict = verify(run)
    return [str(damage) for damage in verdict.damages]


def kill_work(
    how: str, folder: Path, whole: Path, truth: Truth, chance: random.Random, seconds: float
) -> Kill:
    """Kills an operation on a finished run, and lets another one finish what it began."""
    run = Path(shutil.copytree(whole, folder / "run"))
    target = folder / "target"
    program = working(run, target, how)
    time.sleep(chance.uniform(0, seconds))  # any moment will do
    in_work = _ends([program])
    problems = differences(comgra.open_run(run), truth) + _damages(run)
    if how != "compact" and target.exists() and in_work and how == "copy":
        problems += differences(comgra.open_run(target), truth)  # complete or absent
    if how != "compact" and target.exists():
        (shutil.rmtree if target.is_dir() else Path.unlink)(target)
    done = working(run, target, how)
    done.process.join(PATIENCE)
    if done.process.exitcode != 0:
        problems.append(f"{how} again ended with {done.process.exitcode}")
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    problems += [f"left behind: {name}" for name in left]
    problems += differences(comgra.open_run(target if how == "copy" else run), truth)
    return Kill(problems, in_work)


def _until(condition: Callable[[], bool]) -> None:
    ended = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ended
        time.sleep(0.002)


def main(count: int, seed: int, kinds: tuple[str, ...] = KINDS) -> int:
    """Kills this many times in mid-work; prints the outcomes, and returns how many went wrong."""
    chance = random.Random(seed)
    wrong, late, killed = 0, Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (code,) = [p.ended().returncode for p in training(folder / "alone", "training")]
        assert code == 0
        whole = _run_of(folder / "alone")
        truth = truth_of(comgra.open_run(whole))
        seconds = {
            how: _seconds(how, whole, folder / f"timed-{how}") for how in WORK if how in kinds
        }
        while (number := killed.total()) < count:
            kind = kinds[number % len(kinds)]
            place = folder / f"{number}-{late[kind]}"
            place.mkdir()
            if kind in TRAININGS:
                kill = kill_training(kind, place, truth, chance)
            else:
                kill = kill_work(kind, place, whole, truth, chance, seconds[kind])
            (killed if kill.is_in_work else late)[kind] += 1
            assert late.total() < count + 10, f"most kills come too late: {late}"
            if kill.problems:
                wrong += 1
                sys.stdout.write(f"{number} {kind}: {kill.problems[:5]}\n")
            shutil.rmtree(place)
            sys.stdout.flush()
    for kind, times in killed.items():
        sys.stdout.write(f"{kind}: {times} killed in mid-work, {late[kind]} more too late\n")
    sys.stdout.write(f"{number} killed in mid-work, {late.total()} more too late, ")
    sys.stdout.write(f"{wrong} with something lost or wrong\n")
    return wrong


def _seconds(how: str, whole: Path, folder: Path) -> float:
    """Returns how long an operation takes once it has begun."""
    folder.mkdir()
    run = Path(shutil.copytree(whole, folder / "run"))
    program = working(run, folder / "target", how)
    begun = time.monotonic()
    program.process.join(PATIENCE)
    return time.monotonic() - begun


if __name__ == "__main__":
    chosen = tuple(sys.argv[3].split(",")) if len(sys.argv) > 3 else KINDS
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), chosen) > 0)
