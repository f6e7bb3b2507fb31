"""The table of runs, and the axes on which the metrics of several runs are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from comgra_decl.query import (
    Clock,
    Group,
    at_steps,
    clock_of,
    metrics_of,
    open_group,
    open_run,
    row_of,
)
from tests.support.fake_run import FakeRun


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    """A short run and a long one, of different models."""
    root = tmp_path_factory.mktemp("overview") / "group"
    for name, layers, steps in (("short", 1, 8), ("long", 2, 12)):
        fake = FakeRun(root / name, nodes=("embed", "head"), layers=layers, start=1000.0 + steps)
        fake.write(steps)
        fake.close()
    return open_group(root)


def test_a_row_has_the_state_the_metrics_and_the_origin(group: Group) -> None:
    run = group["long"]
    row = row_of(run)
    losses = run.kpis().query("name == 'loss' and type == 'train'").sort_values("step")["value"]
    assert (row.state, row.steps, row.records) == ("finished", 12, len(run.records))
    assert row.last["loss"] == losses.iloc[-1]
    assert row.best["loss"] == losses.min()
    assert row.duration == run.records["time"].max() - run.started
    assert row.commit == "0123456789abcdef0123456789abcdef01234567"
    assert row.dirty is False
    assert row.versions["torch"] == "2.13.0"
    assert row.command == "train.py +comgra=debug"
    assert row.findings is None
    assert row.seed is None
    assert row.settings["config.model.layers"] == 2


def test_evaluations_have_metrics_of_their_own(group: Group) -> None:
    found = metrics_of(group["long"])
    kpis = group["long"].kpis()
    for type_, name in (("train", "loss"), ("eval", "eval: loss")):
        part = kpis[(kpis["name"] == "loss") & (kpis["type"] == type_)].sort_values("step")
        assert np.array_equal(found[name][0], part["step"])
        assert np.array_equal(found[name][1], part["value"])
    assert next(iter(found)) == "loss"


def test_the_overview_has_a_row_per_run_and_only_settings_that_differ(group: Group) -> None:
    table = group.overview()
    assert table.index.tolist() == ["short", "long"]
    assert table["steps"].tolist() == [8, 12]
    assert table["config.model.layers"].tolist() == [1, 2]
    assert [name for name in map(str, table) if name.startswith(("spec.", "config."))] == [
        "config.model.layers"
    ]
    assert table["errors"].isna().all()
    last = [row_of(run).last["loss"] for run in group]
    assert table["last.loss"].tolist() == last
    assert table["last.eval: loss"].isna().tolist() == [True, False]


def test_the_seed_is_found_in_the_settings(tmp_path: Path) -> None:
    FakeRun(tmp_path / "run", nodes=("embed",), config={"trainer": {"seed": 7}}).close()
    assert row_of(open_run(tmp_path / "run")).seed == 7


def test_the_clock_counts_samples_and_seconds(group: Group) -> None:
    run = group["long"]
    clock = clock_of(run)
    train = run.records[run.records["mode"] == "train"]
    assert clock.steps.tolist() == list(range(12))
    assert np.allclose(clock.seconds, train["time"] - run.started)
    sizes = train["batch_size"].to_numpy(float)
    assert np.array_equal(clock.samples, np.concatenate([[0], np.cumsum(sizes)[:-1]]))


def test_steps_between_records_are_interpolated_and_later_ones_continue() -> None:
    clock = Clock(np.array([0, 10, 20]), np.array([1.0, 2.0, 4.0]), np.array([0.0, 80.0, 160.0]))
    steps = np.array([0, 5, 10, 15, 20, 30])
    assert at_steps(clock, steps, "step").tolist() == steps.tolist()
    assert at_steps(clock, steps, "time").tolist() == [1, 1.5, 2, 3, 4, 6]
    assert at_steps(clock, steps, "samples").tolist() == [0, 40, 80, 120, 160, 240]
