"""Damage on one rank hides what it affects in all ranks together, and nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from comgra_decl.cli.main import main
from comgra_decl.errors import DamagedRunError, Exit
from comgra_decl.query import open_run
from comgra_decl.query.view import RecordView
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.copying import copy_run
from comgra_decl.store.database import Database, new_context
from tests.store.test_damage import overwrite
from tests.store.truth import Truth, meta_of, same

SLOTS, COPY = 40, 2
"""The slots of both ranks; one is a parameter, which all ranks share."""

HIT = slice(256, 512)
"""The records of the second block, which are stored only in the block; step = 3 * record."""


def write_rank(folder: Path, rank: int) -> None:
    meta = meta_of(
        spec={"histogram": {"bins": 4, "elements": 4096}},
        facts={"ranks": {"rank": rank, "world_size": 2, "recorded": [0, 1]}},
    )
    truth = Truth(rank, meta)
    writer = RunWriter.create(folder, meta)
    for size in (256, 256, 20):
        batch = truth.batch(size, range(SLOTS))
        batch.new_slots = [
            replace(slot, kind="parameter") if slot.id == COPY else slot for slot in batch.new_slots
        ]
        writer.commit([batch])
        truth.keep([batch])
    writer.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("group") / "run"
    write_rank(run, 0)
    write_rank(run / "ranks" / "1", 1)
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return copy_run(whole, tmp_path / "copy")


def damage(database: Path, array: str, *chunk: int) -> int:
    """Damages the chunk with these indices (others: 0); returns how many slots it contains."""
    form = Reader(database).view.tables.forms[array]
    at = [*chunk, *[0] * (len(form.shape) - len(chunk))]
    key = f"{array}/c/" + "/".join(map(str, at))
    assert Database(database, new_context(cache_bytes=0)).read_bytes(key), key
    overwrite(database, key, b"rubbish")
    return form.chunk[1]


def view_of(run: Path) -> RecordView:
    return open_run(run)._snapshot.view


def statistics(run: Path) -> NDArray[np.float32]:
    """Returns all statistics of all ranks together, [records, slots, columns]."""
    view = view_of(run)
    return np.stack([view.heat("agg", column) for column in range(len(view.meta.columns))], -1)


@pytest.mark.parametrize(
    ("column", "taken_by"),
    [(3, (3, 4)), (5, (5,)), (6, (6, 7)), (9, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9))],
)
def test_what_takes_a_damaged_column_of_a_rank_is_missing(
    whole: Path, run: Path, column: int, taken_by: tuple[int, ...]
) -> None:
    """A deviation needs the means; the numbers of samples (column 9) are the weights of all."""
    expected = statistics(whole)
    width = damage(run / "ranks" / "1", "agg/blk", 1, 0, column)
    gone = np.zeros(expected.shape, bool)
    for taking in taken_by:
        gone[HIT, :width, taking] = True
    gone[:, COPY] = False  # the other rank has it
    expected[gone] = np.nan
    view = view_of(run)
    for number in range(expected.shape[-1]):
        assert same(view.heat("agg", number), expected[..., number]), number
        assert same(view.series("agg", 0, number), expected[:, 0, number]), number
        assert same(view.series("agg", COPY, number), expected[:, COPY, number]), number
    assert same(view.rows("agg", 250, 270), expected[250:270])
    assert same(view.row("agg", 300), expected[300])
    assert all(loss.startswith("rank 1: ") for loss in view.damage)
    assert open_run(run).rank_differences().shape == open_run(whole).rank_differences().shape


def test_of_copies_another_rank_is_shown(run: Path) -> None:
    other = view_of(run / "ranks" / "1").heat("agg", 3)[:, COPY]
    damage(run, "agg/blk", 1, 0, 3)
    view = view_of(run)
    assert same(view.heat("agg", 3)[HIT, COPY], other[HIT])
    assert same(view.series("agg", COPY, 3)[HIT], other[HIT])
    assert same(view.row("agg", 400)[COPY, 3], other[400])


def test_a_damaged_row_of_one_rank_leaves_what_is_the_same_on_all(whole: Path, run: Path) -> None:
    step = 3 * 520
    before = open_run(whole).row(step)
    damage(run / "ranks" / "1", "agg/row", 520)
    after = open_run(run).row(step)
    assert after.index.get_level_values("node").tolist() == [f"node {COPY}"]
    assert same(after.to_numpy(), before.loc[[f"node {COPY}"]].to_numpy())
    assert same(open_run(run).row(step - 3).to_numpy(), open_run(whole).row(step - 3).to_numpy())


def test_samples_of_the_other_rank_are_there(whole: Path, run: Path) -> None:
    before = view_of(whole).rows("smp", 0, 532)  # [records, slots, 2 ranks x 2 samples, 3]
    width = damage(run / "ranks" / "1", "smp/blk", 1, 0, 0, 1)
    expected = before.copy()
    expected[HIT, :width, 2:, 1] = np.nan
    expected[:, COPY] = before[:, COPY]
    view = view_of(run)
    assert same(view.rows("smp", 0, 532), expected)
    for sample in range(4):
        assert same(view.series("smp", 1, sample, 1), expected[:, 1, sample, 1])
    assert same(view.row("smp", 300, 0), expected[300, 0])


@pytest.mark.parametrize("array", [("hist/blk", 1), ("agg/blk", 1, 0, 11)])
def test_histograms_are_not_those_of_some_ranks(
    whole: Path, run: Path, array: tuple[str, *tuple[int, ...]]
) -> None:
    before = view_of(whole).rows("hist", 0, 532)
    width = damage(run / "ranks" / "1", *array)
    expected = before.copy()
    expected[HIT, :width] = 0
    expected[:, COPY] = before[:, COPY]
    view = view_of(run)
    assert same(view.rows("hist", 0, 532), expected)
    steps, counts, _ = open_run(run).slot("node 1").histograms()
    assert steps.tolist() == [3 * at for at in range(532) if at not in range(256, 512)]
    assert same(counts, np.delete(before[:, 1], np.arange(256, 512), 0))
    assert len(open_run(run).slot(f"node {COPY}").histograms()[0]) == 532
    assert width >= SLOTS or len(open_run(run).slot(f"node {width}").histograms()[0]) == 532
    with pytest.raises(DamagedRunError, match="damaged"):
        open_run(run).slot("node 1").histogram(3 * 300)
    for chunk in open_run(run).chunks():
        found = chunk.histograms(1)
        assert found is not None
        lost = (chunk.steps >= 3 * 256) & (chunk.steps < 3 * 512)
        assert np.isnan(found[1][lost]).all()
        assert not np.isnan(found[1][~lost]).all(1).any()


def other(run: Path, folder: Path, facts: dict[str, object] | None) -> None:
    """Replaces rank 1's database with another one."""
    meta = meta_of(facts={} if facts is None else {"ranks": facts})
    truth = Truth(9, meta)
    writer = RunWriter.create(folder, meta)
    writer.commit([truth.batch(20, range(SLOTS))])
    writer.close()
    shutil.rmtree(run / "ranks" / "1")
    shutil.move(folder, run / "ranks" / "1")


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (None, "is a run of one process"),
        ({"rank": 0, "world_size": 2, "recorded": [0, 1]}, "belongs to rank 0"),
        ({"rank": 1, "world_size": 4, "recorded": [0, 1]}, "from another training"),
        ({"rank": 1, "world_size": 2, "recorded": [0, 1], "run": "b"}, "from another training"),
    ],
)
def test_what_is_no_rank_of_this_training_is_not_joined_with_it(
    run: Path,
    tmp_path: Path,
    facts: dict[str, object] | None,
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other(run, tmp_path / "other", facts)
    with pytest.raises(DamagedRunError, match=why):
        open_run(run)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run)])
    assert ended.value.code == Exit.WANTING
    assert why in " ".join(capsys.readouterr().out.split())
    assert len(open_run(run / "ranks" / "1").records) == 20


def test_a_link_in_the_place_of_a_rank_is_refused(run: Path, whole: Path) -> None:
    shutil.rmtree(run / "ranks" / "1")
    (run / "ranks" / "1").symlink_to(whole / "ranks" / "1")
    with pytest.raises(DamagedRunError, match="is a link"):
        open_run(run)
