"""Trackers' own readers find every number, with its name and step (`make test-bridges`)."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comgra_decl.query import Run, open_run
from comgra_decl.records import SlotKey
from comgra_decl.sinks import About, Moment, Sink
from comgra_decl.sinks.naming import SeriesName, decoded, encoded, parsed
from tests.support.traced import traced, train

pytestmark = pytest.mark.filterwarnings("default")  # trackers' own

ABOUT = About("first", "g", "/runs/g/first", 1e9, {"model": {"dim": 8}, "lr": 0.1}, ("mean",))
NAMES = [
    str(SeriesName(SlotKey("cell[0]", "output.hidden[3]", 2, "grad:loss"), "l2", "abs_max")),
    str(SeriesName(SlotKey("a|b", "output", 0, "forward"), "std", type="eval")),
    "metrics/größe: 100 %",
    "metrics/val/loss",
    "metrics/../x",
]
STEPS = [0, 10, 20]
VALUES = np.array(
    [[0.1, 1e-30, -3.0], [math.nan, 2.5, 1e30], [math.inf, -math.inf, 0.0], [1, 2, 3], [4, 5, 6]]
)


def fed(sink: Sink) -> dict[str, str]:
    """Sends everything; returns the link to the tool's run."""
    sink.begin(ABOUT)
    for column, step in enumerate(STEPS):
        at = Moment(step, 1e9 + step)
        sink.scalars(at, dict(zip(NAMES, VALUES[:, column].tolist(), strict=True)))
        sink.image(at, "conv/output/forward/preview", np.full((4, 6, 3), step, np.uint8))
        sink.histogram(at, "conv/output/forward", np.array([1, 2]), np.array([0.0, 0.5, 1.0]))
        sink.text(at, "notes/train", f"note {step}")
    sink.text(Moment(20, 1e9 + 20), "notes/train", "a second note")
    link = dict(sink.link)
    sink.end("finished")
    return link


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from comgra_decl.sinks.mlflow import _ALLOWED, LINK, MlflowSink

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/tracking.db"
    link = fed(MlflowSink(uri, experiment="e"))
    client = mlflow.MlflowClient(uri)
    run = client.get_run(link["id"])
    assert (run.info.status, run.data.tags[LINK]) == ("FINISHED", ABOUT.path)
    assert run.data.params == {"model.dim": "8", "lr": "0.1"}
    assert {decoded(key) for key in run.data.metrics} == set(NAMES)
    told = {
        (name, metric.step): metric.value
        for name in NAMES
        for metric in client.get_metric_history(link["id"], encoded(name, _ALLOWED))
    }
    folder = Path(client.download_artifacts(link["id"], "comgra", str(tmp_path)))
    left_out = json.loads((folder / "left_out.json").read_text())
    listed = left_out["nonfinite"]
    assert left_out["nonfinite_count"] == len(listed) == 3
    told |= {(name, step): float(value) for name, step, value in listed}
    check({(name, step): told.pop((name, step)) for name in NAMES for step in STEPS})
    assert told == {}
    notes = folder / "notes" / "train"
    assert (notes / "step 10.md").read_text() == "note 10"
    assert (notes / "step 20.md").read_text() == "note 20"
    assert (notes / "step 20 (2).md").read_text() == "a second note"
    images = [entry.path for entry in client.list_artifacts(link["id"], "images")]
    assert {step for step in STEPS if any(f"+step+{step}+" in path for path in images)} == {*STEPS}


def test_settings_that_are_too_long_for_mlflow_are_kept_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from comgra_decl.sinks.mlflow import MlflowSink

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/tracking.db"
    long = "a" * 250
    settings = {f"{long}.x": 1, f"{long}.y": 2, "text": "b" * 600, "fits": "c" * 500}
    sink = MlflowSink(uri, experiment="e")
    sink.begin(About("first", "g", "/runs/g/first", 1e9, settings, ("mean",)))
    link = sink.link
    sink.end("finished")
    client = mlflow.MlflowClient(uri)
    cut = "b" * 499 + "\N{HORIZONTAL ELLIPSIS}"
    assert client.get_run(link["id"]).data.params == {"text": cut, "fits": "c" * 500}
    folder = Path(client.download_artifacts(link["id"], "comgra", str(tmp_path)))
    assert json.loads((folder / "left_out.json").read_text())["settings"] == {
        f"{long}.x": "1", f"{long}.y": "2", "text": "b" * 600,
    }  # fmt: skip


def test_the_mlflow_run_that_the_program_has_active_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from comgra_decl.sinks.mlflow import LINK

    monkeypatch.chdir(tmp_path)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/tracking.db")
    try:
        with mlflow.start_run() as own:
            run = trained(tmp_path, sinks=["mlflow"])
            client = mlflow.MlflowClient()
            assert client.get_run(own.info.run_id).info.status == "RUNNING"
        found = client.get_run(own.info.run_id)
    finally:
        mlflow.set_tracking_uri(before)
    assert run.document("links")["mlflow"]["id"] == own.info.run_id
    assert (found.info.status, found.data.tags[LINK]) == ("FINISHED", str(run.path.absolute()))
    assert found.data.metrics["0/output/forward/std"] == run.series("0", "std").iloc[-1]


def trained(root: Path, **spec: Any) -> Run:
    """Trains for three steps with tracing."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))

    def training() -> None:
        train(model, torch.randn(6, 3), steps=3)

    return traced(root, {"all": {"select": "**", "capture": ["output"]}}, training, **spec)


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio = pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage")
    from comgra_decl.sinks.trackio import LINK, TrackioSink

    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path, raising=False)
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path, raising=False)
    given: dict[str, Any] = {}
    usual = trackio.init

    def init(**options: Any) -> Any:
        given.update(options)
        return usual(**options)

    monkeypatch.setattr(trackio, "init", init)
    link = fed(TrackioSink("p"))
    assert given.items() >= {"auto_log_gpu": False, "auto_log_cpu": False}.items()
    assert storage.SQLiteStorage.get_run_config("p", ABOUT.name)[LINK] == ABOUT.path
    logs = storage.SQLiteStorage.get_logs("p", ABOUT.name)
    check({(n, row["step"]): row[n] for row in logs for n in NAMES if n in row})
    pictures = {row["step"] for row in logs if "conv/output/forward/preview" in row}
    assert pictures == {*STEPS}
    histograms = [row["conv/output/forward"] for row in logs if "conv/output/forward" in row]
    assert histograms[0]["bins"] == [0.0, 0.5, 1.0]
    assert histograms[0]["values"] == [1, 2]
    assert link["project"] == "p"


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from comgra_decl.sinks.wandb import STEP, WandbSink

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    fed(WandbSink("p", mode="offline"))
    assert wandb.run is None
    wandb.teardown()  # its service may still be writing
    (path,) = tmp_path.rglob("*.wandb")
    config, rows = config_and_rows(path)
    assert config["comgra"]["run"] == ABOUT.path
    assert config["model.dim"] == 8
    check({(n, row[STEP]): float(row[n]) for row in rows for n in NAMES if n in row})
    bins = [row["conv/output/forward/bins"] for row in rows if "conv/output/forward/bins" in row]
    assert bins == [[0.0, 0.5, 1.0]] * len(STEPS)
    counts = [
        row["conv/output/forward/values"] for row in rows if "conv/output/forward/bins" in row
    ]
    assert counts == [[1, 2]] * len(STEPS)
    pictures = {row[STEP] for row in rows if "conv/output/forward/preview/path" in row}
    assert pictures == {*STEPS}


def test_the_program_keeps_its_own_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    from comgra_decl.sinks.wandb import WandbSink

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="own", mode="offline") as own:
        own.log({"loss": 1.0})
        link = fed(WandbSink("p", mode="offline"))
        assert wandb.run is own
        assert link["id"] != own.id
        assert own.step == 1
        own.log({"loss": 0.5})
    wandb.teardown()
    by_id = {path.stem.removeprefix("run-"): path for path in tmp_path.rglob("*.wandb")}
    assert by_id.keys() == {own.id, link["id"]}
    _, rows = config_and_rows(by_id[own.id])
    assert [row["loss"] for row in rows if row] == [1.0, 0.5]
    assert not any(name in row for row in rows for name in NAMES)
    config, _ = config_and_rows(by_id[link["id"]])
    assert config["comgra"]["program_run"] == own.id


def test_mlflow_stores_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/tracking.db"
    run = trained(tmp_path, sinks=[{"mlflow": {"uri": uri, "artifact": True}}])
    number = run.document("links")["mlflow"]["id"]
    client = mlflow.MlflowClient(uri)
    same(run, Path(client.download_artifacts(number, "comgra/run", str(tmp_path))))


def test_trackio_stores_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio = pytest.importorskip("trackio")
    for name in ("trackio.utils", "trackio.sqlite_storage", "trackio.cas"):
        module = pytest.importorskip(name)
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    run = trained(tmp_path, sinks=[{"trackio": {"artifact": True, "project": "p"}}])
    reading = trackio.init(project="p", name="reader", embed=False)
    found = reading.use_artifact(f"g-{run.name}:latest")
    folder = Path(found.download(tmp_path / "back"))
    reading.finish()
    assert found.type == "comgra-run"
    same(run, folder)


def test_wandb_stores_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = trained(tmp_path, sinks=[{"wandb": {"mode": "offline", "artifact": True}}])
    wandb.teardown()
    (path,) = tmp_path.rglob("*.wandb")
    artifacts = []
    for block in blocks(path):
        record = proto.Record()
        record.ParseFromString(block)
        if record.WhichOneof("record_type") == "artifact":
            artifacts.append(record.artifact)
    (artifact,) = artifacts
    assert (artifact.name, artifact.type) == (f"g-{run.name}", "comgra-run")
    for entry in artifact.manifest.contents:
        to = tmp_path / "back" / entry.path
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(Path(entry.local_path).read_bytes())
    same(run, tmp_path / "back")


def same(run: Run, folder: Path) -> None:
    """Requires that a folder contains a copy of the run."""
    copy = open_run(folder)
    assert copy.state == run.state == "finished"
    assert copy.kpis().equals(run.kpis())
    assert copy.series("0", "std").equals(run.series("0", "std"))
    assert copy.document("links") == run.document("links")


def check(told: dict[tuple[str, int], Any]) -> None:
    """Compares numbers by name and step; NaN and both infinities are told apart."""
    assert set(told) == {(name, step) for name in NAMES for step in STEPS}
    numbers = [[float(told[name, step]) for step in STEPS] for name in NAMES]
    assert np.array_equal(numbers, VALUES, equal_nan=True)
    name = parsed(NAMES[0])
    assert isinstance(name, SeriesName)
    assert name.key == SlotKey("cell[0]", "output.hidden[3]", 2, "grad:loss")


def config_and_rows(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the configuration and the logged rows in a W&B file."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    rows: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    for block in blocks(path):
        record = proto.Record()
        record.ParseFromString(block)
        items = record.history.item
        rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        for part in (record.run.config, record.config):
            config |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in part.update}
    return config, rows


def blocks(path: Path) -> Iterator[bytes]:
    """Yields the records of a W&B file: LevelDB's log format, after a header of 7 bytes."""
    content, at, record = path.read_bytes(), 7, b""
    size = 32768
    while at + 7 <= len(content):
        if size - at % size < 7:
            at += size - at % size
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_the_environment_has_all_trackers_if_it_should() -> None:
    if os.environ.get("COMGRA_PEERS"):
        for package in ("mcp", "mlflow", "sqlalchemy", "trackio", "wandb"):
            __import__(package)
