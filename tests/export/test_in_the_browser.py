"""TensorBoard and Netron, in a browser without a network, show what they were sent."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.export import export_run
from comgra_decl.query import open_run
from comgra_decl.records import SlotKey
from comgra_decl.sinks import About, Moment
from comgra_decl.sinks.points import Points
from comgra_decl.sinks.tensorboard import TensorBoardSink
from tests.support.traced import train

pytest.importorskip("playwright")
pytest.importorskip("tensorboard")

from docs.bridge_pictures import HERE, only_here, server

pytestmark = [pytest.mark.slow, pytest.mark.browser]

RUNS = ("sent-live", "exported")


def board(logs: Path) -> Any:
    return server("-m", "tensorboard.main", "--logdir", str(logs), "--host", HERE, "--port")


def asked(address: str, path: str, **arguments: str) -> bytes:
    query = f"?{urlencode(arguments)}" if arguments else ""
    with urllib.request.urlopen(f"{address}{path}{query}", timeout=60) as answer:
        content: bytes = answer.read()
    return content


def once(address: str, path: str, expected: list[str]) -> None:
    """Wait until TensorBoard has loaded the runs, which it does in the background."""
    for _ in range(600):
        if sorted(json.loads(asked(address, path))) == sorted(expected):
            return
        time.sleep(0.1)
    assert sorted(json.loads(asked(address, path))) == sorted(expected)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of a small convolutional network: one sent while it trained, one exported."""
    folder = tmp_path_factory.mktemp("browser")
    for number, name in enumerate(RUNS):
        torch.manual_seed(number)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
        spec: dict[str, Any] = {
            "nodes": {"all": {"select": "**", "capture": ["output"], "values": True}},
            "histogram": {"bins": 8},
            "samples": {"count": 5},
        }
        if name == "sent-live":
            spec["sinks"] = [{"tensorboard": {"folder": str(folder / "logs" / name)}}]
        with comgra.trace(
            spec, root=folder / "runs", group="g", name=name, config={"dim": 2 + number}
        ):
            for step in range(4):
                train(model, torch.randn(6, 1, 4, 4))
                comgra.image(np.full((4, 4, 3), 60 * step, np.uint8), "photo")
                comgra.kpi("accuracy", step / 4)
        if name == "exported":
            run = open_run(folder / "runs" / "g" / name)
            export_run(run, folder / "logs" / name, "tensorboard")
    return folder / "logs"


@pytest.fixture(scope="module")
def address(logs: Path) -> Iterator[str]:
    with board(logs) as found:
        once(found, "data/runs", [*RUNS])
        once(found, "data/plugin/projector/runs", [*RUNS])
        yield found


PAGES = {
    "timeseries": "0/output/forward/std",
    "histograms": "0/output/forward",
    "images&tagFilter=photo": "photo",
    "graphs": "0",
    "hparams": "dim",
    "projector": None,
}
"""The pages of TensorBoard, and something that each of them shows besides the names of the runs."""


@pytest.mark.parametrize("page_name", PAGES)
def test_tensorboard_shows_both_runs_without_a_network(
    page_name: str, address: str, chromium: Any
) -> None:
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.route("**/*", only_here)
    page.goto(f"{address}#{page_name}")
    for run in RUNS:  # the projector's are in a frame
        frames = [page, *page.frames] if page_name == "projector" else [page]
        if page_name == "projector":
            page.wait_for_timeout(3000)
            frames = [each for each in page.frames if "projector" in each.url] or frames
        frames[-1].get_by_text(run).first.wait_for(state="attached", timeout=60_000)
    if (told := PAGES[page_name]) is not None:
        page.get_by_text(told).first.wait_for(state="attached", timeout=60_000)
    page.close()


def test_points_that_were_sent_live_are_in_the_projector(address: str, logs: Path) -> None:
    for run in RUNS:
        info = json.loads(asked(address, "data/plugin/projector/info", run=run))
        names = {entry["tensorName"]: entry for entry in info["embeddings"]}
        assert {"0/output/forward", "2/output/forward"} <= names.keys()
        entry = names["2/output/forward"]
        assert entry["sprite"]["imagePath"]
        stored = open_run(logs.parent / "runs" / "g" / run)
        truth = stored.value("2", int(stored.steps[-1])).astype(np.float32)
        told = asked(address, "data/plugin/projector/tensor", run=run, name="2/output/forward")
        assert np.array_equal(np.frombuffer(told, np.float32).reshape(truth.shape), truth)
        sprite = asked(
            address, "data/plugin/projector/sprite_image", run=run, name="2/output/forward"
        )
        assert sprite.startswith(b"\x89PNG")


def test_tensorboard_reads_newer_points_of_a_run_that_it_knows(tmp_path: Path) -> None:
    keys = [SlotKey(name, "output", 0, "forward") for name in ("a", "b")]

    def points(step: int) -> Points:
        values = {key: np.full((3, 2), step + 1, np.float32) for key in keys}
        return Points("train", step, [0, 1, 2], [None] * 3, values)

    sink = TensorBoardSink(tmp_path / "logs" / "run")
    sink.begin(About("run", "g", "/run", 1e9))
    sink.scalars(Moment(0, 1e9), {"metrics/loss": 1.0})
    sink.points([points(0)])
    sink.end("finished")
    with board(tmp_path / "logs") as address:
        once(address, "data/plugin/projector/runs", ["run"])

        def told(name: str) -> set[float]:
            path, tensor = "data/plugin/projector/tensor", f"{name}/output/forward"
            return {*np.frombuffer(asked(address, path, run="run", name=tensor), np.float32)}

        assert told("a") == {1}
        sink.points([points(1)])
        assert told("b") == {2}
        assert told("a") == {2}  # it keeps the tensor that it read last, which was `b`


def test_netron_shows_each_class(logs: Path, chromium: Any, tmp_path: Path) -> None:
    pytest.importorskip("netron")
    file = export_run(open_run(logs.parent / "runs" / "g" / RUNS[0]), tmp_path / "g.onnx", "onnx")
    with server(
        "-c", "import netron; netron.main()", str(file), "--host", HERE, "--port"
    ) as address:
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.route("**/*", only_here)
        page.goto(address)
        page.get_by_role("button", name="Accept").click()
        for name in ("Conv2d", "Flatten", "Linear"):
            page.locator("svg text", has_text=name).first.wait_for(timeout=60_000)
        page.close()
