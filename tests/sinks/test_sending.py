"""A run that has ended can be sent to trackers: they receive what they would have live."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from comgra_decl.errors import Exit, SelectionError, SpecError, StoreError, UnknownNameError
from comgra_decl.export import TOOLS, export_run, send_run, sending
from comgra_decl.query import Run, open_run
from comgra_decl.sinks import About, Moment, Selection
from comgra_decl.sinks.naming import SeriesName, parsed
from comgra_decl.store import RunWriter
from tests.cli.test_commands import done
from tests.sinks.test_trackers import config_and_rows, same, trained
from tests.store.truth import Truth
from tests.support.fake_run import FakeRun
from tests.support.shortened import shortened


class Remembering:
    """Stands for a tool, and keeps what it is sent."""

    def __init__(self) -> None:
        self.link = {"id": "7"}
        self.breaks = False
        self.about: About | None = None
        self.numbers: dict[str, dict[int, float]] = defaultdict(dict)
        self.copied: tuple[str, pd.DataFrame] | None = None
        self.state: str | None = None

    def begin(self, about: About) -> None:
        self.about = about

    def scalars(self, at: Moment, values: dict[str, float]) -> None:
        if self.breaks:
            raise ConnectionError("no route")
        for name, value in values.items():
            self.numbers[name][at.step] = value

    def ignore(self, *_: Any) -> None:
        """Receive what these tests do not look at."""

    histogram = image = text = graph = points = ignore

    def artifact(self, folder: Path) -> None:
        copy = open_run(folder)
        self.copied = copy.state, copy.kpis()

    def end(self, state: str) -> None:
        self.state = state


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Remembering:
    tool = Remembering()
    monkeypatch.setattr(sending, "maker_of", lambda *_, **__: lambda: tool)
    return tool


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    fake = FakeRun(tmp_path_factory.mktemp("sending") / "g" / "run", nodes=("embed", "head"))
    fake.write(6)
    fake.close()
    return open_run(fake.path)


def test_the_tool_receives_every_series_and_where_the_run_is(run: Run, tool: Remembering) -> None:
    assert send_run(run, "wandb", {"project": "p"}, selection=Selection("head")) == {"id": "7"}
    assert tool.about is not None
    assert (tool.about.path, tool.state) == (str(run.path.absolute()), "finished")
    series = {name: told for name, told in tool.numbers.items() if not name.startswith("metrics")}
    assert len(series) > 3
    for text, told in series.items():
        name = parsed(text)
        assert isinstance(name, SeriesName)
        key = name.key
        slot = run.slot(key.node, role=key.role, of=key.pass_, iteration=key.iteration)
        truth = slot.series(name.statistic, over_batch=name.over_batch, type=name.type)
        np.testing.assert_array_equal([*told.values()], truth[[*told]])
    assert tool.numbers["metrics/loss"].keys() == {*run.kpis().query("name == 'loss'")["step"]}
    assert tool.copied is None


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with more than 10,000 slots."""
    truth, path = Truth(), tmp_path_factory.mktemp("large") / "run"
    writer = RunWriter.create(path, truth.meta)
    writer.commit([truth.batch(1, range(10_001))])
    writer.close()
    return open_run(path)


@pytest.mark.parametrize("name", shortened(TOOLS, tried=1))
def test_no_tool_receives_ten_thousand_tensors_unasked(
    name: str, large: Run, tool: Remembering
) -> None:
    with pytest.raises(
        SelectionError, match=r"series, but at most 200 are sent. Select some, such"
    ):
        send_run(large, name)
    assert (tool.about, tool.state) == (None, "failed")
    assert not tool.numbers
    send_run(large, name, selection=Selection(nodes=""))
    assert {text.partition("/")[0] for text in tool.numbers} == {"metrics"}


@pytest.mark.slow
def test_nor_does_tensorboard(large: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(
        SelectionError, match=r"series, but at most 200 are sent. Select some, such"
    ):
        export_run(large, tmp_path / "logs", "tensorboard")
    assert not [*tmp_path.iterdir()]


def test_a_copy_of_the_run_is_sent_on_request(run: Run, tool: Remembering) -> None:
    send_run(run, "trackio", {"artifact": True, "nodes": ""})
    assert tool.copied is not None
    state, metrics = tool.copied
    assert state == "finished"
    assert metrics.equals(run.kpis())


def test_what_cannot_be_sent_is_explained(run: Run, tool: Remembering, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="there is no pass 'backward'"):
        send_run(run, "trackio", selection=Selection(passes=("backward",)))
    with pytest.raises(UnknownNameError, match="'wandbb'; did you mean 'wandb'"):
        send_run(run, "wandbb")
    with pytest.raises(UnknownNameError, match="see `export`"):
        send_run(run, "tensorboard")
    with pytest.raises(SpecError, match=r"mlflow: unknown key 'url'.*did you mean 'uri'"):
        send_run(run, "mlflow", {"url": "x"})
    tool.breaks = True
    with pytest.raises(StoreError, match=r"mlflow refused the run .ConnectionError: no route"):
        send_run(run, "mlflow", {"nodes": ""})
    assert tool.state == "failed"
    live = FakeRun(tmp_path / "live", nodes=("head",))
    live.write(1)
    with pytest.raises(StoreError, match="still being recorded"):
        send_run(open_run(live.path), "wandb")
    live.close()


@pytest.mark.usefixtures("tool")
def test_the_command_says_where_the_run_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert done("send", str(run.path), "wandb", "project=p", "--nodes", "", "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == "7"
    assert done("send", str(run.path), "wandb", "--series", "3") == Exit.WRONG
    assert "--nodes '' for metrics and findings only" in capsys.readouterr().err


@pytest.mark.filterwarnings("default")
def test_mlflow_has_the_same_run_live_and_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/tracking.db"
    run = trained(tmp_path, sinks=[{"mlflow": {"uri": uri}}])
    sent = send_run(run, "mlflow", {"uri": uri, "artifact": True})
    client = mlflow.MlflowClient(uri)
    live, later = (
        client.get_run(number) for number in (run.document("links")["mlflow"]["id"], sent["id"])
    )
    assert live.data.tags["comgra.run"] == later.data.tags["comgra.run"]
    assert live.data.metrics.keys() == later.data.metrics.keys()
    for name in live.data.metrics:
        told = [
            [(m.step, m.value) for m in client.get_metric_history(each.info.run_id, name)]
            for each in (live, later)
        ]
        assert told[0] == told[1]
    same(run, Path(client.download_artifacts(sent["id"], "comgra/run", str(tmp_path))))


@pytest.mark.filterwarnings("default")
def test_wandb_and_trackio_have_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    storage = pytest.importorskip("trackio.sqlite_storage")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    for variable in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "wandb"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = trained(tmp_path)
    truth = run.series("0", "std").to_dict()
    send_run(run, "wandb", {"mode": "offline"})
    wandb.teardown()
    (path,) = (tmp_path / "wandb").rglob("*.wandb")
    _, rows = config_and_rows(path)
    name = "0/output/forward/std"
    assert {row["comgra/step"]: row[name] for row in rows if name in row} == truth
    send_run(run, "trackio", {"project": "p"})
    logs = storage.SQLiteStorage.get_logs("p", run.name)
    assert {row["step"]: row[name] for row in logs if name in row} == truth
