"""A heat map that is joined in tiles has the numbers of the series of each tensor."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from comgra_decl.query import Run, open_run
from comgra_decl.query.ranks import view as joined_view
from comgra_decl.store import RunWriter
from tests.store.test_damage import overwrite
from tests.store.truth import Truth, meta_of

RANKS, SLOTS = 3, 11
RECORDS = 300  # more than a block


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks: the second has its slots later, the third lacks some, and skips records."""
    folder = tmp_path_factory.mktemp("tiles") / "run"
    for rank in range(RANKS):
        facts = {"run": "x", "world_size": RANKS, "recorded": list(range(RANKS)), "rank": rank}
        truth = Truth(seed=rank, meta=meta_of(started=1.0, facts={"ranks": facts}, bins=None))
        writer = RunWriter.create(folder / "ranks" / str(rank) if rank else folder, truth.meta)
        slots = list(range(SLOTS))
        for first in range(0, RECORDS, 20):
            if rank == 1:
                chosen = slots[:4] if first < 100 else slots
            else:
                chosen = slots[:-2] if rank == 2 else slots
            batch = truth.batch(20, chosen)
            if rank == 2 and first == 60:
                truth.infos += batch.steps
                continue  # these records are missing on this rank
            writer.commit([batch])
            truth.keep([batch])
        writer.close()
    return folder


@pytest.fixture(params=[(1 << 20, 1 << 17, 64), (400, 130, 4), (1000, 7, 3)])
def tiled(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The run, read in tiles of several sizes."""
    for name, value in zip(("_READ", "_JOINED", "_SLOTS"), request.param, strict=True):
        monkeypatch.setattr(joined_view, name, value)
    return open_run(folder)


@pytest.mark.parametrize("over_batch", ["mean", "std", "abs_max"])
def test_tiles_have_the_numbers_of_the_series(tiled: Run, over_batch: str) -> None:
    assert len(tiled.steps) == RECORDS - 20
    heat = tiled.heat("std", over_batch=over_batch)
    assert heat.shape == (RECORDS - 20, SLOTS)
    for node in tiled.nodes:
        series = tiled.slot(node).series("std", over_batch=over_batch)
        np.testing.assert_array_equal(heat[node].to_numpy()[:, 0], series.to_numpy())
    assert heat.notna().to_numpy().any(0).all()
    assert tiled.damage == []


def test_damage_in_one_rank_is_missing_in_the_tiles_and_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    overwrite(copy / "ranks" / "1", "agg/blk/c/0/0/0", b"garbage")
    overwrite(copy / "ranks" / "1", "agg/row/c/30/0/0", b"garbage")
    whole, expected = open_run(copy), open_run(folder).heat("mean")
    monkeypatch.setattr(joined_view, "_READ", 700)
    heat = whole.heat("mean")
    lost = heat.isna() & expected.notna()
    kept = ~lost.to_numpy()
    np.testing.assert_array_equal(heat.to_numpy()[kept], expected.to_numpy()[kept])
    assert lost.to_numpy().any()
    assert whole.damage
    for node in whole.nodes:  # as where the tensors are read one by one
        series = whole.slot(node).series("mean")
        np.testing.assert_array_equal(heat[node].to_numpy()[:, 0], series.to_numpy())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 64 ranks have fewer records than those of 4, and as many numbers."""
    monkeypatch.setattr(joined_view, "_READ", 1 << 17)
    monkeypatch.setattr(joined_view, "_JOINED", 1 << 15)
    batch = Truth(meta=meta_of(bins=None, sample_count=0)).batch(2048, range(16))
    peaks = {}
    for ranks in (4, 64):
        folder = tmp_path / f"of {ranks}"
        for rank in range(ranks):
            facts = {"run": "x", "world_size": ranks, "recorded": [*range(ranks)], "rank": rank}
            meta = meta_of(started=1.0, facts={"ranks": facts}, bins=None, sample_count=0)
            writer = RunWriter.create(folder / "ranks" / str(rank) if rank else folder, meta)
            writer.commit([batch])
            writer.close()
        run = open_run(folder)
        assert len(run.steps) == 2048
        tracemalloc.start()
        try:
            assert run.heat("std").shape == (2048, 16)
            peaks[ranks] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peaks[64] <= 1.5 * peaks[4], peaks
