"""The projector of TensorBoard gets the recorded values, labels and images of each sample."""

from __future__ import annotations

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
    entry = entries(logs)[f"head/output/forward at step {step}"]
    truth = run.value("head", step)
    assert np.array_equal(points(logs, entry), truth.reshape(len(truth), -1), equal_nan=True)
    assert len(labels(logs, entry)) == 1 + len(truth)


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run with a probe of five images in two classes, recorded at steps 0 and 2; its logs."""
    folder = tmp_path_factory.mktemp("probed")
    images = torch.arange(5 * 16.0).reshape(5, 1, 4, 4)
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["output"], "values": True}},
        "samples": {"count": 5},
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
    return run, export_run(run, folder / "logs", "tensorboard")


def test_the_samples_of_a_probe_come_first_as_they_were_at_its_last_step(
    probed: tuple[Run, Path],
) -> None:
    run, logs = probed
    found = entries(logs)
    assert "(probe:eyes)" in next(iter(found))
    probe, training = (
        found[name] for name in ("0 (probe:eyes)/output/forward at step 2",
                                 "0/output/forward at step 3")
    )  # fmt: skip
    truth = run.value("0", 2, type="probe:eyes").reshape(5, -1)
    assert np.array_equal(points(logs, probe), truth)
    assert np.array_equal(points(logs, training), run.value("0", 3).reshape(5, -1))
    assert [line[2] for line in labels(logs, probe)] == ["label", "0", "1", "0", "1", "0"]
    assert labels(logs, training)[1][2] == ""


def test_each_point_is_shown_as_its_image(probed: tuple[Run, Path]) -> None:
    _, logs = probed
    entry = entries(logs)["0 (probe:eyes)/output/forward at step 2"]
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
    assert np.array_equal(projector._picture(channels), truth)
    grey = projector._picture(np.array([[[2.0, np.nan], [np.inf, 4.0]], [[9.0, 9], [9, 9]]]))
    assert grey[..., 0].tolist() == [[0, 0], [0, 255]]
    assert projector._picture(np.full((1, 1, 1), np.nan)).tolist() == [[[0, 0, 0]]]


def test_labels_are_utf_8_and_no_more_values_are_read_than_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, asked = Path.write_text, []

    def in_ascii(self: Path, data: str, encoding: str = "ascii", **others: Any) -> int:
        """Stand for the encoding of a locale that lacks most letters."""
        return usual(self, data, encoding=encoding, **others)

    def some(_: Run, key: Any, __: Any) -> Any:
        asked.append(key)
        return np.zeros((3, 2), np.float32)

    monkeypatch.setattr(Path, "write_text", in_ascii)
    monkeypatch.setattr(projector, "_points", some)
    monkeypatch.setattr(projector, "_MOST_TENSORS", 2)
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
