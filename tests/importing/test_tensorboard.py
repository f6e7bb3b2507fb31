"""Logs that torch and other programs wrote for TensorBoard become runs with the same content."""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comgra_decl.errors import EventFileError, MissingPackageError, StoreError, UnknownNameError
from comgra_decl.export import export_run
from comgra_decl.importing import import_tensorboard
from comgra_decl.query import list_runs, open_group, open_run
from comgra_decl.sinks import Selection
from tests.cli.test_commands import done
from tests.support.fake_run import FakeRun

pytest.importorskip("tensorboard")

from torch.utils.tensorboard import SummaryWriter

NUMBERS = np.array([0.1, -1e-42, 3.4e38, 1 / 3, np.inf, -np.inf, np.nan], np.float32)


def write(folder: Path, *, new_style: bool = False, at: float = 1e9) -> None:
    """Log seven numbers half a second apart, which have no exact decimal form."""
    with SummaryWriter(str(folder)) as writer:
        for step, number in enumerate(NUMBERS.tolist()):
            writer.add_scalar("Loss/train", number, 10 * step, at + step / 2, new_style=new_style)


@pytest.mark.parametrize("new_style", [False, True])
def test_values_are_equal_to_the_bit_with_their_steps_and_times(
    tmp_path: Path, new_style: bool
) -> None:
    write(tmp_path / "logs" / "first", new_style=new_style)
    (told,) = import_tensorboard(tmp_path / "logs", tmp_path / "runs" / "old")
    assert (told.values, told.metrics, told.left_out) == (7, 1, {})
    run = open_run(tmp_path / "runs")
    assert (run.group, run.name, run.state, run.started) == ("old", "first", "finished", 1e9)
    table = run.kpis()
    assert table["name"].tolist() == ["Loss/train"] * 7
    assert table["step"].tolist() == [*range(0, 70, 10)]
    assert table["value"].to_numpy().tobytes() == NUMBERS.astype(np.float64).tobytes()
    assert run.records["time"].tolist() == [1e9 + step / 2 for step in range(7)]
    assert run.steps.tolist() == [*range(0, 70, 10)]
    assert run.slots.empty


def test_files_of_other_programs_are_equal_to_what_these_wrote(tmp_path: Path) -> None:
    """TensorFlow 2.21, its version 1 writer, Keras 3.15 and tensorboardX 2.6 wrote the files."""
    files = Path(__file__).parent / "files"
    import_tensorboard(files, tmp_path / "runs")
    runs = {run.name: run for run in open_group(tmp_path / "runs")}
    assert {*runs} == {"keras-validation", "tensorboardx", "tensorflow1", "tensorflow2"}
    steps = np.arange(10)
    for name in ("tensorboardx", "tensorflow1", "tensorflow2"):
        table = runs[name].kpis()
        assert [*table["name"]] == ["loss/train"] * 10
        assert [*table["step"]] == [*5 * steps]
        written = np.exp(-steps / 10).astype(np.float32)
        np.testing.assert_array_equal(table["value"].to_numpy(np.float32), written)
        texts = [] if name == "tensorflow1" else ["remark: na\u00efve"]
        assert [*runs[name].notes()["text"]] == texts
        left_out = {} if name == "tensorflow1" else {"histograms": 1}
        assert runs[name].document("imported")["left_out"] == left_out
    with pytest.raises(UnknownNameError, match="has no tensors, so there is no graph to draw"):
        runs["tensorboardx"].plot.graph()
    table = runs["keras-validation"].kpis()
    for metric, values in json.loads((files / "keras.json").read_text()).items():
        found = table[table["name"] == metric.replace("val", "epoch")]
        assert [*found["step"]] == [*range(5)]
        np.testing.assert_array_equal(found["value"].to_numpy(np.float32), np.float32(values))


def test_each_folder_is_a_run_beside_those_already_there(tmp_path: Path) -> None:
    FakeRun(tmp_path / "runs" / "mnist" / "recorded").close()
    for number, name in enumerate((".", "adam", "adam/validation", "a b/c")):
        write(tmp_path / "logs" / name, at=1e9 + number)
    import_tensorboard(tmp_path / "logs", tmp_path / "runs" / "mnist")
    listed = list_runs(tmp_path / "runs")
    names = ["logs", "adam", "adam-validation", "a_b-c", "recorded"]
    assert [(run.group, run.name) for run in listed] == [("mnist", name) for name in names]
    assert {run.state for run in listed} == {"finished"}
    assert sorted(path.name for path in (tmp_path / "runs" / "mnist").iterdir()) == sorted(names)


def test_imported_and_recorded_runs_are_compared_and_drawn_together(tmp_path: Path) -> None:
    recorded = FakeRun(tmp_path / "runs" / "recorded")
    recorded.write(5)
    recorded.close()
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        for step in range(5):
            writer.add_scalar("loss", 2.0**-step, step, 1e9 + step)
    import_tensorboard(tmp_path / "logs", tmp_path / "runs")
    group = open_group(tmp_path / "runs")
    table = group.overview()
    assert table.loc["logs", "last.loss"] == 2.0**-4
    assert table.loc["logs", "duration"] == 4
    assert table["last.loss"].notna().all()
    pytest.importorskip("panel")
    group.plot.kpi("loss", x="time")


def test_hyperparameters_are_settings_of_the_writers_run(tmp_path: Path) -> None:
    settings = {"lr": 0.1, "layers": 3, "act": "relu", "bias": True, "api_key": "abc"}
    with SummaryWriter(str(tmp_path / "logs" / "one")) as writer:
        writer.add_scalar("loss", 1, 5)
        writer.add_hparams(settings, {"accuracy": 0.5})
    for rate in (1, 2):
        with SummaryWriter(str(tmp_path / "logs" / "sweep")) as writer:
            writer.add_hparams({"lr": rate}, {"accuracy": 0.5}, run_name=f"100000000{rate}.5")
    import_tensorboard(tmp_path / "logs", tmp_path / "runs")
    runs = {run.name: open_run(run.path) for run in list_runs(tmp_path / "runs")}
    assert {*runs} == {"one", "sweep", "sweep-1000000001.5", "sweep-1000000002.5"}
    assert runs["one"].config == settings | {"api_key": "(not saved)"}
    assert set(runs["one"].kpis()["name"]) == {"loss", "accuracy"}
    assert runs["sweep-1000000002.5"].config == {"lr": 2}


def test_show_says_what_a_run_was_imported_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "logs")
    import_tensorboard(tmp_path / "logs", tmp_path / "runs")
    assert done("show", str(tmp_path / "runs"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["imported"]["source"] == str(tmp_path / "logs")


def test_texts_are_notes(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        writer.add_text("about", "größer\nals | alles", 3, 1e9)
    import_tensorboard(tmp_path / "logs", tmp_path / "runs")
    notes = open_run(tmp_path / "runs").notes()
    assert notes.to_dict("records") == [
        {"step": 3, "type": "train", "time": 1e9, "text": "about: größer\nals | alles"}
    ]


def test_whatever_is_not_imported_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    with SummaryWriter(str(logs)) as writer:
        writer.add_scalar("loss", 1, -1)
        writer.add_histogram("weights", np.arange(5.0), 1)
        writer.add_image("input", np.zeros((3, 4, 4), np.uint8), 1)
        writer.add_image("input", np.zeros((3, 4, 4), np.uint8), 2)
        writer.add_pr_curve("curve", np.array([0, 1]), np.array([0.2, 0.7]), 1)
        writer.add_tensor("features", torch.ones(3), 1)
        writer.add_custom_scalars({"losses": {"loss": ["Multiline", ["loss"]]}})
    shown = {
        "numbers at negative steps": 1,
        "histograms": 1,
        "images": 2,
        "precision-recall curves": 1,
        "tensors": 1,
        "layouts of charts": 1,
    }
    assert done("import", str(logs), str(tmp_path / "runs"), "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert told["left_out"] == shown
    assert open_run(told["path"]).document("imported")["left_out"] == shown
    assert done("import", str(logs), str(tmp_path / "again")) == 0
    assert "not imported: " in (out := capsys.readouterr().out)
    assert all(f"{kind}: {count}" in out for kind, count in shown.items())


def test_files_of_a_restarted_program_are_one_run(tmp_path: Path) -> None:
    event_pb2 = importlib.import_module("tensorboard.compat.proto.event_pb2")
    summary_pb2 = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    writing = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    for first in (0, 2):
        writer = writing.EventFileWriter(str(tmp_path / "logs"), filename_suffix=f".{first}")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        writer.add_event(event_pb2.Event(wall_time=1e9, step=first, session_log=start))
        for step in range(first, first + 4):
            value = summary_pb2.Summary.Value(tag="loss", simple_value=10 * first + step)
            summary = summary_pb2.Summary(value=[value])
            writer.add_event(event_pb2.Event(wall_time=1e9 + step, step=step, summary=summary))
        writer.close()
    import_tensorboard(tmp_path / "logs", tmp_path / "runs")
    run = open_run(tmp_path / "runs")
    assert run.kpis()["step"].tolist() == [0, 1, 2, 3, 2, 3, 4, 5]
    assert run.kpis()["value"].tolist() == [0, 1, 2, 3, 22, 23, 24, 25]
    assert run.steps.tolist() == [*range(6)]
    assert run.document("imported")["files"] == 2


def test_an_exported_run_comes_back_with_the_names_of_its_metrics(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "runs" / "origin", nodes=("head",))
    fake.write(24)
    fake.close()
    origin = open_run(fake.path)
    selection = Selection("head", ("forward",), ("std",), histograms=False, pictures=False)
    export_run(origin, tmp_path / "logs", "tensorboard", selection=selection)
    (told,) = import_tensorboard(tmp_path / "logs", tmp_path / "back")
    run = open_run(told.path)
    assert run.config == {"model.layers": 2, "model.dim": 8, "optimizer.lr": 3e-4}
    table = run.kpis()
    for (name, type_), truth in origin.kpis().groupby(["name", "type"]):
        found = table[(table["name"] == name) & (table["type"] == type_)]
        assert found["step"].tolist() == truth["step"].tolist()
        assert np.array_equal(found["value"], truth["value"].astype(np.float32))
    std = origin.slot("head").series("std")
    found = table[table["name"] == "head/output/forward/std"]
    assert found["step"].tolist() == std.index.tolist()
    assert np.array_equal(found["value"], std.astype(np.float32))
    times = origin.records[origin.records["type"] == "train"].set_index("step")["time"]
    assert run.records.set_index("step")["time"][std.index].tolist() == times[std.index].tolist()


# -- refusals -------------------------------------------------------------------------------------


def test_nothing_is_imported_if_a_file_is_not_an_event_file(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "a")
    (tmp_path / "logs" / "b").mkdir()
    for content in (b"text", bytes(100), _record(b"\x07no event"), _record(b"")):
        (tmp_path / "logs" / "b" / "events.out.tfevents.1").write_bytes(content)
        with pytest.raises(EventFileError, match=r"tfevents\.1' is not an event file"):
            import_tensorboard(tmp_path / "logs", tmp_path / "runs" / "old")
        assert not (tmp_path / "runs").exists()


def _record(content: bytes) -> bytes:
    """Frame bytes as TensorBoard's files do."""
    stub = importlib.import_module("tensorboard.compat.tensorflow_stub.pywrap_tensorflow")
    length = struct.pack("<Q", len(content))
    sums = [struct.pack("<I", stub.masked_crc32c(part)) for part in (length, content)]
    return length + sums[0] + content + sums[1]


def test_empty_files_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "logs" / "good")
    empty = tmp_path / "logs" / "empty"
    empty.mkdir()
    (empty / "events.out.tfevents.1.host").touch()
    (told,) = import_tensorboard(tmp_path / "logs", tmp_path / "runs" / "old")
    assert told.path.name == "good"
    messages = {record.getMessage() for record in caplog.records}
    assert messages == {f"{str(empty)!r} contains no event and is not imported."}
    with pytest.raises(EventFileError, match="contain no event"):
        import_tensorboard(empty, tmp_path / "runs" / "old")
    assert [*(tmp_path / "runs" / "old").iterdir()] == [tmp_path / "runs" / "old" / "good"]


def test_the_rest_of_a_damaged_file_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "logs")
    (file,) = (tmp_path / "logs").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    (told,) = import_tensorboard(file, tmp_path / "runs")
    size = len(content) // 8  # more than an event
    assert told.values == 6
    assert 0 < told.left_out["bytes at the end of a damaged file"] < size


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / "logs" / name)
    import_tensorboard(tmp_path / "logs" / "b", tmp_path / "runs")
    before = sorted((tmp_path / "runs").rglob("*"))
    with pytest.raises(StoreError, match="b' already exists"):
        import_tensorboard(tmp_path / "logs", tmp_path / "runs")
    assert sorted((tmp_path / "runs").rglob("*")) == before


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / "logs" / name)

    def fail(_: str, done: int, total: int) -> None:
        if done == total:
            raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="No space left"):
        import_tensorboard(tmp_path / "logs", tmp_path / "runs", progress=fail)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("logs", ["missing", "empty"])
def test_a_place_without_event_files_is_refused(
    logs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("events")
    assert done("import", str(tmp_path / logs), str(tmp_path / "runs")) == 2
    assert str(tmp_path / logs) in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all folders")
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "a")
    (tmp_path / "logs" / "b").mkdir(mode=0)
    with pytest.raises(EventFileError, match="b' cannot be read: Permission denied"):
        import_tensorboard(tmp_path / "logs", tmp_path / "runs")


def test_buckets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not into a bucket"):
        import_tensorboard(tmp_path, "s3://bucket/runs")


def test_a_missing_tensorboard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "logs")
    hidden: dict[str, Any] = {name: None for name in sys.modules if name.startswith("tensorboard")}
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=r"comgra-decl\[tensorboard\]"):
        import_tensorboard(tmp_path / "logs", tmp_path / "runs")
