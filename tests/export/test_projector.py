"""The projector of TensorBoard gets the recorded values, labels and images of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import comgra_decl as comgra
from comgra_decl.export import export_run, projector
from comgra_decl.query import Run, open_run
from comgra_decl.records import SlotKey, StepInfo
from comgra_decl.sinks import Selection
from comgra_decl.sinks import projector as files
from comgra_decl.sinks.points import NewestPoints, Points
from comgra_decl.store import RunWriter
from tests.query.conftest import NODES
from tests.store.truth import Truth
from tests.support.fake_run import FakeRun
from tests.support.traced import train

proto = pytest.importorskip("tensorboard.plugins.projector.projector_config_pb2")

SIDE = 64  # of a tile


def entries(logs: Path) -> dict[str, Any]:
    """Return what TensorBoard finds in a log folder, by the name of the tensor."""
    from google.protobuf import text_format

    text = (logs / "projector_config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, proto.ProjectorConfig())
    return {entry.tensor_name: entry for entry in config.embeddings}


def points(logs: Path, entry: Any) -> Any:
    return np.loadtxt(logs / entry.tensor_path, np.float32, delimiter="\t")


def labels(logs: Path, entry: Any) -> list[list[str]]:
    lines = (logs / entry.metadata_path).read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines]


def test_the_values_of_the_last_training_step_are_points(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    fake.write(4)
    fake.close()
    run = open_run(fake.path)
    logs = export_run(run, tmp_path / "logs", "tensorboard")
    step = int(run.steps[-1])
    entry = entries(logs)["head/output/forward"]
    truth = run.value("head", step)
    assert np.array_equal(points(logs, entry), truth.reshape(len(truth), -1), equal_nan=True)
    assert len(labels(logs, entry)) == 1 + len(truth)
    assert {line[3] for line in labels(logs, entry)} == {"step", str(step)}


@pytest.fixture(scope="module", params=["export", pytest.param("live", marks=pytest.mark.slow)])
def probed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Path]:
    """A run with a probe of five images in two classes, recorded at steps 0 and 2; its logs."""
    folder = tmp_path_factory.mktemp("probed")
    images = torch.arange(5 * 16.0).reshape(5, 1, 4, 4)
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["output"], "values": True}},
        "samples": {"count": 5},
        "sinks": ["tensorboard"],
        "probes": {"eyes": {"batch": {"input": images.tolist()}, "labels": [0, 1, 0, 1, 0],
                            "samples": {"count": 5},
                            "schedule": {"first": 1, "every": 2}}},
    }  # fmt: skip
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    with comgra.trace(spec, root=folder) as session:
        for _ in range(4):
            train(model, torch.randn(6, 1, 4, 4))
    assert session.path is not None
    run = open_run(session.path)
    if request.param == "live":
        return run, Path(run.document("links")["tensorboard"]["where"])
    return run, export_run(run, folder / "logs", "tensorboard")


def test_the_samples_of_a_probe_come_first_as_they_were_at_its_last_step(
    probed: tuple[Run, Path],
) -> None:
    run, logs = probed
    found = entries(logs)
    assert "(probe:eyes)" in next(iter(found))
    probe, training = found["0 (probe:eyes)/output/forward"], found["0/output/forward"]
    truth = run.value("0", 2, type="probe:eyes").reshape(5, -1)
    assert np.array_equal(points(logs, probe), truth)
    assert np.array_equal(points(logs, training), run.value("0", 3).reshape(5, -1))
    assert [line[2] for line in labels(logs, probe)] == ["label", "0", "1", "0", "1", "0"]
    assert labels(logs, training)[1][2:] == ["", "3"]
    assert labels(logs, probe)[1][3] == "2"


def test_each_point_is_shown_as_its_image(probed: tuple[Run, Path]) -> None:
    _, logs = probed
    entry = entries(logs)["0 (probe:eyes)/output/forward"]
    assert [*entry.sprite.single_image_dim] == [SIDE, SIDE]
    sheet = np.asarray(Image.open(logs / entry.sprite.image_path))
    assert sheet.shape == (3 * SIDE, 3 * SIDE, 3)
    ramp = np.rint(np.arange(16.0).reshape(4, 4) / 15 * 255)  # black to white in every image
    tile = ramp.repeat(SIDE // 4, 0).repeat(SIDE // 4, 1)[..., None]
    for number in range(9):
        top, left = number // 3 * SIDE, number % 3 * SIDE
        part = sheet[top : top + SIDE, left : left + SIDE]
        assert np.array_equal(part, np.broadcast_to(tile * (number < 5), part.shape))


def test_colours_are_shown_and_what_is_not_finite_is_black() -> None:
    channels = np.linspace(-1, 1, 12).reshape(3, 2, 2)
    truth = np.rint(np.moveaxis((channels + 1) / 2 * 255, 0, -1))
    assert np.array_equal(files._picture(channels), truth)
    grey = files._picture(np.array([[[2.0, np.nan], [np.inf, 4.0]], [[9.0, 9], [9, 9]]]))
    assert grey[..., 0].tolist() == [[0, 0], [0, 255]]
    assert files._picture(np.full((1, 1, 1), np.nan)).tolist() == [[[0, 0, 0]]]


def test_only_complete_files_are_in_the_folder(probed: tuple[Run, Path]) -> None:
    _, logs = probed
    used = {entry.tensor_path for entry in entries(logs).values()}
    used |= {entry.metadata_path for entry in entries(logs).values()}
    used |= {entry.sprite.image_path for entry in entries(logs).values()} - {""}
    assert {f"projector/{path.name}" for path in (logs / "projector").iterdir()} == used


class Clock:
    """Shows a time that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_newer_values_replace_older_ones_when_there_is_time() -> None:
    truth, clock, written = Truth(), Clock(), []
    newest = NewestPoints(Selection(), clock)
    slot, *others = truth.batch(1, range(5)).new_slots

    def write(found: Sequence[Points]) -> None:
        (points,) = found
        written.append((points.step, points.tensors[slot.key][0, 0]))
        clock.now += 2  # seconds that writing takes

    def record(step: int) -> None:
        batch = truth.batch(1, range(5))
        batch.steps = [StepInfo(step, 0.0, "train", "train", samples=[0, 1, 2])]
        batch.values = [{slot.id: np.full((3, 4), step, np.float64)}]
        newest.keep(batch)

    newest.see([slot, *others])
    chosen: dict[int, SlotKey] = {slot.id: slot.key}
    newest.write(chosen, write)
    assert written == []  # there is nothing yet
    for step in (0, 1, 2):
        record(step)
        newest.write(chosen, write)
    assert written == [(0, 0.0)]
    clock.now += 199
    newest.write(chosen, write)
    assert written == [(0, 0.0)]
    clock.now += 1  # a hundred times the time that writing took
    newest.write(chosen, write)
    newest.write(chosen, write)
    assert written == [(0, 0.0), (2, 2.0)]
    record(3)
    newest.write(chosen, write, last=True)
    newest.write(chosen, write, last=True)
    assert written[2:] == [(3, 3.0)]


def test_only_values_that_may_be_sent_are_kept() -> None:
    batch = Truth().batch(1, range(4))
    first, _, *others = batch.new_slots
    image, target = (
        replace(slot, kind=kind) for slot, kind in zip(others, ("input", "target"), strict=True)
    )
    batch.new_slots[2:] = [image, target]
    batch.values = [{slot.id: np.zeros((3, 4)) for slot in batch.new_slots}]
    newest = NewestPoints(Selection(nodes=first.key.node))
    newest.keep(batch)
    assert {id_ for _, values in newest._newest.values() for id_ in values} == {first.id, image.id}


def test_labels_are_utf_8_and_no_more_values_are_read_than_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def some(_: Run, key: Any, *__: Any) -> Any:
        asked.append(key)
        return np.zeros((3, 2), np.float32)

    monkeypatch.setattr(projector, "_points", some)
    monkeypatch.setattr(projector, "MOST_TENSORS", 2)
    truth = Truth()
    batch = truth.batch(2, range(5))
    for info in batch.steps:
        info.samples, info.extra = [0, 1, 2], {"labels": ["größe", "猫", "c"]}
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    writer.commit([batch])
    writer.close()
    logs = export_run(open_run(tmp_path / "run"), tmp_path / "logs", "tensorboard")
    found = entries(logs)
    assert len(asked) == len(found) == 2
    for entry in found.values():
        assert [line[2] for line in labels(logs, entry)] == ["label", "größe", "猫", "c"]
