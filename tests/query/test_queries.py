"""The questions in docs/queries.md, asked of runs whose answers pandas gives, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Group, Run, open_group
from tests.support.fake_run import FakeRun

PAGE = Path(__file__).parents[2] / "docs" / "queries.md"
SQL = re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
_CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
RAY = [code for code in _CODE if "import ray" in code]
PYTHON = [code for code in _CODE if code not in RAY]
NODES = ("blocks.0.mlp.fc2", "blocks.1.mlp.fc2", "head")
DAY = 86400.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve runs of two groups, learning rates and depths; one lacks a combination."""
    place = tmp_path_factory.mktemp("queries")
    for number in range(12):
        lr, layers = (0.1, 0.01, 0.001)[number % 3], 1 if number % 3 == 2 else 1 + number % 2
        fake = FakeRun(
            place / "runs" / f"group {number % 2}" / f"run {number}",
            nodes=NODES,
            layers=layers,
            seed=number,
            start=1.7e9 + number * 0.4 * DAY,
            config={"optimizer": {"lr": lr}},
        )
        fake.write(6 + number)
        if number != 11:
            fake.writer.close(error="disk full" if number % 5 == 3 else None)
    return place


@pytest.fixture(scope="module")
def group(place: Path) -> Group:
    group = open_group(place / "runs")
    group.index(place / "runs.parquet")
    return group


def rows(frame: pd.DataFrame | pd.Series[Any]) -> list[tuple[Any, ...]]:
    table = frame.reset_index() if isinstance(frame, pd.Series) else frame
    plain = table.astype(object).where(table.notna(), None)
    return [tuple(row) for row in plain.to_numpy().tolist()]


def best(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    return rows(table.nsmallest(10, "best.loss")[["name", "best.loss", "config.optimizer.lr"]])


def rates(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    losses = table.groupby("config.optimizer.lr")["last.loss"]
    return rows(losses.agg(["size", "mean", "std"]).sort_values("mean").reset_index())


def untried(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    tried = {*zip(table["config.optimizer.lr"], table["config.model.layers"], strict=True)}
    rates_, depths = table["config.optimizer.lr"].unique(), table["config.model.layers"].unique()
    return [(lr, depth) for lr in rates_ for depth in depths if (lr, depth) not in tried]


def ended_badly(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    bad = table[table["state"] == "stopped"]
    return [(f"{r['group']}/{r['name']}", "stopped", "disk full", None) for _, r in bad.iterrows()]


def worse(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    bad = table[table["last.loss"] > 1.5 * table["best.loss"]]
    return rows(bad[["name", "best.loss", "last.loss"]])


def failed(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    share = (table["state"] == "stopped").groupby(table["config.optimizer.lr"]).mean()
    return rows(share.sort_values(ascending=False))


def dirty(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    return rows(table[table["dirty"].astype(bool)][["name", "commit", "branch"]])


def hours(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    found = table.groupby("group")["duration"].agg(["sum", "size"])
    found["sum"] = (found["sum"] / 3600).round(2)
    return rows(found.sort_values("sum", ascending=False).reset_index())


def seconds(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    return rows((table["duration"] / table["steps"]).groupby(table["version.torch"]).median())


def best_of_days(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    day = pd.to_datetime(table["started"], unit="s").dt.floor("D")
    found = table.loc[table.groupby(day)["best.loss"].idxmin()]
    return rows(found[["name", "best.loss"]])


ANSWERS: list[Callable[[pd.DataFrame], list[tuple[Any, ...]]]] = [
    best, rates, untried, ended_badly, worse, failed, dirty, hours, seconds, best_of_days,
]  # fmt: skip


def near(found: Any, wanted: Any) -> bool:
    return bool(found == wanted or found == pytest.approx(wanted, rel=1e-9))


@pytest.mark.parametrize("number", range(10), ids=[answer.__name__ for answer in ANSWERS])
def test_the_answers_are_those_of_pandas(
    number: int, place: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    duckdb: Any = pytest.importorskip("duckdb")
    monkeypatch.chdir(place)
    assert len(SQL) == len(ANSWERS)
    table = group.overview()
    wanted = ANSWERS[number](table.assign(name=[run.name for run in group]))
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        found = connection.execute(SQL[number]).fetchall()
    if number == 9:
        found = [row[1:] for row in found]
    if "ORDER BY" not in SQL[number] or number in (5, 7, 9):  # or with ties
        found, wanted = (sorted(each, key=str) for each in (found, wanted))
    assert len(found) == len(wanted)
    assert wanted or number in (4, 6)
    for one, other in zip(found, wanted, strict=True):
        assert len(one) == len(other)
        assert all(map(near, one, other)), (one, other)


def test_the_other_examples_run_as_printed(
    place: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("polars", "dask.dataframe"):
        pytest.importorskip(package)
    monkeypatch.chdir(place)
    names: dict[str, Any] = {}
    for code in PYTHON:
        exec(compile(code, str(PAGE), "exec"), names)
    tables = {run.name: run.table("abs_max", nodes="blocks.**", of="grad") for run in group}
    expected = sorted(
        (
            (name, node, float(part["abs_max"].max()))
            for name, table in tables.items()
            for node, part in table[table["step"] >= 5].groupby("node")
        ),
        key=lambda each: -each[2],
    )[:5]
    assert [(r[0], r[1], r[2]) for r in names["largest"].rows()] == expected
    ends = names["ends"]
    slots = group[0].slots
    forward = slots[(slots["node"] == "head") & (slots["pass"] == "forward")]
    roles = forward["role"].tolist()
    for run in group:
        values = [run.slot("head", role=role).series("l2").max() for role in roles]
        assert ends[str(run.path).removeprefix(f"{place}/")] == pytest.approx(max(values))
    assert names["found"] == [0, 0, 0]


@pytest.mark.slow
def test_ray_diagnoses_all_runs(place: Path, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.chdir(place)
    names: dict[str, Any] = {}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        for code in (*PYTHON, *RAY):
            exec(compile(code, str(PAGE), "exec"), names)
    finally:
        ray.shutdown()
    assert names["found"] == [names["errors"](str(run.path)) for run in group]
    assert len(names["found"]) == 12


def test_a_table_has_the_numbers_of_the_series(group: Group) -> None:
    run = group[0]
    for nodes in ("head", ["blocks.**", "head"], "**"):
        table = run.table("l2", "std", nodes=nodes, over_batch="abs_max")
        keys = ["node", "role", "iteration", "pass"]
        for key, part in table.groupby(keys):
            node, role, iteration, of = cast("tuple[str, str, int, str]", key)
            slot = run.slot(node, role=role, iteration=iteration, of=of)
            for name in ("l2", "std"):
                wanted = slot.series(name, over_batch="abs_max")[part["step"]]
                np.testing.assert_array_equal(part[name].to_numpy(), wanted.to_numpy())
        there = {slot.node for _, slot in run.slots.iterrows()}
        assert {*table["node"]} == (there if nodes == "**" else {*table["node"]} & there)
    with pytest.raises(UnknownNameError, match="no node matches 'haed'; did you mean 'head'"):
        run.table("l2", nodes="haed")
    with pytest.raises(UnknownNameError, match="'gard' is not a pass"):
        run.table("l2", of="gard")
    with pytest.raises(UnknownNameError, match="statistic 'l3'"):
        run.table("l3")


def test_a_lazy_table_refuses_an_unknown_aggregate(group: Group) -> None:
    with pytest.raises(UnknownNameError, match="over_batch='maxx' is not valid"):
        group.table("l2", over_batch="maxx")


def test_a_lazy_table_reads_no_more_runs_than_it_needs(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    polars = pytest.importorskip("polars")
    opened: list[str] = []

    def counting(path: Any) -> Any:
        opened.append(path.name)
        return Run(path)

    monkeypatch.setattr("comgra_decl.query.group.Run", counting)
    lazy = group.table("l2", nodes="head", of="forward")
    assert opened == []
    assert lazy.head(3).collect()["run"].to_list() == ["run 0"] * 3
    assert opened == ["run 0"]
    several = lazy.filter(polars.col("step") == 2).select("run", "l2").collect()
    assert several["run"].unique(maintain_order=True).to_list() == group.names
    assert group.table("l2", nodes="nowhere").collect().is_empty()
