"""Other programs read from an export exactly what the run contains."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import tensorstore as ts

from comgra_decl.cli.agents import Agent
from comgra_decl.errors import MissingPackageError, PatternError, StoreError, UnknownNameError
from comgra_decl.export import FORMATS, export_run
from comgra_decl.query import Run, open_run
from comgra_decl.records import AGGREGATES, STATISTICS
from comgra_decl.rules.contract import contract_of
from comgra_decl.sinks import Selection
from comgra_decl.store import RunWriter
from comgra_decl.store.copying import copy_run
from tests.query.conftest import NODES
from tests.store.truth import Truth
from tests.support.fake_run import FakeRun
from tests.support.forked import Program
from tests.support.shortened import shortened
from tests.support.tables import read_csv

STEPS = 24

WHOLE = ("parquet", "csv", "zarr", "npz")
"""The formats that contain a whole run, rather than a selection of it."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """24 training and 2 evaluation records; from step 20 on, one tensor contains NaN."""
    fake = FakeRun(tmp_path_factory.mktemp("export") / "run", nodes=NODES, nonfinite_from=20)
    fake.write(STEPS, commit=5)
    fake.close()
    return open_run(fake.path)


@pytest.fixture(scope="module")
def exports(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    for name in WHOLE:
        export_run(run, folder / name, name)
    return folder


def column(statistic: str, over_batch: str) -> str:
    return statistic if over_batch == "mean" else f"{statistic}.{over_batch}"


def slots_in(run: Run) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each slot's id and the columns that identify it."""
    for number, slot in run.slots.iterrows():
        yield (
            int(str(number)),
            {
                "node": slot["node"],
                "role": slot["role"],
                "iteration": int(slot["iteration"]),
                "of": slot["pass"],
            },
        )


@pytest.mark.parametrize("format_", shortened(["parquet", "csv"], tried=1))
def test_every_statistic_is_in_the_tables(run: Run, exports: Path, format_: str) -> None:
    table = read(exports / format_, "statistics")
    present = 0
    for number, where in slots_in(run):
        mine = table[table["slot"] == number]
        for type_ in run.types:
            of_type = mine[mine["type"] == type_].set_index("step")
            for statistic in STATISTICS:
                for over_batch in AGGREGATES:
                    truth = run.slot(**where).series(statistic, over_batch=over_batch, type=type_)
                    told = of_type[column(statistic, over_batch)].reindex(truth.index)
                    assert np.array_equal(told.to_numpy(np.float32), truth, equal_nan=True)
            there = run.slot(**where).series("nonfinite", type=type_).notna()
            assert of_type.index.tolist() == there[there].index.tolist()
            present += int(there.sum())
    assert len(table) == present
    keys = table[["slot", "node", "role", "iteration", "pass"]].drop_duplicates()
    slots = run.slots.reset_index()[keys.columns]
    used = slots[slots["slot"].isin(keys["slot"])]
    assert sorted(keys.astype(str).to_numpy().tolist()) == sorted(
        used.astype(str).to_numpy().tolist()
    )


@pytest.mark.parametrize("format_", ["parquet", "csv"])
def test_every_sample_is_in_the_tables(run: Run, exports: Path, format_: str) -> None:
    table = read(exports / format_, "samples")
    mine = table[(table["node"] == "head") & (table["pass"] == "forward")]
    mine = mine[(mine["role"] == "output") & (mine["type"] == "train")]
    for sample in range(run.sample_count):
        told = mine[mine["sample"] == sample].set_index("step")
        for statistic in STATISTICS:
            truth = run.slot("head").samples(statistic)[sample]
            assert np.array_equal(told[statistic].to_numpy(np.float32), truth, equal_nan=True)


@pytest.mark.parametrize("format_", ["parquet", "csv"])
def test_the_small_tables_are_whole(run: Run, exports: Path, format_: str) -> None:
    kpis, truth = read(exports / format_, "kpis"), run.kpis()
    assert kpis["name"].tolist() == truth["name"].tolist()
    assert np.array_equal(kpis["value"], truth["value"])
    assert read(exports / format_, "records")["step"].tolist() == run.records["step"].tolist()
    slots = read(exports / format_, "slots")
    assert [tuple(json.loads(s)) for s in slots["shape"]] == run.slots["shape"].tolist()
    facts = json.loads((exports / format_ / "run.json").read_text())
    assert facts["spec"] == run.spec.model_dump(mode="json")


def read(folder: Path, name: str) -> pd.DataFrame:
    """Reads a table with the usual library for its format."""
    if folder.name == "csv":
        types = dict.fromkeys(f"{s}{a}" for s in STATISTICS for a in ("", ".std", ".abs_max"))
        floats: Any = dict.fromkeys(types, np.float32)
        return read_csv(
            folder / f"{name}.csv", dtype=floats, keep_default_na=False, na_values=["nan"]
        )
    parquet = pytest.importorskip("pyarrow.parquet")
    table: pd.DataFrame = parquet.read_table(folder / f"{name}.parquet").to_pandas()
    return table


@pytest.mark.slow
def test_zarr_python_reads_the_arrays(run: Run, exports: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(exports / "zarr", mode="r")
    attributes = dict(group.attrs)
    ids = [slot["slot"] for slot in attributes["slots"]]
    check_arrays(run, {name: group[name] for name in group.array_keys()}, attributes, ids)
    values = group["values"]
    told = 0
    for name in values.array_keys():
        array = values[name]
        about = dict(array.attrs)
        for at, record in enumerate(about["records"]):
            truth = run.values_of(record)[about["slot"]]
            assert np.array_equal(array[at], truth, equal_nan=True)
            told += 1
    assert told == sum(len(run.values_of(record)) for record in range(len(run.records)))


def test_xarray_reads_the_dims(exports: Path, run: Run) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    with xarray.open_zarr(exports / "zarr", consolidated=False) as data:
        assert data["statistics"].dims == ("record", "slot", "statistic", "aggregate")
        assert data["statistics"].sizes["record"] == len(run.records)


def test_numpy_reads_the_arrays(run: Run, exports: Path) -> None:
    with np.load(exports / "npz", allow_pickle=False) as archive:
        attributes = json.loads(str(archive["run_json"]))
        attributes["types"] = archive["type_names"].tolist()
        check_arrays(run, archive, attributes, archive["slot_id"].tolist())
        assert np.array_equal(archive["kpi_value"], run.kpis()["value"])
        assert archive["slot_node"].tolist() == run.slots["node"].tolist()


def check_arrays(run: Run, arrays: Any, attributes: dict[str, Any], ids: list[int]) -> None:
    """Compares arrays [record, slot, ...] with the contents of the run."""
    assert ids == run.slots.index.tolist()
    steps, types = np.asarray(arrays["step"][:]), np.asarray(arrays["type"][:])
    assert steps.tolist() == run.records["step"].tolist()
    assert [attributes["types"][code] for code in types] == run.records["type"].tolist()
    names = attributes["statistics"]
    table, samples = arrays["statistics"][:], arrays["samples"][:]
    train = np.flatnonzero(types == attributes["types"].index("train"))
    for number, where in slots_in(run):
        at = ids.index(number)
        for rank, statistic in enumerate(names):
            for over, over_batch in enumerate(AGGREGATES):
                truth = run.slot(**where).series(statistic, over_batch=over_batch)
                assert np.array_equal(table[train, at, rank, over], truth, equal_nan=True)
            truth = run.slot(**where).samples(statistic)[1]
            assert np.array_equal(samples[train, at, 1, rank], truth, equal_nan=True)
        found, counts, ranges = run.slot(**where).histograms()
        at_records = [int(train[steps[train].tolist().index(step)]) for step in found]
        assert np.array_equal(arrays["histogram_counts"][:][at_records, at], counts)
        assert np.array_equal(
            arrays["histogram_edges"][:][at_records, at], ranges.astype(np.float32)
        )


def test_some_nodes_alone(run: Run, tmp_path: Path) -> None:
    with np.load(export_run(run, tmp_path / "some.npz", "npz", nodes="blocks.**")) as archive:
        chosen = [node for node in run.slots["node"] if node.startswith("blocks.")]
        assert archive["slot_node"].tolist() == chosen
        assert archive["statistics"].shape[1] == len(chosen) > 0
    with pytest.raises(UnknownNameError, match="did you mean 'head'"):
        export_run(run, tmp_path / "none.npz", "npz", nodes="haed")


def test_a_pass_that_does_not_exist_is_named_with_those_that_do(run: Run, tmp_path: Path) -> None:
    for passes in (("backward",), ("forward", "backward")):
        selection = Selection(passes=passes)
        with pytest.raises(UnknownNameError, match=r"no pass 'backward'.*has 'forward', 'grad'"):
            export_run(run, tmp_path / "none", "tensorboard", selection=selection)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("format_", FORMATS)
def test_no_nodes_leave_everything_else(run: Run, tmp_path: Path, format_: str) -> None:
    out = export_run(run, tmp_path / "out", format_, nodes="")
    if format_ in ("parquet", "csv"):
        assert read_any(out, "records")["step"].tolist() == run.records["step"].tolist()
        for name in ("statistics", "samples"):
            assert read_any(out, name)[["step", "node", "std"]].empty
    elif format_ == "npz":
        with np.load(out) as archive:
            assert archive["step"].tolist() == run.records["step"].tolist()
            assert archive["samples"].shape == (
                len(run.records),
                0,
                run.sample_count,
                len(STATISTICS),
            )
    else:
        assert out.exists()


@pytest.mark.parametrize("nodes", ["a..b", "blocks.[0", "b[z-a]", 5])
def test_an_invalid_pattern_is_an_error_of_ours(run: Run, tmp_path: Path, nodes: Any) -> None:
    for ask in (
        lambda: export_run(run, tmp_path / "out", "csv", nodes=nodes),
        lambda: export_run(run, tmp_path / "out", "tensorboard", nodes=nodes),
        lambda: contract_of(run, nodes=nodes),
        lambda: Agent(Path(str(run.path)).parent).row(0, nodes=nodes),
    ):
        with pytest.raises(PatternError, match=r"'a\.\.b'|'\[0?'|'\[z-a\]'|got 5"):
            ask()
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_is_written_in_what_every_reader_knows(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    truth = Truth()
    value = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    with_value = truth.batch(3, range(2), values={1: value})
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    writer.commit([with_value])
    writer.close()
    export_run(open_run(tmp_path / "run"), tmp_path / "out", "zarr")
    array = zarr.open_group(tmp_path / "out", mode="r")["values/1_bfloat16_2x3"]
    assert array.attrs["dtype"] == "bfloat16"
    assert array.shape == (3, 2, 3)
    assert np.array_equal(array[2], value.astype(np.float32))


@pytest.mark.parametrize("format_", WHOLE)
def test_a_run_without_a_record_can_be_exported(tmp_path: Path, format_: str) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    export_run(open_run(fake.path), tmp_path / "out", format_)
    assert (tmp_path / "out").exists()
    fake.close()


@pytest.mark.parametrize("format_", WHOLE)
def test_a_live_run_is_exported_as_of_its_last_refresh(tmp_path: Path, format_: str) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    fake.write(12, commit=3)
    run, ended = open_run(fake.path), threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            fake.write(3)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        out = export_run(run, tmp_path / "out", format_)
    finally:
        ended.set()
        thread.join()
    fake.close()
    if format_ in ("parquet", "csv"):
        assert read_any(out, "records")["step"].tolist() == run.records["step"].tolist()
        assert set(read_any(out, "statistics")["step"]) == set(run.records["step"])


def read_any(folder: Path, name: str) -> pd.DataFrame:
    path = folder / f"{name}.csv"
    return read_csv(path) if path.exists() else pd.read_parquet(folder / f"{name}.parquet")


@pytest.mark.parametrize("format_", WHOLE)
def test_nothing_is_overwritten_and_nothing_half_remains(
    run: Run, tmp_path: Path, format_: str
) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(StoreError, match="already exists; choose another"):
        export_run(run, tmp_path / "there", format_)

    def broken(*_told: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match=r"cannot write.*No space left"):
        export_run(run, tmp_path / "new", format_, progress=broken)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "mine"


def test_an_unknown_format_and_a_missing_package_are_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'parquet'"):
        export_run(run, tmp_path / "out", "parket")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'comgra-decl\[parquet\]'"):
        export_run(run, tmp_path / "out", "parquet")
    assert list(tmp_path.iterdir()) == []


def writes() -> int:
    """Returns how many files TensorStore has written in this process."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/write")
    return sum(int(m["values"][0]["value"]) for m in found if m["name"].endswith("/write"))


def test_zarr_writes_no_chunk_twice(run: Run, tmp_path: Path) -> None:
    """Otherwise each would be read, decoded, encoded and rewritten for every record in it."""
    before = writes()
    export_run(run, tmp_path / "group", "zarr")
    files = [path for path in (tmp_path / "group").rglob("*") if path.is_file()]
    values = [path for path in (tmp_path / "group" / "values").rglob("*") if path.is_file()]
    assert len(values) > 10
    assert 0 < writes() - before <= len(files)


BUSY = """
import sys, time
import comgra_decl as comgra
from comgra_decl.export import export_run
from comgra_decl.store.copying import copy_run

def busy(*_):
    print("busy", flush=True)
    time.sleep(600)

if sys.argv[3] == "copy":
    copy_run(sys.argv[1], sys.argv[2], progress=busy)
else:
    export_run(comgra.open_run(sys.argv[1]), sys.argv[2], sys.argv[3], progress=busy)
"""


def made(run: Run, target: Path, how: str) -> None:
    if how == "copy":
        copy_run(run.path, target)
    else:
        export_run(run, target, how)


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks on folders")
@pytest.mark.parametrize("how", ["csv", "zarr", "npz", "copy"])
def test_the_next_one_removes_what_a_killed_one_has_left(
    run: Run, tmp_path: Path, how: str
) -> None:
    other = tmp_path / ".exporting-target-other-aaaaaaaa"
    other.mkdir()  # for another target
    program = Program(tmp_path, "-c", BUSY, run.path, tmp_path / "target", how)
    program.wait_for("busy")
    (draft,) = set(tmp_path.glob(".*-target-*")) - {other}
    if how != "copy":  # another export, halfway through
        made(run, tmp_path / "target", how)
        assert draft.exists(), "the draft of a living program was removed"
        removed(tmp_path / "target")
    program.kill()
    assert draft.exists()
    assert not (tmp_path / "target").exists()
    made(run, tmp_path / "target", how)
    assert {path.name for path in tmp_path.iterdir()} == {"target", other.name}


def removed(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
