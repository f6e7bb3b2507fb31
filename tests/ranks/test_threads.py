"""Many threads read what multiple ranks have recorded, while more is being recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from comgra_decl.query.ranks.reader import JoinedReader
from comgra_decl.store import RunWriter
from tests.store.truth import Truth, meta_of

THREADS, SLOTS = 8, 200


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Makes threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_all_threads_see_the_same_records_and_slots(tmp_path: Path) -> None:
    ranks = []
    for rank in (0, 1):
        facts = {"ranks": {"rank": rank, "world_size": 2, "recorded": [0, 1]}}
        truth = Truth(rank, meta_of(facts=facts, bins=None, sample_count=0))
        folder = tmp_path / "run" if rank == 0 else tmp_path / "run" / "ranks" / "1"
        ranks.append((truth, RunWriter.create(folder, truth.meta)))
    reader, barrier = JoinedReader(tmp_path / "run"), Barrier(THREADS)
    with ThreadPoolExecutor(THREADS) as pool:
        for turn in range(10):
            for truth, writer in ranks:
                batch = truth.batch(1, range(SLOTS * (turn + 1)))
                writer.commit([batch])
                truth.keep([batch])

            def look(_: int) -> tuple[int, list[str], int]:
                barrier.wait()
                reader.poll()
                view = reader.view
                return id(view), [slot.key.node for slot in view.slots], view.n

            found = list(pool.map(look, range(THREADS)))
            assert len({view for view, _, _ in found}) == 1
            assert found[0][1] == [f"node {number}" for number in range(SLOTS * (turn + 1))]
            assert {n for _, _, n in found} == {turn + 1}
    for _, writer in ranks:
        writer.close()
