"""Sinks receive what is committed, and never disturb the program."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import SpecError
from comgra_decl.query import Run
from comgra_decl.sinks import About, Graph, Moment, making
from comgra_decl.sinks import live as live_sinks
from comgra_decl.spec import load_spec

SPEC = {
    "nodes": {"all": {"select": "**", "capture": ["output", "output_grad", "parameter"]}},
    "schedule": {"first": 1_000_000},
    "histogram": {"bins": 8},
    "sinks": ["trackio"],
}


class Memory:
    """A sink that keeps everything, and fails or waits when asked to."""

    def __init__(self) -> None:
        self.numbers: dict[str, dict[int, float]] = {}
        self.texts: list[tuple[int, str, str]] = []
        self.histograms: dict[str, dict[int, NDArray[np.int64]]] = {}
        self.graphs: list[Graph] = []
        self.about: About | None = None
        self.state: str | None = None
        self.where = "/log"
        self.before: Callable[[], object] = lambda: None

    def begin(self, about: About) -> None:
        self.about = about

    @property
    def link(self) -> dict[str, str]:
        return {"id": "7", "where": self.where}

    def scalars(self, at: Moment, values: Mapping[str, float]) -> None:
        self.before()
        for name, value in values.items():
            self.numbers.setdefault(name, {})[at.step] = value

    def histogram(
        self, at: Moment, name: str, counts: NDArray[np.int64], edges: NDArray[np.float64]
    ) -> None:
        self.histograms.setdefault(name, {})[at.step] = counts

    def image(self, at: Moment, name: str, pixels: NDArray[np.uint8]) -> None:
        raise AssertionError("pictures are not sent while the program trains")

    def text(self, at: Moment, name: str, text: str) -> None:
        self.texts.append((at.step, name, text))

    def graph(self, at: Moment, graph: Graph) -> None:
        self.graphs.append(graph)

    def end(self, state: str) -> None:
        self.state = state


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory()
    monkeypatch.setattr(making, "maker_of", lambda *_: lambda: found)
    return found


def trained(root: Path, *, steps: int = 5, **changes: Any) -> tuple[Run | None, bytes]:
    """Trains with tracing; returns the run and the bits of the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace({**SPEC, **changes}, root=root, group="g") as session:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(6, 3)).square().mean().backward()
            optimizer.step()
            comgra.kpi("accuracy", step / 10)
            if step == 3:
                comgra.note("warm-up is over")
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return None if session.path is None else comgra.open_run(session.path), bits


def test_a_sink_receives_exactly_what_the_run_contains(tmp_path: Path, sink: Memory) -> None:
    run, _ = trained(tmp_path)
    assert run is not None
    assert sink.about is not None
    assert run.document("links") == {"trackio": {"id": "7", "where": "/log"}}
    assert sink.about.path == str(run.path.absolute())
    assert (sink.about.name, sink.about.group, sink.state) == (run.name, "g", "finished")
    for statistic in ("mean", "std", "abs_max"):
        truth = run.series("0", statistic)
        assert sink.numbers[f"0/output/forward/{statistic}"] == truth.to_dict()
        truth = run.slot("2", role="weight").series(statistic)
        assert sink.numbers[f"2/weight/forward/{statistic}"] == truth.to_dict()
    for name, metric in run.kpis(automatic=True).groupby("name"):
        told = sink.numbers[f"metrics/{name}"]
        assert told == dict(zip(metric["step"], metric["value"], strict=True))
    steps, counts, _ = run.slot("1").grad.histograms()
    bins = sink.histograms["1/output/grad"]
    assert [*bins] == steps.tolist()
    assert np.array_equal([*bins.values()], counts)
    assert (3, "notes/train", "warm-up is over") in sink.texts
    assert [(e.source, e.sink) for e in sink.graphs[-1].edges] == run.edges()


def test_training_is_the_same_to_the_bit(tmp_path: Path, sink: Memory) -> None:
    _, with_sink = trained(tmp_path)
    _, without = trained(tmp_path, enabled=False)
    assert with_sink == without
    assert sink.numbers


def test_a_selection_that_is_too_large_leaves_the_metrics(
    tmp_path: Path, sink: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "comgra_decl"):
        trained(tmp_path, sinks=[{"trackio": {"series": 2}}])
    assert {name.partition("/")[0] for name in sink.numbers} == {"metrics"}
    (said,) = [r.getMessage() for r in caplog.records if "receives only metrics" in r.getMessage()]
    assert "at most 2 are sent" in said


def test_a_sink_that_fails_is_reported_once_and_switched_off(
    tmp_path: Path, sink: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise ConnectionError("the server is gone")

    sink.before = fail
    with caplog.at_level(logging.WARNING, "comgra_decl"):
        run, bits = trained(tmp_path, store={"commit_interval": 0})
    assert run is not None
    assert (run.state, run.steps.tolist()) == ("finished", [0, 1, 2, 3, 4])
    assert bits == trained(tmp_path, enabled=False)[1]
    assert len(calls) == 1
    (said,) = [r.getMessage() for r in caplog.records if "trackio" in r.getMessage()]
    assert said == (
        "comgra: nothing more is sent to trackio (ConnectionError: the server is gone); "
        "recording and training continue"
    )


@pytest.fixture
def stuck(sink: Memory, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A sink that accepts nothing until the event is set."""
    released = threading.Event()
    sink.before = released.wait
    monkeypatch.setattr(live_sinks, "WAIT", 0.05)
    yield released
    released.set()


def test_a_sink_that_hangs_delays_neither_training_nor_the_run(
    tmp_path: Path, stuck: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "comgra_decl"):
        run, _ = trained(tmp_path)
    assert not stuck.is_set()
    assert run is not None
    assert (run.state, len(run.steps)) == ("finished", 5)
    assert "trackio did not accept everything within 0.05 s" in caplog.text


def test_what_does_not_fit_is_left_out_and_counted(
    sink: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    from comgra_decl.sinks import Selection
    from tests.store.truth import Truth

    truth = Truth()
    first, second, third = truth.batch(1, range(2)), truth.batch(1, range(2)), truth.batch(1, [1])
    entered, released = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        released.wait()

    sink.before = hold
    about = About("run", "g", "/run", 0.0, {}, tuple(truth.meta.statistics))
    live = live_sinks.LiveSink(
        "trackio", lambda: sink, about=about, selection=Selection(), queue_bytes=1
    )
    live.put([first], [])
    assert entered.wait(60)
    live.put([second], [])  # waits, although it is larger than the queue
    live.put([third], [])
    sink.before = lambda: None
    released.set()
    with caplog.at_level(logging.WARNING, "comgra_decl"):
        live.close("finished", wait=60)
    assert "trackio was too slow: 1 records were not sent to it" in caplog.text
    steps = {step for series in sink.numbers.values() for step in series}
    assert steps == {info.step for batch in (first, second) for info in batch.steps}


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ([{"tensorbord": {}}], "tensorboard"),
        ([{"wandb": {}, "mlflow": {}}], "exactly one of tensorboard, wandb, mlflow, trackio"),
        ([{"wandb": {"projekt": "x"}}], "project"),
    ],
)
def test_a_wrong_sink_is_named(sinks: list[Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_spec({**SPEC, "sinks": sinks})


def test_passwords_are_not_stored(tmp_path: Path, sink: Memory) -> None:
    uri = "postgresql://me:pa@word@host:5432/db"
    sink.where = uri
    run, _ = trained(tmp_path, sinks=[{"mlflow": {"uri": uri}}])
    assert run is not None
    told = "postgresql://host:5432/db"
    assert run.document("links") == {"mlflow": {"id": "7", "where": told}}
    assert run.spec.sinks[0].options.uri == told  # type: ignore[attr-defined]
    assert told in (run.path / "spec.yaml").read_text()
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"pa@word" in content for content in files)


@pytest.mark.usefixtures("sink")
def test_sinks_survive_the_way_through_the_run(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, sinks=["tensorboard", {"wandb": {"project": "x"}}])
    assert run is not None
    assert [each.tool for each in run.spec.sinks] == ["tensorboard", "wandb"]
    assert run.spec.sinks[1].options.project == "x"  # type: ignore[attr-defined]
