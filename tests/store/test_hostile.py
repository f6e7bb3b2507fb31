"""A run folder from a stranger: nothing is believed, memory stays bounded, the process lives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from comgra_decl.store import RunWriter
from comgra_decl.store.database import Database, encode, new_context
from tests.store.test_damage import overwrite, sealed
from tests.store.truth import Truth

ROOT = Path(__file__).parents[2]
LIMIT = 4 << 30

SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
from comgra_decl.errors import ComgraError
from comgra_decl.store import Reader
told = "nothing"
try:
    view = Reader(sys.argv[1]).view
    view.heat("agg"), view.series("smp", 0, 0, 0), view.row("hist", 0), view.value(0, 0)
    view.samples(0), view.extra(0), view.scalars, view.structure("x")
except ComgraError as error:
    told = type(error).__name__
print(told)
"""


def change(key: str, **changes: object) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        found = Database(run, new_context(cache_bytes=0)).read_json(key)
        overwrite(run, key, encode({**found, **changes}, key))

    return apply


def replace(key: str, value: bytes) -> Callable[[Path], None]:
    return lambda run: overwrite(run, key, value)


def huge_arrays(run: Path) -> None:
    key = "arrays/000000000000.json"
    rows = Database(run, new_context(cache_bytes=0)).read_json(key)
    for row in rows:
        row["chunk"] = [1 << 20] * len(row["chunk"])
    overwrite(run, key, encode(rows, key))


def huge_samples(run: Path) -> None:
    key = "arrays/000000000000.json"
    rows = Database(run, new_context(cache_bytes=0)).read_json(key)
    for row in rows:
        if row["name"].startswith("smp"):
            row["shape"][2:] = [1 << 30, 1 << 10]
    overwrite(run, key, encode(rows, key))


def linked_away(run: Path) -> None:
    for file in (run / "trace.ocdbt" / "d").iterdir():
        file.unlink()
        file.symlink_to("/etc/passwd")


ATTACKS = {
    "more records than there can be": change("head", n=1 << 40),
    "many records that are not there": change("head", n=1 << 20),
    "no number of records": change("head", n="many"),
    "NaN records": replace("head", sealed(b'{"version": 2, "n": NaN}', "head")),
    "infinite time": change("head", time=float("inf")),
    "deep head": replace("head", sealed(b"[" * 200_000, "head")),
    "a list as head": replace("head", encode([1, 2], "head")),
    "a number of a million digits": replace("head", sealed(b"1" * 1_000_000, "head")),
    "slots of a wrong form": replace(
        "slots/000000000000.json", encode([{"node": []}], "slots/000000000000.json")
    ),
    "infinite statistics": change("meta/run.json", sample_count=float("inf")),
    "huge chunks": huge_arrays,
    "links out of the folder": linked_away,
    "facts of a wrong form": replace(
        "steps/000000000000.json", encode({"samples": 3}, "steps/000000000000.json")
    ),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    writer.commit([truth.batch(3, range(4))])
    writer.close()
    return tmp_path / "run"


def outcome(run: Path) -> str:
    command = [sys.executable, "-c", SCRIPT, str(run), str(LIMIT)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.strip()


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_run_is_refused_within_bounded_memory(run: Path, attack: str) -> None:
    before = set(run.parent.rglob("*"))
    ATTACKS[attack](run)
    known = before | set(run.parent.rglob("*"))
    assert outcome(run) in {"DamagedRunError", "FormatError"}
    assert set(run.parent.rglob("*")) == known, "reading wrote something"


def test_a_shape_that_nobody_has_memory_for_is_refused(run: Path) -> None:
    huge_samples(run)
    assert outcome(run) == "DamagedRunError"
