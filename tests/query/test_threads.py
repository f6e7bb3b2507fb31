"""Many threads read one run while it is being written; each sees only complete records."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from comgra_decl.query import Run, open_run
from comgra_decl.records import SlotInfo
from tests.query.test_run import expected
from tests.support.fake_run import FakeRun

THREADS = 8
STEPS = 60


def test_many_threads_read_a_live_run(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=("embed", "head"))
    fake.write(2, commit=1)
    run, ended = open_run(fake.path), threading.Event()
    head = next(slot for slot in fake.slots if slot.key == ("head", "output", 0, "forward"))
    with ThreadPoolExecutor(THREADS + 1) as pool:
        readers = [
            pool.submit(_read, run, fake, head, ended, _READS[number % len(_READS)])
            for number in range(THREADS)
        ]
        writer = pool.submit(fake.write, STEPS, commit=2)
        writer.result()
        ended.set()
        counts = [reader.result() for reader in readers]
    assert all(count > 0 for count in counts)
    assert run.refresh() in (True, False)
    assert run.steps.tolist() == list(range(STEPS + 2))
    fake.close()


def _read(
    run: Run,
    fake: FakeRun,
    head: SlotInfo,
    ended: threading.Event,
    look: Callable[[Run, FakeRun, SlotInfo, int], None],
) -> int:
    """Reads repeatedly; returns how often."""
    count = 0
    while not ended.is_set() or not count:
        run.refresh()
        steps = run.steps
        assert steps.tolist() == list(range(len(steps)))
        look(run, fake, head, int(steps[-1]))
        count += 1
    return count


def _row(run: Run, fake: FakeRun, head: SlotInfo, step: int) -> None:
    truth = expected(fake, head, step)[0][:, 0]
    assert np.array_equal(run.row(step).loc[tuple(head.key), run.statistics], truth)


def _series(run: Run, fake: FakeRun, head: SlotInfo, step: int) -> None:
    series = run.series("head", "std")
    assert series.notna().all()
    rank = run.statistics.index("std")
    assert series[step] == expected(fake, head, step)[0][rank, 0]


def _value(run: Run, fake: FakeRun, head: SlotInfo, step: int) -> None:
    value = run.value("head", step)
    tensor = fake.tensor(head, step)
    assert all(any(np.array_equal(one, sample) for sample in tensor) for one in value)


def _overview(run: Run, fake: FakeRun, head: SlotInfo, step: int) -> None:
    heat = run.heat("mean")
    assert set(heat.columns) <= {tuple(slot.key) for slot in fake.slots}
    assert heat[tuple(head.key)].notna().all()
    assert heat.shape[0] > step
    assert len(run.kpis()) >= step


_READS = (_row, _series, _value, _overview)
