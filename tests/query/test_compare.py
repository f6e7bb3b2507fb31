"""Comparing runs."""

from __future__ import annotations

import shutil
import sys
import tracemalloc
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from comgra_decl.errors import MissingPackageError, UnknownNameError
from comgra_decl.query import Group, Run, compare, differences, open_group, open_run
from comgra_decl.query.compare import arguments_of
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.database import Database
from comgra_decl.store.view import View
from tests.store.truth import Truth, meta_of
from tests.support.fake_model import spec_of
from tests.support.fake_run import FakeRun


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    """Three runs: with 8 and 12 steps, and one without the node `head`."""
    root = tmp_path_factory.mktemp("compare") / "group"
    for name, nodes, layers, steps in (
        ("a", ("embed", "head"), 2, 8),
        ("b", ("embed", "head"), 3, 12),
        ("c", ("embed",), 2, 8),
    ):
        fake = FakeRun(root / name, nodes=nodes, layers=layers, start=ord(name))
        fake.write(steps)
        fake.close()
    return open_group(root)


def test_a_column_per_run_and_a_line_per_step(group: Group) -> None:
    table = group.compare("head", "std", of="grad")
    assert table.columns.tolist() == ["a", "b", "c"]
    assert (table.index.name, table.columns.name) == ("step", "run")
    assert table.index.tolist() == list(range(12))
    for name, steps in (("a", 8), ("b", 12)):
        truth = group[name].slot("head", of="grad").series("std")
        assert np.array_equal(table[name][:steps], truth)
        assert table[name][steps:].isna().all()
    assert table["c"].isna().all()
    same = compare([group["a"], group["b"], group["c"]], "head", "std", of="grad")
    assert same.equals(table)


def test_evaluations_that_share_a_step_count_once(group: Group) -> None:
    table = group.compare("embed", "mean", type="eval")
    assert table.index.tolist() == [10]
    assert table["b"].notna().all()


def test_what_no_run_has_is_an_error_that_suggests(group: Group) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'embed'"):
        group.compare("embbed")
    with pytest.raises(UnknownNameError, match="std"):
        group.compare("embed", "stdd")


def test_runs_of_one_name_are_told_apart(group: Group, tmp_path: Path) -> None:
    FakeRun(tmp_path / "other" / "a", nodes=("embed",)).close()
    runs = [group["a"], open_run(tmp_path / "other" / "a")]
    assert compare(runs, "embed").columns.tolist() == ["group/a", "other/a"]
    assert compare([group["a"]] * 2, "embed").shape[1] == 2
    assert compare([], "embed").shape == (0, 0)


def test_only_settings_that_differ_are_listed(group: Group) -> None:
    table = differences(group)
    assert table.index.tolist() == ["config.model.layers"]
    assert list(table.loc["config.model.layers"]) == [2, 3, 2]
    assert group.differences().equals(table)
    assert differences([group["a"], group["a"]]).empty


def test_settings_of_the_spec_and_missing_ones(group: Group, tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "d", nodes=("embed",), samples=2)
    fake.close()
    one = open_run(tmp_path / "d")
    table = differences([group["a"], one])
    assert spec_of(2, 32)["samples"]["count"] == 2
    assert list(table.loc["spec.samples.count"]) == [4, 2]
    assert not any(key.startswith("spec.run.") for key in table.index)


def test_to_xarray_is_the_heat_map(group: Group) -> None:
    pytest.importorskip("xarray")
    run = group["b"]
    data = run.to_xarray("std", "mean", of="grad", over_batch="abs_max")
    assert set(data.data_vars) == {"std", "mean"}
    assert data["std"].dims == ("step", "slot")
    truth = run.heat("std", of="grad", over_batch="abs_max")
    assert np.array_equal(data["std"].to_numpy(), truth, equal_nan=True)
    assert data["step"].to_numpy().tolist() == truth.index.tolist()
    levels = ["node", "role", "iteration", "pass"]
    columns = [data[name].to_numpy().tolist() for name in levels]
    expected: Any = truth.columns.tolist()
    assert [*zip(*columns, strict=True)] == expected
    everything = run.to_xarray()
    assert set(everything.data_vars) == set(run.statistics)
    assert set(everything["pass"].to_numpy().tolist()) == {"forward", "grad"}
    assert everything.sizes["slot"] == len(run.slots)
    head = everything.where(everything["node"] == "head", drop=True)
    assert set(head["node"].to_numpy().tolist()) == {"head"}
    with pytest.raises(UnknownNameError, match="did you mean 'grad'"):
        run.to_xarray(of="gard")


def test_without_xarray_the_extra_is_named(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'comgra-decl\[xarray\]'"):
        group["a"].to_xarray()


def test_runs_and_groups_escape_what_they_show(tmp_path: Path) -> None:
    evil = tmp_path / "<img src=x onerror=alert(1)>" / "<script>alert(1)<&>"
    evil.parent.mkdir()
    fake = FakeRun(tmp_path / "run", nodes=("embed",))
    fake.write(2)
    fake.writer.close(error="<b>gone</b>")
    fake.path.rename(evil)
    for html in (Run(evil)._repr_html_(), open_group(evil.parent)._repr_html_()):
        assert "<script" not in html
        assert "<img" not in html
        assert "<b>" not in html
        assert "&lt;script&gt;" in html or "&lt;img" in html


def test_options_on_the_command_line_are_settings_without_a_config() -> None:
    command = ["python", "-m", "comgra_decl", "--spec", "debug", "train.py", "--lr", "0.1"]
    command += ["--fast", "--name=wide", "depth=3", "data.csv", "--shift", "-2"]
    assert arguments_of(command) == {
        "argument.lr": 0.1,
        "argument.fast": "true",
        "argument.name": "wide",
        "argument.depth": 3,
        "argument.shift": -2,
    }
    assert arguments_of([]) == {}


@pytest.mark.parametrize("count", [3, 11])
def test_a_comparison_opens_each_run_once_and_lets_it_go(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, and every time: neither time nor memory grow faster than they do."""
    fake = FakeRun(tmp_path / "runs" / "0", nodes=["head"], layers=1)
    fake.write(3)
    fake.close()
    for number in range(1, count):
        shutil.copytree(fake.path, tmp_path / "runs" / str(number))
    group = open_group(tmp_path / "runs")
    alive: WeakSet[Reader] = WeakSet()
    held: list[int] = []
    real = Reader.__init__

    def counting(self: Reader, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        alive.add(self)
        held.append(len(alive))

    monkeypatch.setattr(Reader, "__init__", counting)
    for _ in range(2):
        held.clear()
        table = group.compare("head", "std")
        assert table.shape == (3, count)
        assert len(held) == count
        assert max(held) <= 2  # the one that is read, and perhaps the one before


@pytest.mark.slow
def test_ten_times_the_runs_take_at_most_twelve_times_the_reads_and_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in a row. None of the runs stays open; of each, a column of the table is kept."""
    reads = [0]

    def counting(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            reads[0] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    counting(Reader, "_open")
    counting(View, "_read")
    counting(Database, "_read")
    found: dict[int, list[tuple[int, int]]] = {}
    for runs in (40, 400):
        for number in range(runs):
            truth = Truth(seed=number, meta=meta_of(started=100.0 + number))
            writer = RunWriter.create(tmp_path / str(runs) / f"run {number}", truth.meta)
            writer.commit([truth.batch(16, range(4))])
            writer.close()
        group = open_group(tmp_path / str(runs))
        node = group[0].nodes[0]
        found[runs] = []
        for _ in range(2):
            reads[0] = 0
            tracemalloc.start()
            try:
                assert group.compare(node).shape == (16, runs)
                found[runs].append((reads[0], tracemalloc.get_traced_memory()[1]))
            finally:
                tracemalloc.stop()
    for (few, small), (many, large) in zip(found[40], found[400], strict=True):
        assert few >= 40
        assert many <= 12 * few, found
        assert large <= 12 * small, found
