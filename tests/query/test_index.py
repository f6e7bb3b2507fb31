"""Runs that have ended are opened once: an index knows them, and never says anything untrue."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from comgra_decl.errors import StoreError
from comgra_decl.query import Index, RunSummary, list_runs, listed, open_group, open_run, overview
from comgra_decl.query import listing as listing_module
from comgra_decl.query.index import FILE
from comgra_decl.query.ranks import reader
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.appending import append_to
from tests.query.test_listing import write
from tests.store.truth import Truth, meta_of
from tests.support.fake_run import FakeRun
from tests.support.shortened import shortened

MANY = 25  # more than the number of lines from which an index is written


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(MANY):
        write(tmp_path / "runs" / f"group {number % 3}" / f"run {number}", started=100.0 + number)
    return tmp_path / "runs"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that a list opens."""
    names: list[str] = []
    real = reader.open_reader

    def counting(path: Any, *rest: Any) -> Any:
        names.append(path.name)
        return real(path, *rest)

    monkeypatch.setattr(listing_module, "open_reader", counting)
    return names


def without_index(root: Path) -> list[RunSummary]:
    """Return the list of runs in a copy of the folder that has no index."""
    stored = root / FILE
    aside = root.parent / "aside"
    there = os.path.lexists(stored)
    if there:
        stored.rename(aside)
    try:
        index = Index(root)
        index.save = lambda **_: None  # type: ignore[method-assign]
        return listed(index)
    finally:
        if there:
            aside.rename(stored)


def resume(run: Path) -> None:
    writer, _ = append_to(run, meta_of())
    writer.close()


def test_runs_that_have_ended_are_not_opened_again(root: Path, opened: list[str]) -> None:
    first = list_runs(root)
    assert len(opened) == MANY
    opened.clear()
    assert list_runs(root) == first  # a new process would begin like this
    assert opened == []
    write(root / "group 0" / "new", started=1000.0)
    resume(root / "group 1" / "run 1")
    write(root / "group 2" / "live", started=1001.0, close=False)
    for _ in range(2):
        opened.clear()
        assert list_runs(root) == without_index(root)
    assert sorted(opened[:3]) == ["live", "new", "run 1"]  # the rest is the list without
    opened.clear()
    assert open_run(root).name == "live"
    assert "run 2" not in opened


@pytest.mark.parametrize("how", ["list", "refresh"])
def test_runs_that_have_ended_are_known_without_reading_their_folders(
    root: Path, opened: list[str], how: str
) -> None:
    list_runs(root)
    group = open_group(root)
    ask = partial(list_runs, root) if how == "list" else group.refresh
    opened.clear()
    touched: list[str] = []
    active = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if active and event in ("open", "os.scandir", "os.listdir"):
            touched.append(str(arguments[0]))

    sys.addaudithook(hook)
    ask()
    active = False
    below = [path for path in touched if path.startswith(str(root))]
    assert 1 <= len(below) <= 1 + 1 + 3  # the index, the root, and the three groups
    assert not [path for path in below if "run " in path]
    assert opened == []
    assert len(group) == MANY


def actions(root: Path, chance: random.Random) -> Iterator[Callable[[], object]]:
    """Yield changes to a folder of runs, in a random order."""
    started = 5000.0
    while True:
        runs = [path.parent for path in root.glob("*/*/trace.ocdbt")]
        one, other = (chance.choice(runs), chance.choice(runs)) if runs else (root / "x", root)
        started += 1
        name = root / f"group {chance.randrange(3)}" / f"added {started}"
        content = bytes(chance.randrange(256) for _ in range(50))
        stored = root / FILE
        changes: list[Callable[[], object]] = [
            partial(write, name, started=started),
            partial(write, name, started=started, close=False),
            partial(write, name, started=started, records=0),
            partial(resume, one),
            partial(shutil.rmtree, one),
            partial(shutil.move, one, name),
            partial(shutil.copytree, one, name),
            partial(replace_run, one, other),
            partial((one / "trace.ocdbt" / "manifest.ocdbt").write_bytes, b"garbage"),
            partial(stored.write_bytes, content),
            partial(stored.write_bytes, stored.read_bytes()[:-20] if stored.exists() else b""),
            partial(stored.unlink, missing_ok=True),
        ]
        yield chance.choice(changes)


def replace_run(one: Path, other: Path) -> None:
    """Put a copy of another run in the place of a run."""
    if one != other:
        shutil.rmtree(one)
        shutil.copytree(other, one)


@pytest.mark.parametrize("seed", shortened(range(4), tried=1))
def test_a_list_with_an_index_is_the_list_without(root: Path, seed: int) -> None:
    chance = random.Random(seed)
    kept, steps = Index(root), actions(root, chance)
    for _ in range(12):
        for _ in range(chance.randrange(1, 4)):
            next(steps)()
        expected = without_index(root)
        kept.save(least=0)
        assert listed(kept) == expected
        assert list_runs(root) == expected


@pytest.mark.slow
def test_other_folders_indexes_and_odd_files_change_nothing(root: Path, tmp_path: Path) -> None:
    expected = list_runs(root)
    other = tmp_path / "other"
    for number in range(MANY):
        write(other / f"group {number % 3}" / f"run {number}", started=9.0, records=1)
    list_runs(other)
    stored = root / FILE
    shutil.copy(other / FILE, stored)
    assert list_runs(root) == expected
    makes: list[Callable[[], object]] = [
        partial(stored.symlink_to, other / FILE),
        partial(os.mkfifo, stored),
        stored.mkdir,
    ]
    for make in makes:
        if stored.is_dir():
            stored.rmdir()
        stored.unlink(missing_ok=True)
        make()
        assert list_runs(root) == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param('"state":"finished"', '"state":"<b>"', marks=pytest.mark.slow),
        ('"records":2', '"records":"many"'),
        ('"ranks":[]', '"ranks":["../../etc"]'),
        pytest.param('"started":', '"start":', marks=pytest.mark.slow),
        pytest.param('"records":2', '"records":1e300', marks=pytest.mark.slow),
        pytest.param('"records":2', '"records":true', marks=pytest.mark.slow),
        pytest.param('"started":1', '"started":NaN,"began":1', marks=pytest.mark.slow),
        pytest.param('"error":null', '"error":["x"]', marks=pytest.mark.slow),
    ],
)
def test_lines_that_no_index_has_are_not_used(root: Path, before: str, after: str) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    expected = list_runs(root)
    table = parquet.read_table(root / FILE)
    kept = [text.replace(before, after) for text in table.column("_kept").to_pylist()]
    assert kept != table.column("_kept").to_pylist()
    place = table.schema.get_field_index("_kept")
    parquet.write_table(table.set_column(place, "_kept", pyarrow.array(kept)), root / FILE)
    assert list_runs(root) == expected


@pytest.mark.slow
def test_a_resumed_run_is_no_longer_what_it_was(trained: Path) -> None:
    polars = pytest.importorskip("polars")
    group = open_group(trained)
    group.overview()
    run = trained / "g" / "run 3"
    writer, _ = append_to(run, Reader(run).meta)
    group.refresh()
    table = polars.read_parquet(group.index(), columns=["name", "state"])
    states = dict(table.iter_rows())
    assert states["run 3"] == "live"
    assert states["run 4"] == "finished"
    writer.close()


@pytest.mark.slow
def test_an_index_that_would_fill_the_memory_is_not_used(root: Path) -> None:
    """A long text that is stored once and stands in many lines."""
    pyarrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    expected = list_runs(root)
    mark = parquet.read_schema(root / FILE).metadata
    long, lines = "x" * 100_000, 20_000
    table = pyarrow.table(
        {
            "run": pyarrow.array([f"run {i}" for i in range(lines)]),
            "_kept": pyarrow.array([None] * lines, pyarrow.string()),
            "_row": pyarrow.DictionaryArray.from_arrays(
                pyarrow.array([0] * lines, pyarrow.int32()), [long]
            ),
        }
    ).replace_schema_metadata(mark)
    parquet.write_table(table, root / FILE)
    assert (root / FILE).stat().st_size < 10_000_000
    tracemalloc.start()
    try:
        assert list_runs(root) == expected
        assert tracemalloc.get_traced_memory()[1] < 400 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "error", shortened([NotImplementedError, RuntimeError, AssertionError], tried=1)
)
def test_whatever_reading_an_index_raises_runs_are_listed(
    error: type[Exception], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    expected = list_runs(root)

    def fail(*_: Any, **__: Any) -> None:
        raise error("not supported")

    monkeypatch.setattr(parquet, "ParquetFile", fail)
    assert list_runs(root) == expected
    monkeypatch.setattr(parquet, "write_table", fail)
    assert list_runs(root) == expected


@pytest.mark.slow
def test_a_row_that_no_index_has_is_computed_again(trained: Path) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    expected = open_group(trained).overview()
    table = parquet.read_table(trained / FILE)
    place = table.schema.get_field_index("_row")
    odd = ["{", '{"name":1}', "[1]", None, '{"group":"x"}'] * 5
    parquet.write_table(table.set_column(place, "_row", pyarrow.array(odd)), trained / FILE)
    pd.testing.assert_frame_equal(open_group(trained).overview(), expected)


def test_without_pyarrow_or_a_writable_folder_lists_are_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    expected = without_index(root)

    def refuse(*_: Any) -> None:
        raise PermissionError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        assert list_runs(root) == expected
    assert not [path for path in root.iterdir() if path.name.startswith(FILE)]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        group = open_group(root)
        assert group.runs == expected
        opened.clear()
        assert group.refresh() is False
        assert opened == []  # what is in memory needs no file
    assert not (root / FILE).exists()


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    for number in range(MANY):
        config = {"optimizer": {"lr": 10.0**-number}, "data": [1, number], "only": {str(number): 1}}
        fake = FakeRun(tmp_path / "runs" / "g" / f"run {number}", nodes=["head"], config=config)
        fake.write(2 + number % 4)
        fake.close()
    return tmp_path / "runs"


@pytest.mark.slow
def test_an_overview_from_the_index_is_that_of_the_runs(trained: Path) -> None:
    expected = overview(open_run(run.path) for run in list_runs(trained))
    for _ in range(2):  # computed, and then read from the file
        pd.testing.assert_frame_equal(open_group(trained).overview(), expected)
    group = open_group(trained)
    differences: Any = group.differences()
    assert differences.loc["config.optimizer.lr"].tolist() == [10.0**-n for n in range(MANY)]


@pytest.mark.slow
def test_the_file_is_a_table_for_other_tools(trained: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    polars = pytest.importorskip("polars")
    expected = open_group(trained).overview()
    file = str(trained / FILE)
    table = polars.read_parquet(file)
    assert table["name"].to_list() == expected.index.tolist()
    assert table["run"].to_list() == [f"g/{name}" for name in expected.index]
    for name in ("steps", "records", "last.loss", "best.loss", "config.optimizer.lr", "command"):
        assert table[name].to_list() == expected[name].tolist(), name
    assert table["config.data"].to_list() == [f"[1, {n}]" for n in range(MANY)]
    best = duckdb.sql(
        f"""SELECT name FROM '{file}' WHERE "config.optimizer.lr" < 0.01 """
        'ORDER BY "best.loss" LIMIT 3'
    ).fetchall()
    small = expected[expected["config.optimizer.lr"] < 0.01].sort_values(["best.loss", "started"])
    assert [name for (name,) in best] == small.index[:3].tolist()


@pytest.mark.slow
def test_a_table_that_was_asked_for_has_all_readable_runs(trained: Path, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    live = FakeRun(trained / "g" / "live", nodes=["head"])
    live.write(3)
    group = open_group(trained)
    where = group.index(tmp_path / "all.parquet")
    table = polars.read_parquet(where)
    assert table["name"].to_list() == group.overview().index.tolist()
    states = dict(zip(table["name"], table["state"], strict=True))
    assert states["live"] == "live"
    live.write(2)
    live.close()
    assert group.index() == str(trained / FILE)
    assert polars.read_parquet(group.index())["records"].max() >= 5
    assert [run.state for run in list_runs(trained) if run.name == "live"] == ["finished"]


def test_an_index_is_written_into_no_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run", started=1.0)
    index = Index(run)
    listed(index)
    index.save(least=0)
    with pytest.raises(StoreError, match="Pass the folder that contains the runs"):
        open_group(run).index()
    assert [path.name for path in run.iterdir()] == ["trace.ocdbt"]


def test_ended_runs_of_several_ranks_are_known_until_a_rank_appears(
    tmp_path: Path, opened: list[str]
) -> None:
    run = tmp_path / "runs" / "job"
    for rank, path in ((0, run), (1, run / "ranks" / "1")):
        facts = {"run": "x", "world_size": 2, "recorded": [0, 1], "rank": rank}
        truth = Truth(meta=meta_of(started=1.0, facts={"ranks": facts}))
        writer = RunWriter.create(path, truth.meta)
        writer.commit([truth.batch(2, [0])])
        writer.close()
    index = Index(tmp_path / "runs")
    (before,) = listed(index)
    assert before.state == "finished"
    opened.clear()
    assert listed(index) == [before]
    assert opened == []
    resume(run / "ranks" / "1")
    assert [one.state for one in listed(index)] == ["finished"]
    assert opened == ["job"]
