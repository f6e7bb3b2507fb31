"""A system that refuses memory: the training has the last of it, and ends as it would alone."""

from __future__ import annotations

from pathlib import Path

from tests.launch.programs import python

PROGRAM = """
import logging
import resource
import sys
import warnings

import torch

import comgra_decl as comgra
from comgra_decl.errors import StoreError
from comgra_decl.launch.room import LEFT, STARTING, demand
from tests.faults.program import SPEC, training
from tests.ways.proof import Outcome, Told, attached, same, seeded

warnings.simplefilter("ignore")
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append((record.levelno, record.getMessage()))
logging.getLogger("comgra_decl").addHandler(handler)
EVERY = {**SPEC, "schedule": {"first": 100}, "store": {"commit_interval": 0.0}}


def addresses():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def limit(more):
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard if more is None else addresses() + more, hard))


def filling(told):
    \"\"\"Takes memory between two trainings, until hardly more is left than they need.\"\"\"
    first = training(told, 12)
    taken = []
    try:
        while resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            demand(LEFT // 2)
            taken.append(torch.zeros(LEFT // 32, dtype=torch.uint8))
    except StoreError:
        pass
    second = training(told, 12)
    return Outcome(first.losses + second.losses, second.tensors, second.settings, second.models)


plain = seeded(filling, Told(listening=False))
before = attached()
for more in (STARTING // 2, STARTING + 3 * LEFT):
    said.clear()
    limit(more)
    with comgra.trace(EVERY, root=sys.argv[1], group="g") as session:
        found = seeded(filling, Told(listening=False))
    limit(None)
    same(plain, found)
    assert attached() == before
    errors = [text for level, text in said if level >= logging.ERROR]
    assert len(errors) == 1, errors
    assert "the system refuses" in errors[0]
    assert "ulimit -v" in errors[0]
    print("records", session.path and len(comgra.open_run(session.path).records))
"""


def test_tracing_stops_before_the_training_lacks_memory(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = python(tmp_path, "program.py", "runs", env=path)
    assert done.returncode == 0, done.stderr
    without, some = done.stdout.splitlines()
    assert without == "records None", "there was too little to begin with"
    assert 12 <= int(some.split()[1]) < 2 * 12 + 12
