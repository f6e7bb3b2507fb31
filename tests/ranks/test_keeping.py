"""Verifying, compacting, copying and exporting runs that several programs have written."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from comgra_decl.errors import StoreError
from comgra_decl.export import export_run
from comgra_decl.query import Run, open_run
from comgra_decl.records import RESUMED, Note, ScalarBatch
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.appending import append_to
from comgra_decl.store.compaction import compact
from comgra_decl.store.copying import copy_run, databases
from comgra_decl.store.database import newest_version
from comgra_decl.store.layout import SESSION_KEY
from comgra_decl.store.locking import settled
from comgra_decl.store.verify import verify
from tests.cli.test_commands import done
from tests.store.test_compaction import damage
from tests.store.truth import Truth, meta_of
from tests.support.shortened import shortened

SLOTS = 3


def facts_of(rank: int) -> dict[str, Any]:
    return {"ranks": {"rank": rank, "world_size": 3, "recorded": [0, 1, 2]}}


def from_step(truth: Truth, records: int, first: int) -> Any:
    """Returns a batch of records of the training steps from `first` on."""
    batch = truth.batch(records, range(SLOTS), values={1: np.arange(6, dtype="f4").reshape(2, 3)})
    for number, info in enumerate(batch.steps):
        info.step = first + number
    return batch


def write_rank(folder: Path, rank: int) -> None:
    """600 records in 6 commits; then a second session that resumes at step 500 and ends at 719."""
    truth = Truth(rank, meta_of(facts=facts_of(rank), spec=SPEC))
    writer = RunWriter.create(folder, truth.meta)
    for number in range(6):
        writer.commit([from_step(truth, 100, 100 * number)])
    writer.close()
    writer, past = append_to(folder, meta_of(facts=facts_of(rank), spec=SPEC))
    assert past.step == 599
    note = Note(500, RESUMED, 1.0, "goes on; long enough for a key of its own" * 9)
    writer.commit(
        [from_step(truth, 220, 500)],
        [ScalarBatch(np.array([500]), np.ones(1), ["a"], ["train"], [note])],
    )
    writer.close()


SPEC = {"histogram": {"bins": 4, "elements": 4096}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of three ranks with two sessions each; the records of steps 500 to 599 exist twice."""
    path = tmp_path_factory.mktemp("group") / "run"
    write_rank(path, 0)
    write_rank(path / "ranks" / "1", 1)
    (path / "spec.yaml").write_text("stats: [mean]\n")
    return path


def compacted(run: Path, target: Path) -> Path:
    copy = copy_run(run, target)
    for part in databases(copy):
        compact(part)
    return copy


COPIES: dict[str, Callable[[Path, Path], Path]] = {
    "copied": copy_run,
    "copied small": lambda run, target: copy_run(run, target, compact=True),
    "compacted": compacted,
}


@pytest.fixture(scope="module", params=shortened(reversed(COPIES), tried=1))
def made(
    run: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """A copy that must not be changed."""
    return COPIES[request.param](run, tmp_path_factory.mktemp("made") / "copy")


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def told(run: Run) -> dict[str, Any]:
    """Returns everything that a run shows about records and sessions."""
    chunks = list(run.chunks())
    return {
        "records": run.records,
        "sessions": run.sessions,
        "ranks": run.ranks,
        "missing": run.missing_ranks,
        "heat": run.heat("std"),
        "samples": run.slot("node 1").samples("mean")[run.sample_count - 1],
        "value": run.value("node 1", 650),
        "part": run.value("node 1", 650, part=np.s_[-1, :2]),
        "sample": run.value("node 1", 650, sample=run.sample_count - 1, part=np.s_[1:]),
        "notes": run.notes(),
        "chunks": np.concatenate([chunk.aggregates for chunk in chunks]),
        "steps": np.concatenate([chunk.steps for chunk in chunks]),
    }


def agree(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, pd.DataFrame | pd.Series):
            assert value.equals(other[name]), name
        else:
            assert np.array_equal(value, other[name], equal_nan=name == "chunks"), name


def test_every_rank_and_all_together_read_the_same(run: Path, copy: Path) -> None:
    agree(told(open_run(copy)), told(open_run(run)))
    for rank in (0, 1):
        agree(told(open_run(copy).rank(rank)), told(open_run(run).rank(rank)))
    joined = told(open_run(copy))
    assert np.array_equal(joined["part"], joined["value"][-1, :2])
    assert np.array_equal(joined["sample"], joined["value"][-1, 1:])
    assert (copy / "spec.yaml").read_text() == (run / "spec.yaml").read_text()


def test_what_the_sessions_were_is_kept(run: Path, copy: Path) -> None:
    assert [path.relative_to(copy) for path in databases(copy)] == [Path(), Path("ranks/1")]
    for part in databases(copy):
        before, after = Reader(run / part.relative_to(copy)), Reader(part)
        assert after.head["sessions"] == before.head["sessions"]
        assert len(after.head["sessions"]) == 1
        assert after.writer == before.writer
        key = SESSION_KEY.format(2)
        session = after.database.read_json(key)
        assert session == before.database.read_json(key)
        assert session["started"] > after.meta.started
        verdict = verify(part)
        assert verdict.whole
        assert verdict.records == 820


@pytest.mark.slow
def test_a_copy_can_be_gone_on_with(copy: Path) -> None:
    """The open blocks are restored, including those of a compacted run."""
    for rank, part in enumerate(databases(copy)):
        before = Reader(part).view
        truth = Truth(7, meta_of(facts=facts_of(rank), spec=SPEC))
        writer, past = append_to(part, truth.meta)
        assert past.step == 719
        truth.announced = {slot.id for slot in past.slots}
        batch = from_step(truth, 300, 720)
        writer.commit([batch])
        writer.close()
        view = Reader(part).view
        assert np.array_equal(view.heat("agg", 2)[:820], before.heat("agg", 2), equal_nan=True)
        expected = batch.aggregates[:, :, 0, 2]
        assert np.array_equal(view.heat("agg", 2)[820:], expected, equal_nan=True)
        assert verify(part).whole
    assert open_run(copy).steps.tolist() == list(range(1020))


def test_what_a_later_session_replaced_is_in_no_chunk_and_no_export(
    run: Path, tmp_path: Path
) -> None:
    opened = open_run(run)
    steps = [int(step) for chunk in opened.chunks() for step in chunk.steps]
    assert steps == list(range(720))
    series = opened.series("node 0", "mean")
    assert series.index.tolist() == steps
    export_run(opened, tmp_path / "out", "csv")
    table = pd.read_csv(tmp_path / "out" / "statistics.csv")
    assert sorted(set(table["step"])) == steps
    assert len(table) == 720 * SLOTS
    export_run(opened, tmp_path / "out.npz", "npz")
    with np.load(tmp_path / "out.npz") as arrays:
        assert len(arrays["statistics"]) == 720
    one = list(opened.rank(1).chunks())
    assert [int(step) for chunk in one for step in chunk.steps] == steps


@pytest.mark.slow
def test_the_commands_do_all_ranks(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = told(open_run(run))
    assert done("cp", str(run), str(tmp_path / "copy")) == 0
    assert done("compact", str(tmp_path / "copy")) == 0
    capsys.readouterr()
    assert done("verify", str(tmp_path / "copy"), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["records"] for one in said["databases"]] == [820, 820]
    agree(told(open_run(tmp_path / "copy")), before)
    damage(tmp_path / "copy" / "ranks" / "1", "agg/row/c/819/0/0")
    assert done("verify", str(tmp_path / "copy"), "--json") == 3
    said = json.loads(capsys.readouterr().out)
    assert [one["whole"] for one in said["databases"]] == [True, False]


def test_show_says_ranks_sessions_and_losses(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert done("show", str(run), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["ranks"], said["missing_ranks"]) == ([0, 1], [2])
    assert [session["step"] for session in said["sessions"]] == [None, 500]
    assert "damage" not in said["report"]
    copy = copy_run(run, tmp_path / "copy")
    damage(copy / "ranks" / "1", "notes/000000000000.json")
    assert done("show", str(copy)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "ranks 0, 1" in out
    assert "no data from rank 2" in out
    assert "from step 500" in out
    assert "lost rank 1: notes from row 0 on" in out
    (loss,) = open_run(copy).report["damage"]
    assert loss.startswith("rank 1: notes from row 0 on: ")
    assert open_run(copy).rank(0).report.get("damage") is None


@pytest.mark.slow
def test_of_a_compacted_run_that_went_on_the_newest_whole_version_is_found(
    run: Path, tmp_path: Path
) -> None:
    """The versions before compaction are parts of a run, not complete ones."""
    part = copy_run(run, tmp_path / "copy") / "ranks" / "1"
    compact(part)
    compacted_version = newest_version(part)
    damage(copy_run(part, tmp_path / "one"), "agg/row/c/819/0/0")
    verdict = verify(tmp_path / "one")
    assert (verdict.whole, verdict.whole_version) == (False, None)
    meta = meta_of(facts=facts_of(1), spec=SPEC)
    writer, past = append_to(part, meta)
    truth = Truth(1, meta)
    truth.announced = {slot.id for slot in past.slots}
    writer.commit([from_step(truth, 5, 720)])
    writer.close()
    damage(part, "agg/row/c/822/0/0")
    verdict = verify(part)
    assert compacted_version is not None
    assert (verdict.whole_records, verdict.whole_version) == (820, compacted_version + 1)


@pytest.mark.slow
def test_a_resumption_while_a_run_is_compacted_keeps_every_commit(
    run: Path, tmp_path: Path
) -> None:
    """The writer is not blocked; compaction notices it and leaves the run as it is."""
    part = copy_run(run, tmp_path / "copy") / "ranks" / "1"
    writers: list[RunWriter] = []

    def meanwhile(what: str, at: int, total: int) -> None:
        if what == "checking" and at == total:
            writers.append(append_to(part, meta_of(facts=facts_of(1), spec=SPEC))[0])

    with pytest.raises(StoreError, match="changed in the meantime"):
        compact(part, progress=meanwhile)
    truth = Truth(1, meta_of())
    truth.announced = set(range(SLOTS))
    writers[0].commit([from_step(truth, 5, 720)])
    writers[0].close()
    assert Reader(part).view.n == 825
    assert verify(part).whole


@pytest.mark.slow
def test_a_resumption_waits_until_a_compacted_run_is_in_its_place(
    run: Path, tmp_path: Path
) -> None:
    part = copy_run(run, tmp_path / "copy") / "ranks" / "1"
    meta = meta_of(facts=facts_of(1), spec=SPEC)
    thread = threading.Thread(target=lambda: append_to(part, meta)[0].close())
    with settled(part):
        thread.start()
        time.sleep(0.2)
        assert len(Reader(part).head["sessions"]) == 1
    thread.join()
    assert len(Reader(part).head["sessions"]) == 2
    compact(part)
    assert verify(part).whole
