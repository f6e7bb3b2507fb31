"""An untrusted run folder: nothing is trusted, memory stays bounded, the process survives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from comgra_decl.errors import DamagedRunError
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.database import Database, encode, new_context
from comgra_decl.store.verify import verify
from tests.store.test_damage import change_json, overwrite, sealed
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
    return lambda run: change_json(run, key, **changes)


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


def change_slots(**changes: object) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        key = "slots/000000000000.json"
        rows = Database(run, new_context(cache_bytes=0)).read_json(key)
        overwrite(run, key, encode([{**row, **changes} for row in rows], key))

    return apply


IMPOSSIBLE = {
    "a billion bins": ("meta/run.json", change("meta/run.json", bins=10**9)),
    "no bin": ("meta/run.json", change("meta/run.json", bins=0)),
    "other bins": ("meta/run.json", change("meta/run.json", bins=5)),
    "a trillion samples": ("meta/run.json", change("meta/run.json", sample_count=10**12)),
    "other samples": ("meta/run.json", change("meta/run.json", sample_count=1)),
    "one statistic thrice": ("meta/run.json", change("meta/run.json", statistics=["a"] * 3)),
    "a config 200 deep": (
        "meta/run.json",
        change("meta/run.json", config={"a": json.loads("[" * 200 + "]" * 200)}),
    ),
    "a tensor of 1e30 elements": ("slots", change_slots(shape=[10**15, 10**15])),
    "a tensor of 1e16 elements": ("slots", change_slots(shape=[10**8, 10**8])),
    "a negative extent": ("slots", change_slots(shape=[-1])),
    "an extent of text": ("slots", change_slots(shape=["a"])),
    "a batch dim that there is not": ("slots", change_slots(batch_dim=99)),
    "a batch dim of a number": ("slots", change_slots(shape=[], batch_dim=1)),
    "a name that is none": ("slots", change_slots(node=7)),
    "a million names": ("slots", change_slots(names=["n"] * 10**6)),
    "sessions of a billion records": (
        "head",
        change("head", sessions=[{"record": 10**9, "scalar": 0, "note": 0, "time": 1.0}]),
    ),
    "a time before there was any": ("head", change("head", time=-1e308)),
    "a document of no revision": ("head", change("head", documents={"report": []})),
}


@pytest.mark.parametrize("attack", IMPOSSIBLE)
def test_what_cannot_be_is_damage_that_is_named(run: Path, attack: str) -> None:
    where, apply = IMPOSSIBLE[attack]
    apply(run)
    with pytest.raises(DamagedRunError, match=f"'{where}") as told:
        _ = Reader(run).view
    assert len(str(told.value)) < 600
    verdict = verify(run)
    assert not verdict.whole
    assert verdict.damages[0].where.startswith(where)
    if where != "meta/run.json":  # which is written once
        assert verdict.whole_records == 3, "what was before it can be rescued"


DOCUMENTS: dict[str, list[object]] = {
    "findings": [
        [1, 2],
        {"findings": [], "unchecked": 3},
        {"findings": [{"rule": "a"}]},
        {"findings": [], "unchecked": {}, "readings": {"falling": 3}},
    ],
    "modules": ["abc", [5], [{"node": "a", "parameters": {"w": {"shape": ["x"]}}}]],
    "report": [[], {"entries": 5}, {"refused": [1]}, {"warnings": "abc"}],
    "keep": [[], {"steps": 5}, {"steps": [[1]]}, {"unseen": [["a", 2]]}],
    "ranks": [[], {"rank": "x", "recorded": []}, {"rank": 0, "recorded": 5}],
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_of_another_form_is_damage(run: Path, name: str) -> None:
    key = f"docs/{name}.json"
    change_json(run, "head", documents={name: 3})
    for content in DOCUMENTS[name]:
        overwrite(run, key, encode(content, f"{key}@3"))
        view = Reader(run).view
        with pytest.raises(DamagedRunError, match=f"'{key}' is invalid"):
            view.read_document(name)
        assert view.document(name) is None
        assert any(f"'{key}' is invalid" in loss for loss in view.damage)
        assert verify(run).damages[0].where == key


def test_a_key_that_is_too_large_is_refused_unread(run: Path) -> None:
    overwrite(run, "head", b" " * (20 << 20))
    with pytest.raises(DamagedRunError, match="is larger than the maximum of 16777216 bytes"):
        Reader(run)


def test_a_shape_that_nobody_has_memory_for_is_refused(run: Path) -> None:
    huge_samples(run)
    assert outcome(run) == "DamagedRunError"
