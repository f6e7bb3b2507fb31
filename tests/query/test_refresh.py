"""A live run grows when it is refreshed, and only then."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from comgra_decl.query import Run, open_run
from tests.support.fake_run import FakeRun

NODES = ("embed", "aux")


def test_what_is_new_appears_with_refresh(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    run = open_run(tmp_path / "run")
    assert (run.state, len(run.steps), run.nodes, run.types) == ("waiting", 0, [], [])
    assert run.structure() is None
    assert run.edges() == []
    assert len(run.kpis()) == len(run.records) == len(run.slots) == 0
    assert "none yet" in run._repr_html_()
    assert not run.refresh()

    fake.write(3)
    assert len(run.steps) == 0
    assert run.refresh()
    assert (run.state, run.steps.tolist()) == ("live", [0, 1, 2])
    assert "aux" not in run.nodes
    before = run.series("embed", "std")

    fake.write(9)
    assert run.series("embed", "std").equals(before)
    assert run.refresh()
    assert run.steps.tolist() == list(range(12))
    assert "aux" in run.nodes
    after = run.series("embed", "std")
    assert after[:3].equals(before)
    assert np.isnan(run.series("aux")[:5]).all()
    assert not np.isnan(run.series("aux")[5:]).any()
    assert run.structure(0) != run.structure()

    fake.close()
    assert run.state == "live"
    assert run.refresh()
    assert run.state == "finished"
    assert not run.refresh()


def test_eval_records_are_the_default_where_there_is_no_training(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    fake.writer.commit(fake.batches([(step, "eval") for step in (7, 8)]))
    run = open_run(tmp_path / "run")
    assert run.steps.tolist() == []
    assert run.series("embed").index.tolist() == [7, 8]


def test_threads_may_ask_while_others_refresh(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    fake.write(1)
    run = open_run(tmp_path / "run")
    stop, failures = threading.Event(), list[BaseException]()

    def ask() -> None:
        try:
            while not stop.is_set():
                consistent(run)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        fake.write(2)
        run.refresh()
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(run.steps) == 31


def consistent(run: Run) -> None:
    """Runs several queries; each result must be complete, though the run may grow in between."""
    series = run.series("embed", "std")
    assert not series.isna().any()
    assert series.index.tolist() == list(range(len(series)))
    heat = run.heat("std")
    assert np.array_equal(heat.index, np.arange(len(heat)))
    assert len(run.records) >= len(series)
    step = int(series.index[-1])
    assert not run.row(step)["std"].isna().any()
    assert run.value("embed", step).shape[0] == 4
