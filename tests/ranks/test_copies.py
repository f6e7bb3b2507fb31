"""What several ranks hold alike is read from the first of them, and from others if that fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comgra_decl.query import Run, open_run
from comgra_decl.records import Piece, SlotInfo, SlotKey
from comgra_decl.store import RunWriter
from comgra_decl.store.view import View
from tests.store.test_damage import overwrite
from tests.store.truth import Truth, meta_of

RANKS, RECORDS = 4, 300  # more than a block
OUTPUT, WEIGHT, SHARD, LATE = range(4)
"""An activation; a parameter that is the same on all ranks; a parameter in two parts, each of which
two ranks hold; and a parameter that the first rank has not recorded in some steps."""

ABSENT = slice(40, 60)
"""Records in which the first rank has skipped the layer of the last parameter."""

EVALUATED = slice(100, 120)
"""Records of an evaluation, which have no parameters."""


def slot(number: int, rank: int) -> SlotInfo:
    key = SlotKey(f"node {number}", "output" if number == OUTPUT else "weight", 0, "forward")
    piece = Piece((rank % 2 * 3,), (3,)) if number == SHARD else None
    shape, batch_dim = ((2, 3), 0) if number == OUTPUT else ((6,), None)
    kind = "computed" if number == OUTPUT else "parameter"
    return SlotInfo(number, key, kind, "float32", shape, batch_dim, "Linear", piece=piece)


def write(folder: Path, change: Callable[[int, int, Any], None] = lambda *_: None) -> Path:
    """Write a run.

    Args:
        folder: where.
        change: changes a batch, given its rank and its first record, before it is committed.
    """
    for rank in range(RANKS):
        facts = {"run": "x", "world_size": RANKS, "recorded": [*range(RANKS)], "rank": rank}
        meta = meta_of(started=1.0, facts={"ranks": facts}, bins=4, tells_shapes=False)
        own, shared = Truth(rank, meta), Truth(0, meta)
        writer = RunWriter.create(folder / "ranks" / str(rank) if rank else folder, meta)
        for first in range(0, RECORDS, 20):
            span = slice(first, first + 20)
            chosen = [OUTPUT] if span == EVALUATED else [OUTPUT, WEIGHT, SHARD, LATE]
            if rank == 0 and span == ABSENT:
                chosen.remove(LATE)
            batch: Any
            like: Any
            batch, like = (t.batch(20, [OUTPUT, WEIGHT, SHARD, LATE]) for t in (own, shared))
            for field in ("aggregates", "samples", "counts", "ranges"):
                setattr(batch, field, getattr(batch, field).copy())
                getattr(batch, field)[:, 1:] = getattr(like, field)[:, 1:]
            batch.rows[1:] = 1
            batch.new_slots = [slot(each.id, rank) for each in batch.new_slots]
            if span == EVALUATED:
                batch.steps = [replace(info, mode="eval", type="eval") for info in batch.steps]
            change(rank, first, batch)
            _choose(batch, chosen)
            writer.commit([batch])
            for truth in (own, shared):
                truth.infos += batch.steps
        writer.close()
    return folder


def _choose(batch: Any, chosen: list[int]) -> None:
    """Leave out the other slots of a batch."""
    for field in ("aggregates", "samples", "counts", "ranges"):
        setattr(batch, field, getattr(batch, field)[:, chosen])
    batch.slots, batch.rows = batch.slots[chosen], batch.rows[chosen]
    batch.shapes = [batch.shapes[at] for at in chosen]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("copies") / "run")


@pytest.fixture
def run(folder: Path) -> Run:
    return open_run(folder)


@pytest.fixture
def asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ranks whose statistics have been read."""
    found: set[int] = set()
    real = View._read

    def reading(self: View, name: str, *index: Any, **options: Any) -> Any:
        if name.partition("/")[0] in ("agg", "smp", "hist"):
            place = Path(self._db.path).parent
            found.add(0 if place == folder.resolve() else int(place.name))
        return real(self, name, *index, **options)

    monkeypatch.setattr(View, "_read", reading)
    return found


READS: dict[str, Callable[[Run, int], Any]] = {
    "series": lambda run, at: run.slot(f"node {at}", role="weight").series("std"),
    "samples": lambda run, at: run.slot(f"node {at}", role="weight").samples("std"),
    "histograms": lambda run, at: run.slot(f"node {at}", role="weight").histograms(),
}


@pytest.mark.parametrize("what", READS)
def test_a_copy_is_read_from_the_first_rank(what: str, asked: set[int], run: Run) -> None:
    READS[what](run, WEIGHT)
    assert asked == {0}


@pytest.mark.parametrize("what", ["series", "histograms"])
def test_each_part_is_read_from_the_first_rank_that_has_it(
    what: str, asked: set[int], run: Run
) -> None:
    READS[what](run, SHARD)
    assert asked == {0, 1}


def test_an_activation_is_read_from_all_ranks(asked: set[int], run: Run) -> None:
    run.slot("node 0").series("std")
    assert asked == {*range(RANKS)}


def test_the_copies_are_compared_if_asked(asked: set[int], run: Run) -> None:
    assert run.rank_differences().empty
    assert asked == {*range(RANKS)}


def test_what_the_first_rank_has_skipped_is_read_from_another(run: Run) -> None:
    late = f"node {LATE}"
    first = run.rank(0).slot(late, role="weight").series("nonfinite")
    assert first.isna().sum() == 20
    joined = run.slot(late, role="weight").series("std")
    alone = run.rank(1).slot(late, role="weight").series("std")
    np.testing.assert_array_equal(joined, alone)
    np.testing.assert_array_equal(run.heat("std")[late].to_numpy()[:, 0], alone)
    step = int(run.steps[ABSENT.start])
    row = run.row(step).loc[late]["std"].to_numpy()
    np.testing.assert_array_equal(row, [alone.loc[step]])


@pytest.mark.parametrize(("number", "family"), [(WEIGHT, "agg"), (WEIGHT, "hist"), (WEIGHT, "smp")])
def test_a_damaged_copy_is_read_from_another_rank(
    number: int, family: str, folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    inner = {"agg": "0/0/0", "hist": "0/0/0", "smp": "0/0/0/0"}[family]
    overwrite(copy, f"{family}/blk/c/{inner}", b"garbage")
    overwrite(copy, f"{family}/row/c/290/{inner.partition('/')[2]}", b"garbage")
    whole, damaged = open_run(folder), open_run(copy)
    read = {"agg": "series", "hist": "histograms", "smp": "samples"}[family]
    expected, found = READS[read](whole, number), READS[read](damaged, number)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert damaged.damage


def test_replicated_parts_that_differ_are_named(tmp_path: Path) -> None:
    """The ranks that hold the second part drift apart; those with the first do not."""

    def drift(rank: int, first: int, batch: Any) -> None:
        if rank == 3 and first >= 200:
            batch.aggregates[:, SHARD] += 1

    (found,) = open_run(write(tmp_path / "run", drift)).rank_differences().to_dict("records")
    assert (found["node"], found["role"]) == (f"node {SHARD}", "weight")
    assert found["first_step"] >= 3 * 200
