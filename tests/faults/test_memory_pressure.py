"""If the system refuses memory, training gets what is left and ends as it would untraced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked import forked

COMMON = """
import logging
import resource
import sys
import warnings

import torch

import comgra_decl as comgra
from comgra_decl.errors import NoMemoryError
from comgra_decl.record.memory_guard import LEFT, STARTING, demand
from tests.faults.program import SPEC, training
from tests.store.threads import until
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


def errors():
    found = [text for level, text in said if level >= logging.ERROR]
    return [text for text in found if not text.startswith("comgra: nonfinite")]


def prove(plain, found, session):
    \"\"\"Asserts that nothing differs and that one report was made, and returns it.\"\"\"
    limit(None)
    same(plain, found)
    assert attached() == before
    print("records", session.path and len(comgra.open_run(session.path).records))
    assert len(errors()) == 1, errors()
    return errors()[0]


before = attached()
"""

FILLING = """
def filling(told):
    \"\"\"Takes memory between two trainings, until hardly more is left than they need.\"\"\"
    first = training(told, 12)
    settle()  # a library that makes threads meanwhile would find what is taken at once
    taken = []
    try:
        while resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            demand(LEFT * 3 // 4)
            taken.append(torch.zeros(LEFT // 32, dtype=torch.uint8))
    except NoMemoryError:
        pass
    second = training(told, 12)
    return Outcome(first.losses + second.losses, second.tensors, second.settings, second.models)


settle = lambda: None
plain = seeded(filling, Told(listening=False))
for more in (STARTING // 2, STARTING + 8 * LEFT):
    said.clear()
    limit(more)
    with comgra.trace(EVERY, root=sys.argv[1], group="g") as session:
        writer = session._writer
        settle = lambda: until(lambda: writer is None or writer._bytes == 0)
        found = seeded(filling, Told(listening=False))
    text = prove(plain, found, session)
    assert "the system refuses" in text
    assert "ulimit -v" in text
"""


LATE = """
def twice(told):
    first = training(told, 12)
    between()
    second = training(told, 12)
    return Outcome(first.losses + second.losses, second.tensors, second.settings, second.models)


between = lambda: None
plain = seeded(twice, Told(listening=False))
with comgra.trace(EVERY, root=sys.argv[1], group="g") as session:

    def between():
        until(lambda: session._writer._bytes == 0)  # threads that it needs are there, too
        limit(-(2**26))  # some of what is reserved for training and for the next record

    found = seeded(twice, Told(listening=False))
assert "not enough memory is available" in prove(plain, found, session)
"""


@pytest.mark.slow
def test_tracing_stops_before_the_training_lacks_memory(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(COMMON + FILLING)
    done = forked(tmp_path, "program.py", "runs")
    assert done.returncode == 0, done.stderr
    without, some = done.stdout.splitlines()
    assert without == "records None", "there was too little to begin with"
    assert 12 <= int(some.split()[1]) < 2 * 12 + 12


def test_a_limit_that_comes_while_tracing_leaves_the_training_what_it_needs(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(COMMON + LATE)
    done = forked(tmp_path, "program.py", "runs")
    assert done.returncode == 0, done.stderr
    assert 12 <= int(done.stdout.split()[1]) < 2 * 12
