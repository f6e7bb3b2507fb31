"""Sinks receive what is committed, and never disturb the program."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import SpecError
from comgra_decl.pictures.tiles import tiled
from comgra_decl.query import Run
from comgra_decl.record import session
from comgra_decl.records import Note, ScalarBatch
from comgra_decl.sinks import About, Graph, Moment, Selection, making
from comgra_decl.sinks import live as live_sinks
from comgra_decl.sinks.points import Points
from comgra_decl.spec import load_spec
from tests.cli.test_commands import done
from tests.store.truth import Truth
from tests.support.traced import train

SPEC = {
    "nodes": {"all": {"select": "**", "capture": ["output", "output_grad", "parameter"]}},
    "schedule": {"first": 1_000_000},
    "histogram": {"bins": 8},
    "sinks": ["trackio"],
}


@pytest.mark.parametrize("stated", ["tensorbord", {"tensorbord": {}}])
def test_a_misspelled_sink_is_named_with_the_valid_ones(stated: Any) -> None:
    with pytest.raises(SpecError) as wrong:
        load_spec({"sinks": [stated]})
    known = "tensorboard, wandb, mlflow, trackio"
    assert str(wrong.value).endswith(
        f"comgra.sinks[0]: 'tensorbord' is not a sink; valid sinks: {known}; "
        "did you mean 'tensorboard'?"
    )


class Memory:
    """A sink that keeps everything, and fails or waits when asked to."""

    def __init__(self) -> None:
        self.numbers: dict[str, dict[int, float]] = {}
        self.texts: list[tuple[int, str, str]] = []
        self.histograms: dict[str, dict[int, NDArray[np.int64]]] = {}
        self.graphs: list[Graph] = []
        self.images: dict[str, dict[int, NDArray[np.uint8]]] = {}
        self.threads: set[int] = set()
        self.about: About | None = None
        self.copied: Any = None
        self.copy_state = ""
        self.copied_files: set[str] = set()
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
        self.images.setdefault(name, {})[at.step] = pixels
        self.threads.add(threading.get_ident())

    def text(self, at: Moment, name: str, text: str) -> None:
        self.texts.append((at.step, name, text))

    def graph(self, at: Moment, graph: Graph) -> None:
        self.graphs.append(graph)

    def points(self, records: Sequence[Points]) -> None:
        raise AssertionError("only TensorBoard has a projector")

    def artifact(self, folder: Path) -> None:
        self.copied = comgra.open_run(folder).kpis()
        self.copied_files = {path.name for path in folder.iterdir()}
        self.copy_state = comgra.open_run(folder).state
        if self.where == "/full":
            raise ConnectionError("the server is full")

    def end(self, state: str) -> None:
        self.state = state


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory()
    monkeypatch.setattr(making, "maker_of", lambda *_, **__: lambda: found)
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


IMAGES: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = [
    (np.full((2, 3), 7, np.uint8), np.full((2, 3, 3), 7, np.uint8)),
    (np.full((2, 3, 3), (1, 2, 3), np.uint8), np.full((2, 3, 3), (1, 2, 3), np.uint8)),
    (np.full((2, 3, 4), (255, 0, 0, 51), np.uint8), np.full((2, 3, 3), (255, 204, 204), np.uint8)),
]
"""Grey, coloured and transparent images, and how tools show them."""


def test_what_the_program_shows_is_sent_at_its_step(tmp_path: Path, sink: Memory) -> None:
    with comgra.trace(SPEC, root=tmp_path, group="g"):
        train(nn.Linear(3, 1), torch.randn(6, 3), steps=2)
        for number, (image, _) in enumerate(IMAGES):
            comgra.image(image, f"batch/{number}")
        comgra.text("größer als\n0", "output")
        train(nn.Linear(3, 1), torch.randn(6, 3))
    shown = {f"shown/batch/{number}": {1: image} for number, (_, image) in enumerate(IMAGES)}
    assert {*sink.images} == {*shown}
    for name, by_step in shown.items():
        assert [*sink.images[name]] == [*by_step]
        assert np.array_equal(sink.images[name][1], by_step[1])
    assert (1, "shown/output", "größer als\n0") in sink.texts
    assert threading.get_ident() not in sink.threads


@pytest.mark.parametrize("where", ["/log", "/full"])
def test_a_copy_of_the_finished_run_is_stored_on_request(
    tmp_path: Path, sink: Memory, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink.where = where
    run, _ = trained(tmp_path, sinks=[{"trackio": {"artifact": True}}])
    assert run is not None
    assert sink.copy_state == sink.state == "finished"
    assert sink.copied.equals(run.kpis())
    assert "last_seen.json" not in sink.copied_files  # which says that the process is alive
    failed = "trackio has no copy of the run (ConnectionError: the server is full)"
    assert (failed in caplog.text) == (where == "/full")


def test_no_copy_is_stored_unless_it_is_asked_for(tmp_path: Path, sink: Memory) -> None:
    trained(tmp_path)
    assert sink.copied is None


PROBED = {
    "probes": {"eyes": {"samples": {"count": 4}, "schedule": {"first": 3}}},
    "pictures": {"cam": {"method": "grad_cam", "of": "eyes", "select": "conv"}},
}


class Convolutional(nn.Module):
    """Has a layer for a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


def classified(root: Path, **changes: Any) -> Run:
    """Trains a classifier, with a picture of each step."""
    torch.manual_seed(0)
    model, x = Convolutional(), torch.randn(8, 1, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace({**SPEC, **PROBED, **changes}, root=root, group="g") as session:
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), torch.arange(8) % 3).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path)


def test_pictures_of_probes_are_sent_at_their_steps(tmp_path: Path, sink: Memory) -> None:
    run = classified(tmp_path)
    found = sink.images["conv/output/picture:cam"]
    assert [*found] == [0, 1, 2]
    for step, pixels in found.items():
        assert np.array_equal(pixels, tiled(run.picture("cam", step, "conv").values))


@pytest.mark.parametrize("options", [{"nodes": "head"}, {"nodes": ""}, {"pictures": False}])
def test_only_pictures_of_the_selected_nodes_are_sent(
    tmp_path: Path, sink: Memory, options: dict[str, Any]
) -> None:
    classified(tmp_path, sinks=[{"trackio": options}])
    assert sink.numbers
    assert sink.images == {}


@pytest.mark.slow
def test_pictures_have_limits(tmp_path: Path, sink: Memory) -> None:
    with comgra.trace(SPEC, root=tmp_path, group="g"):
        for step in range(90):
            train(nn.Linear(3, 1), torch.randn(6, 3))
            comgra.image(IMAGES[0][0], "often")
            if step < 25:
                comgra.image(IMAGES[0][0], f"name {step}")
    often = [*range(20), *range(20, 40, 2), *range(40, 80, 4), 80, 88]
    assert [*sink.images["shown/often"]] == often
    assert {*sink.images} == {"shown/often", *(f"shown/name {number}" for number in range(19))}


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


def test_series_of_evaluations_beyond_the_limit_are_left_out(
    tmp_path: Path, sink: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["output"]}},
        "stats": ["mean", "std", "abs_max", "nonfinite"],
        "sinks": [{"trackio": {"series": 4, "nodes": "Linear"}}],
    }
    with (
        caplog.at_level(logging.WARNING, "comgra_decl"),
        comgra.trace(spec, root=tmp_path, group="g"),
    ):
        for _ in range(5):
            model.train()
            model(torch.ones(6, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(torch.ones(6, 3))
    series = {name for name in sink.numbers if not name.startswith("metrics")}
    assert series == {f"Linear/output/forward/{name}" for name in ("mean", "std", "abs_max")}
    assert len(sink.numbers["Linear/output/forward/mean"]) == 5
    (said,) = [r.getMessage() for r in caplog.records if "no series of 'eval'" in r.getMessage()]
    assert "are 6 series, but at most 4 are sent" in said


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
    assert sink.state == "stopped"
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


def live_of(
    truth: Truth,
    make: Callable[[], Memory],
    *,
    selection: Selection | None = None,
    queue_bytes: int = 1 << 20,
) -> live_sinks.LiveSink:
    about = About("run", "g", "/run", 0.0, {}, tuple(truth.meta.statistics))
    return live_sinks.LiveSink(
        "trackio",
        make,
        about=about,
        selection=selection or Selection(),
        queue_bytes=queue_bytes,
    )


def test_what_does_not_fit_is_left_out_and_counted(
    sink: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    truth = Truth()
    first, second = truth.batch(1, range(2)), truth.batch(1, range(2))
    third, fourth = truth.batch(1, [1]), truth.batch(1, [1])
    entered, released = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        released.wait()

    sink.before = hold
    live = live_of(truth, lambda: sink, queue_bytes=1)
    live.put([first], [])
    assert entered.wait(60)
    live.put([second], [])  # waits, although it is larger than the queue
    note = Note(1, "train", 0.0, "x")
    numbers = ScalarBatch(np.arange(2), np.zeros(2), ["a", "b"], ["train"] * 2, [note])
    live.put([third], [numbers])
    live.put([fourth], [])
    assert len(live._queue) == 2  # what a hanging tool misses takes no more room
    sink.before = lambda: None
    released.set()
    with caplog.at_level(logging.WARNING, "comgra_decl"):
        live_sinks.close_sinks([live], "finished", wait=60)
    assert (
        "trackio was too slow: 2 records and 3 metrics and notes were not sent to it" in caplog.text
    )
    steps = {step for series in sink.numbers.values() for step in series}
    assert steps == {info.step for batch in (first, second) for info in batch.steps}


def test_only_what_is_sent_waits(sink: Memory) -> None:
    truth = Truth()
    batch = truth.batch(2, range(2))
    batch.values = [{0: np.zeros(1 << 20)}, {}]
    batch.documents = {"profile": {}, "findings": {"findings": []}}
    released = threading.Event()
    sink.before = released.wait
    live = live_of(truth, lambda: sink, selection=Selection(histograms=False))
    live.put([truth.batch(1, range(2))], [])
    live.put([batch], [])
    (kept,) = live._queue[-1][0][0]
    assert kept.nbytes < 1 << 16 < batch.nbytes
    assert (kept.values, kept.counts, [*kept.documents]) == ([], None, ["findings"])
    released.set()
    live_sinks.close_sinks([live], "finished", wait=60)
    steps = {step for series in sink.numbers.values() for step in series}
    assert steps == {info.step for info in batch.steps}


def test_a_run_that_recorded_nothing_has_no_counterpart(tmp_path: Path, sink: Memory) -> None:
    run, _ = trained(tmp_path, steps=0)
    assert run is not None
    assert run.document("findings") is not None
    assert (sink.about, sink.state) == (None, None)
    assert run.document("links") is None


@pytest.mark.usefixtures("sink")
@pytest.mark.parametrize("recorded", ["metrics", "records"])
def test_a_run_that_is_committed_once_knows_its_counterpart(tmp_path: Path, recorded: str) -> None:
    model = nn.Linear(3, 1).eval()
    spec = {**SPEC, "store": {"commit_interval": 1000}}
    spec["schedule"] = {"first": 1, "eval": {"every": 1}}
    with comgra.trace(spec, root=tmp_path, group="g") as traced:
        if recorded == "metrics":
            comgra.kpi("accuracy", 1.0)
        else:
            with torch.no_grad():
                model(torch.randn(6, 3))
    assert traced.path is not None
    run = comgra.open_run(traced.path)
    assert (len(run.records), len(run.kpis(automatic=True))) == (
        (0, 1) if recorded == "metrics" else (1, 0)
    )
    assert run.document("links") == {"trackio": {"id": "7", "where": "/log"}}


def test_sinks_end_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first sink ends only after the second has been told to."""
    first, second, told = Memory(), Memory(), threading.Event()
    monkeypatch.setattr(first, "end", lambda _: told.wait())
    monkeypatch.setattr(second, "end", lambda _: told.set())
    sinks = {"trackio": first, "wandb": second}
    monkeypatch.setattr(making, "maker_of", lambda spec, *_, **__: lambda: sinks[spec.tool])
    with caplog.at_level(logging.WARNING, "comgra_decl"):
        trained(tmp_path, sinks=["trackio", "wandb"])
    assert told.is_set()
    assert "did not accept" not in caplog.text


def test_all_sinks_together_delay_the_last_commit_once(
    tmp_path: Path,
    sink: Memory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begin, waits = threading.Event(), []
    monkeypatch.setattr(sink, "begin", lambda _: begin.wait())
    monkeypatch.setattr(session, "_LINK_TIMEOUT", 0.2)
    monkeypatch.setattr(live_sinks, "WAIT", 0.05)
    usual = live_sinks.LiveSink.link_within

    def waiting(self: live_sinks.LiveSink, wait: float) -> dict[str, str] | None:
        waits.append(wait)
        return usual(self, wait)

    monkeypatch.setattr(live_sinks.LiveSink, "link_within", waiting)
    trained(tmp_path, sinks=["trackio", "wandb", "mlflow"])
    begin.set()
    assert len(waits) == 3
    assert sum(waits) < 0.3
    for tool in ("trackio", "wandb", "mlflow"):  # nothing is lost silently
        assert f"{tool} had not created its run" in caplog.text


def test_the_run_is_finished_before_the_exit_hooks_of_tools(
    tmp_path: Path, sink: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool's hook, such as W&B's, would end its run before the rest is sent."""
    hooks: list[object] = []
    at_first: list[object] = []

    class Exit:
        register = staticmethod(hooks.append)
        unregister = staticmethod(hooks.remove)

    monkeypatch.setattr(session, "atexit", Exit)
    monkeypatch.setattr(sink, "begin", lambda _: hooks.append("of the tool"))
    sent = threading.Event()

    def look() -> None:
        if not sent.is_set():
            at_first.extend(hooks)
        sent.set()

    sink.before = look
    with comgra.trace(SPEC, root=tmp_path, group="g"):
        train(nn.Linear(3, 1), torch.randn(6, 3))
        assert sent.wait(60)
    assert at_first[0] == "of the tool"
    assert at_first[1].__name__ == "_finish_at_exit"  # type: ignore[attr-defined]
    assert hooks == ["of the tool"]


def test_logging_that_fails_does_not_reach_the_program(
    tmp_path: Path, stuck: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("the disk for logs is full")

    logger, handler = logging.getLogger("comgra_decl"), Broken(logging.WARNING)
    logger.addHandler(handler)
    try:
        run, _ = trained(tmp_path)
    finally:
        logger.removeHandler(handler)
    assert not stuck.is_set()
    assert run is not None
    assert "trackio did not accept everything within 0.05 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ([{"tensorbord": {}}], "tensorboard"),
        ([{"wandb": {}, "mlflow": {}}], "exactly one of tensorboard, wandb, mlflow, trackio"),
        ([{"wandb": {"projekt": "x"}}], "project"),
        ([{"wandb": {"nodes": "blocks..x"}}], "'blocks..x' has an empty name"),
        (
            [{"wandb": {"statistics": ["std", "abs_mix"]}}],
            r"sinks\[0\]\.wandb.*'abs_mix'.*'abs_max'",
        ),
        ([{"wandb": {"statistics": ["std.max"]}}], "'std.max'.*each also with .std, .abs_max"),
        ([{"wandb": {"passes": ["gard"]}}], "'gard' is not a pass.*did you mean 'grad'"),
        ([{"wandb": {"mode": "of"}}], "not one of online, offline, disabled"),
        ([{"wandb": {"project": ""}}], "must not be empty"),
        ([{"tensorboard": {"folder": "s3://b/logs"}}], "must be a folder on this machine"),
        (["mlflow", {"mlflow": {"uri": "sqlite:///x"}}], "names mlflow twice"),
    ],
)
def test_a_wrong_sink_is_named(sinks: list[Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_spec({**SPEC, "sinks": sinks})


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": "", "passes": ["grad:raw", "no_grad"]},
        {"nodes": "blocks.**", "statistics": ["std", "l2.abs_max"], "passes": ["forward"]},
    ],
)
def test_a_right_sink_is_accepted(options: dict[str, Any]) -> None:
    assert load_spec({**SPEC, "sinks": [{"wandb": options}]}).sinks[0].tool == "wandb"


def test_a_folder_is_relative_to_where_the_trace_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = {**SPEC, "sinks": [{"tensorboard": {"folder": "logs"}}]}
    with comgra.trace(spec, root=tmp_path, group="g") as traced:
        monkeypatch.chdir(tmp_path / "elsewhere")
        train(nn.Linear(3, 1), torch.randn(6, 3))
    assert traced.path is not None
    run = comgra.open_run(traced.path)
    assert run.document("links") == {"tensorboard": {"where": str(tmp_path / "logs")}}
    assert [path.suffix for path in (tmp_path / "logs").iterdir()]


def test_show_says_where_the_tools_have_the_run(
    tmp_path: Path, sink: Memory, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = trained(tmp_path)
    assert run is not None
    assert done("show", str(run.path)) == 0
    assert ["in", "trackio", sink.where] in [
        x.split() for x in capsys.readouterr().out.splitlines()
    ]
    assert done("show", str(run.path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["links"] == run.document("links")


def test_passwords_are_not_stored(tmp_path: Path, sink: Memory) -> None:
    uri = "postgresql://me:pa@word@host:5432/db"
    sink.where = uri
    run, _ = trained(tmp_path, sinks=[{"mlflow": {"uri": uri}}])
    assert run is not None
    told = "postgresql://host:5432/db"
    assert run.document("links") == {"mlflow": {"id": "7", "where": told}}
    assert run.spec.sinks[0].options.uri == told  # type: ignore[attr-defined]
    assert told in (Path(str(run.path)) / "spec.yaml").read_text()
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"pa@word" in content for content in files)


@pytest.mark.usefixtures("sink")
def test_sinks_survive_the_way_through_the_run(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, sinks=["tensorboard", {"wandb": {"project": "x"}}])
    assert run is not None
    assert [each.tool for each in run.spec.sinks] == ["tensorboard", "wandb"]
    assert run.spec.sinks[1].options.project == "x"  # type: ignore[attr-defined]
