"""What is recorded around the network: automatic metrics, growing memory, waiting and stalls."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import logging
import math
import os
import shutil
import signal
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import comgra_decl as comgra
from comgra_decl.cli.main import app
from comgra_decl.errors import RunNotFoundError, UnwrittenRunError
from comgra_decl.hooks import memory_use, stalls
from comgra_decl.hooks.loader_workers import loader_workers
from comgra_decl.hooks.scalars import automatic, growth, whereabouts
from comgra_decl.hooks.stalls import OwnWork
from comgra_decl.query import Run
from comgra_decl.record import live_spec
from comgra_decl.rules.resources.growing_memory import GrowingMemory
from comgra_decl.rules.resources.input_bound import InputBound, StalledStep
from comgra_decl.store import RunWriter, reader
from comgra_decl.store.last_seen import FILE, last_seen, last_writer, write_last_seen
from tests.rules.tape import Tape
from tests.support.fake_run import FakeRun
from tests.support.forked import PATIENCE, Program

AROUND = {
    "growing_memory", "input_bound", "stalled_step", "step_time_jump", "host_device_copies",
    "synchronising_call", "small_kernels", "idle_device",
}  # fmt: skip
TIMES = {"time/data", "time/forward", "time/backward", "time/optimizer", "time/step"}
SPEC = {
    "nodes": {"weights": {"select": "**", "capture": ["parameter_grad"]}},
    "schedule": {"first": 1, "every": 10},
    "graph": False,
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times every step that is not recorded, and reads the memory in every step."""
    monkeypatch.setattr(automatic, "INTERVAL", 0.0)
    monkeypatch.setattr(automatic, "MEMORY_INTERVAL", 0.0)
    # other tests of this process may have compiled, and compiled code is not timed
    monkeypatch.setattr(automatic, "anything_compiled", lambda: False)


def traced(root: Path, program: Callable[[], Any], **spec: Any) -> Run:
    with comgra.trace({**SPEC, **spec}, root=root, group="g") as session:
        program()
    assert session.path is not None
    return comgra.open_run(session.path)


def net(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = pairwise(widths)
    return nn.Sequential(*(part for a, b in pairs for part in (nn.Linear(a, b), nn.Tanh())))


# -- automatic metrics -------------------------------------------------------------------------


def two_groups(steps: int = 25) -> list[float]:
    """Train with two learning rates, one of which is halved every ten steps."""
    model = net(8, 16, 1)
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))))
        optimizer.step()
        schedule.step()
    return norms


@pytest.mark.usefixtures("always")
def test_metrics_are_taken_without_code_and_kept_apart(tmp_path: Path) -> None:
    norms: list[float] = []
    run = traced(tmp_path, lambda: norms.extend(two_groups()))
    assert set(run.kpis()["name"]) == {"loss"}
    table = run.kpis(automatic=True)
    assert {"lr", "lr[1]", "grad_norm", "memory/host", "samples_per_second", *TIMES} <= set(
        table["name"]
    )
    series = {str(name): part.set_index("step")["value"] for name, part in table.groupby("name")}
    assert series["lr"][5] == 0.1
    assert series["lr"][15] == 0.05
    assert series["lr[1]"][24] == 0.125
    recorded = series["grad_norm"]
    assert list(recorded.index) == list(run.steps)
    assert list(recorded) == pytest.approx([norms[step] for step in run.steps], rel=1e-5)
    assert series["memory/host"].min() > 1 << 20
    assert set(series["time/data"].index).isdisjoint(run.steps)  # these include the recording
    for name in TIMES:
        assert (series[name] >= 0).all()
    rate = series["samples_per_second"] * series["time/step"]
    assert rate.dropna().to_numpy() == pytest.approx(np.full(len(rate.dropna()), 4.0))


def test_the_first_timed_steps_follow_each_other_sooner() -> None:
    now = [0.0]
    metrics = automatic.AutomaticMetrics(
        wanted=True,
        scalars=Mock(),
        optimizers=Mock(rates=list),
        losses=Mock(),
        modules=Mock(running=False),
        on_fault=lambda error: pytest.fail(str(error)),
        clock=lambda: now[0],
    )
    metrics._modules_due = metrics._memory_due = metrics._utilization_due = math.inf
    timed = []
    for tick in range(200):  # steps of a tenth of a second
        now[0] = tick / 10
        metrics.begin_step(plain=True)
        if metrics.timing:
            timed.append(now[0])
        metrics.end_step(recorded=False, plain=None)
    assert timed[:6] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert np.diff(timed[5:]).tolist() == [2.0] * 8


def of_words(inputs: Tensor) -> Callable[[], None]:
    """Return a program that trains an embedding on a batch."""

    def program() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(15):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    return program


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_tokens_are_the_integers_that_a_language_model_receives(
    kind: torch.dtype, tmp_path: Path
) -> None:
    table = traced(tmp_path, of_words(torch.ones(3, 7, dtype=kind))).kpis(automatic=True)
    values = table.pivot_table(index="step", columns="name", values="value")
    values = values[["time/step", "tokens_per_second", "samples_per_second"]].dropna()
    assert len(values) >= 5
    times, *rates = values.to_numpy().T
    expected = [np.full(len(times), 21.0), np.full(len(times), 3.0)]  # tokens, samples
    np.testing.assert_allclose([rate * times for rate in rates], expected)


@pytest.mark.usefixtures("always")
def test_other_inputs_are_no_tokens(tmp_path: Path) -> None:
    run = traced(tmp_path, of_words(torch.ones(3, dtype=torch.int64)))
    assert "tokens_per_second" not in set(run.kpis(automatic=True)["name"])
    assert "samples_per_second" in set(run.kpis(automatic=True)["name"])


def two_devices(monkeypatch: pytest.MonkeyPatch, utilization: Callable[[int], int]) -> None:
    """Let torch report three CUDA devices, two of which hold tensors."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: [100, 20, 0][device])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: [400, 50, 0][device])
    monkeypatch.setattr(torch.cuda, "utilization", utilization)


def test_memory_and_use_of_devices_are_those_that_torch_and_the_driver_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (memory_use.reserved_bytes(), memory_use.device_utilization()) == (None, None)
    two_devices(monkeypatch, lambda device: [90, 40, 10][device])
    assert memory_use.device_bytes() == 120
    assert memory_use.reserved_bytes() == 450
    assert memory_use.device_utilization() == pytest.approx(0.65)


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), RuntimeError("driver"), OSError])
def test_without_the_drivers_answer_the_use_of_devices_is_missing(
    error: Exception | type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> int:
        raise error

    two_devices(monkeypatch, fail)
    assert memory_use.device_utilization() is None


@pytest.mark.usefixtures("always")
def test_metrics_of_devices_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"device_bytes": 7, "reserved_bytes": 9, "device_utilization": 0.5}.items():
        monkeypatch.setattr(automatic, name, lambda value=value: value)
    table = traced(tmp_path, two_groups).kpis(automatic=True).set_index("name")["value"]
    assert set(table["memory/device"]) == {7.0}
    assert set(table["memory/device_reserved"]) == {9.0}
    assert table["device/utilization"] == 0.5  # once in five seconds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_on_a_real_device_is_that_of_its_tensors() -> None:
    kept = torch.ones(1 << 20, device="cuda")
    allocated, reserved = memory_use.device_bytes(), memory_use.reserved_bytes()
    assert allocated is not None
    assert reserved is not None
    assert kept.nbytes <= allocated <= reserved
    share = memory_use.device_utilization()
    assert share is None or 0 <= share <= 1


@pytest.mark.usefixtures("always")
def test_an_optimizer_that_never_steps_has_no_learning_rate(tmp_path: Path) -> None:
    def program() -> None:
        model = net(4, 1)
        unused = torch.optim.Adam(model.parameters(), lr=1e-3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        later = torch.optim.SGD(model.parameters(), lr=0.25)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).mean().backward()
            (optimizer if step < 2 else later).step()
        assert unused.param_groups

    run = traced(tmp_path, program, schedule={"first": 10})
    values = run.kpis(automatic=True).query("name.str.startswith('lr')")
    assert values.groupby("name")["value"].unique().map(list).to_dict() == {
        "lr": [0.05],
        "lr[1]": [0.25],
    }


def test_one_key_switches_them_off(tmp_path: Path) -> None:
    run = traced(tmp_path, two_groups, kpis={"automatic": False})
    assert set(run.kpis(automatic=True)["name"]) == {"loss"}


@pytest.mark.usefixtures("always")
def test_a_metric_that_the_program_logs_takes_precedence(tmp_path: Path) -> None:
    def program() -> None:
        model = net(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            model(torch.ones(2, 4)).sum().backward()
            comgra.kpi("lr", 100.0 + step)
            optimizer.step()

    table = traced(tmp_path, program).kpis(automatic=True)
    assert list(table[table["name"] == "lr"]["value"]) == [100.0, 101.0, 102.0, 103.0, 104.0]


def test_between_timed_steps_nothing_is_attached(tmp_path: Path) -> None:
    """Timed steps are at most every two seconds, so a short program has none."""
    seen = []

    def program() -> None:
        model = net(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            hooks = nn.modules.module._global_forward_pre_hooks
            seen.append(len(hooks))
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    monkey = pytest.MonkeyPatch()
    monkey.setattr(automatic, "INTERVAL", 1e9)
    monkey.setattr(automatic, "FIRST_INTERVAL", 1e9)
    try:
        run = traced(tmp_path, program, schedule={"first": 1, "every": 1000})
    finally:
        monkey.undo()
    assert seen[2:] == [0] * 6
    assert "time/data" not in set(run.kpis(automatic=True)["name"])


# -- healthy programs --------------------------------------------------------------------------


def _loop(model: nn.Module, batches: Iterator[tuple[Tensor, ...]], loss: Any = None) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for inputs, *targets in batches:
        optimizer.zero_grad()
        out = model(inputs)
        out = out[0] if isinstance(out, tuple) else out
        value = out.square().mean() if loss is None else loss(out, *targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def _random(*shape: int, steps: int = 40) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (torch.randn(shape, generator=generator),)


def mlp() -> list[float]:
    return _loop(net(8, 32, 1), _random(16, 8))


def cnn() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return _loop(model, _random(4, 3, 8, 8))


def lstm() -> list[float]:
    torch.manual_seed(0)
    return _loop(nn.LSTM(4, 8), _random(6, 2, 4))


def transformer() -> list[float]:
    torch.manual_seed(0)
    return _loop(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), _random(2, 5, 8))


def data_loader() -> list[float]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(320, 8), torch.randint(0, 3, (320,)))
    batches = (tuple(batch) for batch in DataLoader(data, batch_size=8, shuffle=True))
    return _loop(nn.Linear(8, 3), batches, nn.functional.cross_entropy)


def accumulated() -> list[float]:
    model, losses = net(8, 8, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (inputs,) in enumerate(_random(4, 8, steps=80), 1):
        loss = model(inputs).square().mean()
        loss.backward()
        losses.append(loss.item())
        if number % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def two_models() -> list[float]:
    one, two, losses = net(4, 8, 4), net(4, 8, 1), []
    first = torch.optim.Adam(one.parameters(), lr=1e-3)
    second = torch.optim.Adam(two.parameters(), lr=1e-3)
    for (noise,) in _random(8, 4):
        second.zero_grad()
        critic = two(one(noise).detach()).mean()
        critic.backward()
        second.step()
        first.zero_grad()
        loss = -two(one(noise)).mean()
        loss.backward()
        first.step()
        losses.append(loss.item())
    return losses


def evaluated() -> list[float]:
    model, losses = net(8, 8, 1), []
    for epoch in range(4):
        model.train()
        losses += _loop(model, _random(8, 8, steps=10))
        model.eval()
        with torch.no_grad():
            losses.append(model(torch.full((32, 8), float(epoch))).mean().item())
    return losses


def mixed_precision() -> list[float]:
    model, losses = net(8, 16, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (inputs,) in _random(8, 8):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def closure() -> list[float]:
    model, losses = net(4, 4, 1), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for (inputs,) in _random(8, 4, steps=20):

        def again(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            loss = (model(inputs) - 1).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(again).item())
    return losses


HEALTHY = (mlp, cnn, lstm, transformer, data_loader, accumulated, two_models, evaluated,
           mixed_precision, closure)  # fmt: skip


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.__name__)
def test_healthy_programs_train_bit_equal_and_get_none_of_the_findings(
    program: Callable[[], list[float]], tmp_path: Path
) -> None:
    plain, state = program(), torch.get_rng_state()
    losses: list[float] = []
    # a busy machine may delay a tiny program
    rules = {"input_bound": {"least_ms": 20}, "step_time_jump": {"least_ms": 50}}
    run = traced(tmp_path, lambda: losses.extend(program()), rules=rules)
    assert losses == plain
    assert torch.equal(torch.get_rng_state(), state)
    assert AROUND.isdisjoint(run.findings()["rule"])
    values = run.kpis(automatic=True)
    assert np.isfinite(values["value"]).all()
    assert "memory/host" in set(values["name"])


# -- unhealthy programs ------------------------------------------------------------------------


def leaking(steps: int = 160) -> list[float]:
    """Keep the loss of each step with its graph."""
    losses = []
    model = net(64, 1024, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(256, 64)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


@pytest.mark.usefixtures("always")
def test_a_leak_is_found_and_what_grows_is_named(tmp_path: Path) -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that other tests have left would not grow
    run = traced(tmp_path, leaking)
    found = run.findings().set_index("rule")
    assert "growing_memory" in found.index
    message = str(found.loc["growing_memory", "message"])
    assert "What grows is `losses in leaking (test_around.py)` (1 more per step), " in message
    growing = run.kpis(automatic=True).query("name.str.startswith('growing/')")
    assert (growing["value"] == 1.0).all()
    assert "`tensors with graphs made by MeanBackward0 after 2` (1 more per step)" in message


@pytest.mark.usefixtures("always")
def test_a_starved_loader_is_found(tmp_path: Path) -> None:
    gate = threading.Event()

    def starved() -> None:
        model = net(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for (inputs,) in _random(4, 8, steps=14):
            gate.wait(0.05)  # a batch that comes late
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    found = traced(tmp_path, starved).findings().set_index("rule")
    assert "input_bound" in found.index
    assert "pass before the model is called" in str(found.loc["input_bound", "message"])


@pytest.mark.usefixtures("always")
@pytest.mark.slow
def test_steps_that_get_slower_are_found_with_their_first_step_and_phase(tmp_path: Path) -> None:
    gate, change = threading.Event(), 25

    def program() -> None:
        model = net(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(50):
            loss = model(torch.ones(4, 8)).square().mean()
            gate.wait(0.01 if step < change else 0.1)  # a part of the forward pass
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    table = traced(tmp_path, program).findings().query("rule == 'step_time_jump'")
    (found,) = table.to_dict("records")
    assert abs(found["first_step"] - change) <= 2  # some steps are recorded
    assert found["message"].endswith("Most of the increase is in the forward pass.")


def test_a_stalled_worker_leaves_a_report_with_all_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_spec, "_INTERVAL", 0.01)
    monkeypatch.setattr(stalls, "LEAST", 0.5)
    reported = threading.Event()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "has not ended for" in record.getMessage():
                reported.set()

    batches: list[Tensor] = []
    ended: list[int] = []

    def fetch_the_batch() -> None:
        assert reported.wait(60)
        batches.append(torch.ones(4, 8))

    def program() -> None:
        model = net(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, steps, until = torch.ones(4, 8), 0, time.monotonic() + 0.5
        while steps < 100 or time.monotonic() < until:  # so that steps are seen to end
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            steps += 1
        ended.append(steps)
        worker = threading.Thread(target=fetch_the_batch, name="worker")
        worker.start()
        worker.join(60)
        model(batches[0]).square().mean().backward()
        optimizer.step()

    handler = Listening()
    logging.getLogger("comgra_decl").addHandler(handler)
    try:
        run = traced(tmp_path, program)
    finally:
        logging.getLogger("comgra_decl").removeHandler(handler)
    notes = run.notes()
    (row,) = notes[notes["text"].str.contains("has not ended")].index
    note = notes["text"][row]
    assert note.startswith(f"step {ended[0]} has not ended")
    assert notes["step"][row] == ended[0]
    assert "MainThread:" in note
    assert "worker:" in note
    assert "in fetch_the_batch" in note
    assert "comgra-" not in note
    findings = run.findings().set_index("rule")
    assert findings.loc["stalled_step", "first_step"] == ended[0]


class Waiting(nn.Module):
    """Its forward pass lasts until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.began, self.may_end = threading.Event(), threading.Event()
        self.inner.register_forward_pre_hook(self._wait)

    def _wait(self, *_: object) -> None:
        self.began.set()
        assert self.may_end.wait(60)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_the_module_that_a_stalled_thread_computes_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Waiting())
    waiting = model[1]
    assert isinstance(waiting, Waiting)
    thread = threading.Thread(target=model, args=(torch.ones(2, 4),), name="trainer")
    thread.start()
    assert waiting.began.wait(60)
    told = stalls.stacks(lambda _: None)
    waiting.may_end.set()
    thread.join()
    assert (
        "trainer, in the forward pass of 1.inner (calls in progress: Sequential > 1 > 1.inner):"
        in told
    )


class Slow(torch.utils.data.Dataset[Tensor]):
    """Item 4 arrives only after a file has been written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, item: int) -> Tensor:
        if item == 4:
            (self.folder / "began").write_text(str(os.getpid()))
            with (self.folder / "gate").open() as gate:  # a pipe: waits for a writer
                gate.read()
        return torch.full((2,), float(item))


def test_the_states_of_the_workers_of_a_data_loader_are_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    loader = iter(DataLoader(Slow(tmp_path), batch_size=2, num_workers=2))
    next(loader), next(loader)
    thread = threading.Thread(target=next, args=(loader,), name="trainer")
    thread.start()
    while not (tmp_path / "began").exists() or "waiting for data" not in (
        doing := stalls.stacks(lambda _: None)
    ):
        assert thread.is_alive()
    head, first, second = loader_workers()
    (tmp_path / "gate").write_text("")
    thread.join()
    assert "trainer, waiting for data:" in doing
    assert head == "DataLoader of Slow, workers; batch 2 is from worker 0:"
    slow = (tmp_path / "began").read_text()
    assert first.startswith(f"  worker 0, process {slow}: sleeping, ")
    assert first.endswith("; has still to deliver batches 2")
    assert second.startswith("  worker 1, process ")


def test_without_loader_workers_none_are_reported() -> None:
    loader = iter(DataLoader(Slow(Path()), batch_size=2))
    next(loader)
    assert loader_workers() == []


def test_only_long_steps_outside_of_evaluations_stall() -> None:
    now, reports = [0.0], []
    watch = stalls.StallWatch(lambda *found: reports.append(found[0]), clock=lambda: now[0])
    for step in range(5):
        now[0] += 1.0
        watch.look(step, excused=False)
    for evaluating, until in ((True, 100.0), (False, 109.0)):
        while now[0] < until:
            now[0] += 1.0
            watch.look(4, excused=evaluating)
        assert not reports
    for _ in range(5):
        now[0] += 1.0
        watch.look(4, excused=False)
    assert reports == [10.0]


def test_a_step_may_stall_after_one_second_of_short_steps() -> None:
    now, reports = [0.0], []
    watch = stalls.StallWatch(lambda *found: reports.append(found[0]), clock=lambda: now[0])
    for step in (0, 30, *[60] * 7):
        watch.look(step, excused=False)
        now[0] += 1.0
    assert reports == [5.0]


def test_work_of_tracing_itself_is_no_stall() -> None:
    now, reports = [0.0], []
    clock = lambda: now[0]  # noqa: E731
    watch = stalls.StallWatch(lambda *found: reports.append(found[0]), clock=clock)
    own = OwnWork(clock)
    for step in range(30):
        now[0] += 1.0
        watch.look(step, excused=False)
    for working in (True, False, True):  # two pieces of work of 40 s, and 4 s between them
        with own if working else nullcontext():
            for _ in range(40 if working else 4):
                now[0] += 1.0
                with own if working else nullcontext():  # blocks may be nested
                    watch.look(29, excused=False, own=own.seconds)
    assert own.seconds == 80.0
    assert not reports
    for _ in range(6):
        now[0] += 1.0
        watch.look(29, excused=False, own=own.seconds)
    assert reports == [10.0]


@pytest.mark.slow
def test_copying_a_model_counts_as_work_of_tracing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    look = stalls.StallWatch.look

    def observed(watch: stalls.StallWatch, step: int, **given: Any) -> None:
        looks.append(given["own"])
        look(watch, step, **given)

    monkeypatch.setattr(stalls.StallWatch, "look", observed)
    grown: list[float] = []

    class Slow:
        def __deepcopy__(self, memo: Any) -> Slow:
            seen, until = len(looks), time.monotonic() + 60
            while len(looks) < seen + 2 and time.monotonic() < until:
                time.sleep(0.01)
            grown.append(looks[-1] - looks[-2])
            return self

    def program() -> None:
        model = net(4, 4)
        vars(model)["slow"] = Slow()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 4)).sum().backward()
            optimizer.step()

    traced(tmp_path, program, perturbations=True, schedule={"first": 5, "every": 1})
    assert grown[0] > 0.1


def test_each_stalled_step_is_reported_once_up_to_a_limit() -> None:
    now, reports = [0.0], []
    watch = stalls.StallWatch(lambda *found: reports.append(found[0]), clock=lambda: now[0])
    for step in range(100):
        now[0] += 1.0
        watch.look(step, excused=False)
        for _ in range(15 if step % 10 == 5 else 0):
            now[0] += 1.0
            watch.look(step, excused=False)
    assert reports == [10.0] * stalls.MOST


def test_the_rule_reports_each_stalled_step() -> None:
    tape = Tape(numbers=[("auto:stalled", "train", step, 60.0) for step in (40, 90)])
    found = tape.findings(StalledStep())
    assert [finding.first_step for finding in found] == [40, 90]
    assert "Step 90 had not ended after 60 s" in found[1].message


@pytest.mark.parametrize(
    ("data", "step", "says"),
    [
        ([5.0] * 8, [10.0] * 8, "(50%) pass before the model is called."),
        # a profiler starts
        ([5.0] * 8, [10.0] * 7 + [2000.0], "This is the median; the mean, in which single long"),
        # the queue of batches is empty
        ([1.0] * 7 + [90.0], [10.0] * 7 + [100.0], "; the median is 1 of 10 ms (10%)."),
        ([1.0] * 8, [10.0] * 7 + [2000.0], None),
        ([3.0] * 8, [10.0] * 8, None),
    ],
)
def test_a_single_long_step_does_not_hide_that_others_wait(
    data: list[float], step: list[float], says: str | None
) -> None:
    numbers = [
        (f"auto:time/{name}", "train", at, ms / 1000)
        for name, times in (("data", data), ("step", step))
        for at, ms in enumerate(times)
    ]
    found = Tape(numbers=numbers).findings(InputBound())
    assert bool(found) is (says is not None)
    assert all(str(says) in finding.message for finding in found)


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("auto:memory/host", "of the process"),
        ("auto:memory/device", "on the device"),
        ("auto:memory/device_reserved", None),  # tensors come and go in it
        ("host", None),  # a metric of the program
    ],
)
def test_only_the_memory_of_the_process_and_of_tensors_may_leak(
    name: str, whose: str | None
) -> None:
    tape = Tape(numbers=[(name, "train", step, (500 + step) * 2.0**20) for step in range(200)])
    messages = [finding.message for finding in tape.findings(GrowingMemory())]
    assert bool(messages) is (whose is not None)
    assert all(f"The memory {whose} grows steadily" in message for message in messages)


@pytest.mark.parametrize(
    ("gain", "known", "reported"),
    [
        (30e3, None, False),  # 30 MB in all, 22 of them after the first quarter
        (30e3, 24e3, True),
        (30e3, 10e3, False),  # most of what grows is not known
        (12e3, 12e3, False),  # too little
        (200e3, None, True),
    ],
)
def test_less_growth_is_reported_if_it_is_known_what_grows(
    gain: float, known: float | None, reported: bool
) -> None:
    sizes = [("auto:memory/host", "train", step, 5e8 + gain * step) for step in range(1000)]
    named = (
        [] if known is None else [("auto:growing_bytes/buffer bank of Net", "train", 999, known)]
    )
    tape = Tape(numbers=[*sizes, *named])
    assert bool(tape.findings(GrowingMemory())) is reported


def growing_slowly() -> set[str]:
    """Return what is found to grow by too little to be noticed in a dozen readings."""
    watch, found = growth.Growth(), set[str]()
    bank, block = torch.zeros(0), torch.zeros(1 << 16)
    for step in range(40 * growth.SAMPLES):
        if step % 16 == 0:
            bank = torch.cat([bank, block])
        found |= {gain.holder for gain in watch.look(step, (1 << 29) + (step << 16))}
    return found


def test_slow_growth_is_noticed_in_a_longer_time() -> None:
    gc.collect()
    assert growing_slowly() == {"bank in growing_slowly (test_around.py)"}


def growing() -> dict[str, float]:
    """Return what is found to grow while a list of tensors and a list of numbers grow.

    Not part of a test, because pytest rewrites functions with assertions to call `locals`.
    """
    watch = growth.Growth()
    kept: list[Tensor] = [torch.ones(1)] * 10
    numbers = list(range(10))
    found: dict[str, float] = {}
    for step in range(100):
        kept.append(torch.ones(1))
        numbers.append(step)
        found |= {gain.holder: gain.number for gain in watch.look(step, step << 20)}
    return found


def test_growth_needs_a_container_of_tensors_that_grows_with_the_steps() -> None:
    assert growing() == {"kept in growing (test_around.py)": 1.0}
    steady = growth.Growth()
    assert not any(steady.look(step, 1 << 30) for step in range(50))


class History:
    """Keeps tensors where no variable of the program leads in one step."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}


class Chain:
    """Keeps an output of each step in no container."""

    def __init__(self, before: Chain | None, output: Tensor) -> None:
        self.before, self.output = before, output


class Keeping:
    """A program that keeps something in each step, in a place that depends on the method."""

    def __init__(self) -> None:
        self.model: Any = net(4, 4, 1)
        self.extra = nn.Linear(1, 1)
        self.model.register_buffer("bank", torch.zeros(0))
        self.model[0].cache = torch.zeros(0)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.optimizer.state[self.extra.bias] = {"kept": torch.zeros(0)}
        self.histories, self.arrays = [[History()]], list[Any]()
        self.bank, self.total = torch.zeros(0), torch.zeros(1)
        self.chain: Chain | None = None
        self.block = torch.zeros(1 << 16)

    def nowhere(self, _: Tensor) -> None:
        pass

    def in_a_buffer(self, _: Tensor) -> None:
        self.model.bank = torch.cat([self.model.bank, self.block])

    def in_an_attribute(self, _: Tensor) -> None:
        self.model[0].cache = torch.cat([self.model[0].cache, self.block])

    def in_hooks(self, _: Tensor) -> None:
        self.model[2].register_forward_hook(lambda *_: None)

    def in_hooks_of_a_parameter(self, _: Tensor) -> None:
        self.model[0].bias.register_hook(lambda _: None)

    def in_the_optimizer(self, _: Tensor) -> None:
        state = self.optimizer.state[self.extra.bias]
        state["kept"] = torch.cat([state["kept"], self.block])

    def in_a_variable(self, _: Tensor) -> None:
        self.bank = torch.cat([self.bank, self.block])

    def in_a_sum(self, output: Tensor) -> None:
        self.total = self.total + output

    def in_an_object(self, _: Tensor) -> None:
        kept = self.histories[0][0].kept
        kept[len(kept)] = self.block.clone()

    def in_arrays(self, output: Tensor) -> None:
        self.arrays.append(output.detach().numpy())

    def in_dicts_of_arrays(self, output: Tensor) -> None:
        self.arrays.append({"step": len(self.arrays), "output": output.detach().numpy()})

    def in_numbers(self, output: Tensor) -> None:
        self.arrays.append(output.item())

    def in_a_chain(self, output: Tensor) -> None:
        self.chain = Chain(self.chain, output)

    def train(self, keep: Callable[[Tensor], None]) -> dict[str, tuple[float, bool]]:
        """Return what is found to grow."""
        watch = growth.Growth()
        found: dict[str, tuple[float, bool]] = {}
        for step in range(80):
            output = self.model(torch.ones(2, 4)).sum()
            output.backward(retain_graph=True)
            self.optimizer.step()
            keep(output)
            gains = watch.look(step, step << 20)
            found |= {gain.holder: (gain.number, gain.in_bytes) for gain in gains}
        return found


QUARTER = (float(1 << 18), True)  # of a mebibyte
ONE = (1.0, False)
HERE = "Keeping.train (test_around.py)"


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (Keeping.in_a_buffer, {"buffer bank of Sequential": QUARTER}),
        (Keeping.in_an_attribute, {"attribute cache of 0": QUARTER}),
        (Keeping.in_hooks, {"forward hooks of 2": ONE}),
        (Keeping.in_hooks_of_a_parameter, {"hooks of parameter bias of 0": ONE}),
        (Keeping.in_the_optimizer, {"states of Adam": QUARTER}),
        (Keeping.in_a_variable, {f"self.bank in {HERE}": QUARTER}),
        (Keeping.in_an_object, {f"self.histories[0][0].kept in {HERE}": ONE}),
        (Keeping.in_arrays, {f"self.arrays in {HERE}": ONE}),
        (Keeping.in_dicts_of_arrays, {f"self.arrays in {HERE}": ONE}),
        (Keeping.in_numbers, {}),
        (Keeping.in_a_chain, {"tensors with graphs made by SumBackward0 after 2": ONE}),
        (Keeping.nowhere, {}),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_what_grows_outside_of_lists_is_named(
    keep: Callable[[Keeping, Tensor], None], expected: dict[str, tuple[float, bool]]
) -> None:
    gc.collect()  # what the previous case kept would shrink meanwhile
    program = Keeping()
    assert program.train(lambda output: keep(program, output)) == expected


@pytest.mark.parametrize(("every", "named"), [(5, True), (20, False)])
def test_what_grows_in_one_of_several_steps_is_named_unless_that_is_rare(
    every: int, named: bool
) -> None:
    gc.collect()
    program, steps = Keeping(), itertools.count()

    def keep(output: Tensor) -> None:
        if next(steps) % every == 0:
            program.in_an_object(output)

    gains = program.train(keep)
    assert list(gains) == [f"self.histories[0][0].kept in {HERE}"] * named
    assert all(0.1 < number < 0.3 and not in_bytes for number, in_bytes in gains.values())


def test_a_running_sum_with_its_graph_is_named() -> None:
    program = Keeping()
    gains = program.train(program.in_a_sum)
    number, in_bytes = gains[f"operations in the graph of self.total in {HERE}"]
    assert not in_bytes
    assert number == 8  # two sums; of each layer, a transposition, a product and a tanh


@pytest.mark.usefixtures("always")
@pytest.mark.slow
def test_lists_of_tracing_itself_are_not_said_to_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = itertools.count()
    monkeypatch.setattr(automatic, "host_bytes", lambda: next(readings) << 20)

    def program() -> None:
        model = net(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = torch.ones(0)
        for _ in range(160):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            kept = torch.cat([kept, torch.ones(1 << 16)])

    names = traced(tmp_path, program).kpis(automatic=True)["name"]
    grown = set(names[names.str.startswith("growing")])
    assert len(grown) == 1
    assert grown.pop().startswith("growing_bytes/kept in ")


NUMBERS = range(200_000)


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        ([*NUMBERS], {199_998, 199_999}),
        (deque(NUMBERS), {199_998, 199_999}),
        ({-number: number for number in NUMBERS}, {199_998, 199_999}),
        ({*NUMBERS}, {0, 1}),  # in CPython's order
    ],
    ids=lambda given: type(given).__name__,
)
def test_the_newest_entries_of_a_container_are_read_without_copying_it(
    thing: Any, expected: set[int]
) -> None:
    tracemalloc.start()
    newest = whereabouts.newest(thing)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10_000  # bytes; a copy takes 1.6 million
    assert {*newest} == expected


def test_an_object_that_fails_when_looked_at_ends_neither_tracing_nor_other_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> dict[str, float]:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(growth.Growth, "look", fail)
    monkeypatch.setattr(automatic, "MEMORY_INTERVAL", 0.0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace("light", root=tmp_path) as session:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert run.state == "finished"
    assert "memory/host" in set(run.kpis(automatic=True)["name"])


# -- a process that is killed ------------------------------------------------------------------

TRAINING = """
import torch
from torch import nn
import comgra_decl as comgra
from comgra_decl.record import live_spec
live_spec._INTERVAL = 0.02
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with comgra.trace("light", root="runs", group="g", name="n"):
    while True:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def committed(folder: Path) -> bool:
    try:
        comgra.open_run(folder)
    except RunNotFoundError:  # it is being created
        return False
    return True


def test_a_killed_process_leaves_the_step_and_memory_it_was_last_seen_with(tmp_path: Path) -> None:
    program = Program(tmp_path, "-c", TRAINING)
    folder, until = tmp_path / "runs" / "g" / "n", time.monotonic() + 120
    while (seen := last_seen(folder)) is None or seen["step"] < 10:
        assert time.monotonic() < until, program.err.read_text()
        assert program.process.is_alive(), program.err.read_text()
        time.sleep(0.02)
    while not committed(folder):
        assert time.monotonic() < until, program.err.read_text()
        time.sleep(0.02)
    program.kill()
    run = comgra.open_run(folder)
    ending = run.ending
    assert run.state == "stopped"
    assert ending is not None
    assert ending.headline.startswith(
        "the process ended without finishing the run at or after step"
    )
    kept = last_seen(folder)
    assert kept is not None
    assert kept["step"] >= seen["step"]
    assert any("the process used" in line for line in ending.parts[0][1])
    step = max([int(kept["step"]), *run.steps.tolist()])
    assert f"at or after step {step}" in ending.headline
    shown = CliRunner().invoke(app, ["show", str(folder)], terminal_width=200).output
    assert "the process used" in shown


def killed_at(folder: Path, root: Path, steps: int) -> Run:
    """Write a run as a process leaves it that was killed, and last reported step 3."""
    fake = FakeRun(folder)
    fake.write(steps, commit=5)
    write_last_seen(folder, {"time": time.time(), "step": 3, "host": 1 << 30})
    return comgra.open_run(shutil.copytree(folder, root / "copy"))


@pytest.mark.parametrize(("steps", "last"), [(3, 3), (12, 11)])
def test_the_last_known_step_is_that_of_the_newest_record_or_report(
    steps: int, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = killed_at(tmp_path / "run", tmp_path, steps)
    assert run.state == "stopped"
    of_copy = run.ending
    assert of_copy is not None
    assert "still running" in of_copy.headline  # the process is this one
    assert not of_copy.failed
    monkeypatch.setattr(reader, "writer_alive", lambda *_, **__: False)
    assert run.ending is not None
    assert run.ending.failed
    assert run.ending.headline.endswith(f"without finishing the run at or after step {last}")
    assert f"last seen at step 3, {time.localtime().tm_year}" in run.ending.parts[0][1][0]
    assert ("last record: step 11" in run.ending.parts[0][1]) == (last == 11)
    (tmp_path / "copy" / FILE).unlink()  # as in a bucket
    assert run.ending.headline.endswith(
        f"at or after step {steps - 1}, or this is a copy from before it finished"
    )


def test_a_process_leaves_a_sign_of_life_before_its_run_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    create = RunWriter.create.__func__  # type: ignore[attr-defined]

    def observed(cls: type[RunWriter], path: Path, *given: Any, **named: Any) -> RunWriter:
        seen.append((last_seen(path), last_writer(path)))
        written: RunWriter = create(cls, path, *given, **named)
        return written

    monkeypatch.setattr(RunWriter, "create", classmethod(observed))
    run = traced(tmp_path, two_groups)
    ((facts, writer),) = seen
    assert facts["step"] == 0
    assert facts["host"] > 1 << 20
    assert writer["pid"] == os.getpid()
    assert run.state == "finished"
    assert isinstance(run.path, Path)
    assert not (run.path / FILE).exists()


@pytest.mark.parametrize("database", [True, False])
def test_a_run_without_a_commit_is_said_from_its_own_folder_and_from_those_above(
    database: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "g" / "n"
    folder.mkdir(parents=True)
    if database:
        (folder / "trace.ocdbt").mkdir()
    write_last_seen(folder, {"time": time.time(), "step": 2})
    places = [folder, folder.parent, tmp_path / "runs"]
    for place in places:
        with pytest.raises(RunNotFoundError, match=r"g/n' is being created"):
            comgra.open_run(place)
        for command in ("show", "diagnose"):
            found = said(command, place)
            assert found.exit_code == 2, found.output
            assert "is being created" in found.output
    listed = said("ls", tmp_path / "runs").output
    assert "no runs in" in listed
    assert "is being created" in listed
    monkeypatch.setattr(reader, "writer_alive", lambda *_, **__: False)
    for place in places:
        with pytest.raises(UnwrittenRunError, match=r"last seen at step 2\."):
            comgra.open_run(place)
    assert "nothing was written" in said("ls", tmp_path / "runs").output


def said(command: str, place: Path) -> Any:
    """Return what a command prints, on one line."""
    runner = CliRunner()
    result = runner.invoke(app, [command, str(place)], terminal_width=500)
    text = result.output + (str(result.exception) if result.exception else "")
    code = 2 if isinstance(result.exception, comgra.ComgraError) else result.exit_code
    return SimpleNamespace(exit_code=code, output=" ".join(text.split()))


WITHOUT_A_COMMIT = f"""
import threading
from comgra_decl.store.writer import RunWriter
def stuck(writer, *_):
    writer._db.place.mkdir()
    threading.Event().wait()
RunWriter._finish = stuck
{TRAINING}
"""


def test_a_process_that_is_killed_before_its_first_commit_is_known_at_once_to_be_gone(
    tmp_path: Path,
) -> None:
    program = Program(tmp_path, "-c", WITHOUT_A_COMMIT)
    folder, until = tmp_path / "runs" / "g" / "n", time.monotonic() + 120
    database = folder / "trace.ocdbt"
    while last_seen(folder) is None or not database.exists():
        assert time.monotonic() < until, program.err.read_text()
        assert program.process.is_alive(), program.err.read_text()
        time.sleep(0.02)
    os.utime(database, (1e9, 1e9))
    with pytest.raises(RunNotFoundError, match="is being created"):
        comgra.open_run(folder)  # however old it is, its process is there
    os.utime(database)
    program.kill()
    kept = last_seen(folder)
    assert kept is not None
    with pytest.raises(UnwrittenRunError, match=rf"last seen at step {kept['step']}\."):
        comgra.open_run(folder)  # however young it is


def test_what_is_last_seen_is_on_disk_before_it_replaces_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_last_seen(tmp_path, {"time": 1.0, "step": 3})
    flushed: list[str] = []

    def power_fails(number: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{number}").read_text())
        raise OSError("the power failed")

    monkeypatch.setattr(os, "fsync", power_fails)
    with pytest.raises(OSError, match="power"):
        write_last_seen(tmp_path, {"time": 2.0, "step": 4})
    assert [json.loads(text)["step"] for text in flushed] == [4]
    assert last_seen(tmp_path) == {"time": 1.0, "step": 3}


def test_a_finished_run_leaves_no_such_file(tmp_path: Path) -> None:
    run = traced(tmp_path, two_groups)
    assert run.ending is None
    assert isinstance(run.path, Path)
    assert not (run.path / FILE).exists()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"time": "now", "step": 3}', '{"time": 1.0}', '{"time": 1, "step": -4}',
     "[" * 100_000],
)  # fmt: skip
def test_a_forged_file_is_ignored(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    assert last_seen(tmp_path) is None


def test_a_nearly_full_memory_is_named_as_the_probable_reason(tmp_path: Path) -> None:
    run = traced(tmp_path, two_groups)
    facts = {"time": 1.0e9, "step": 70, "host": 15 << 30, "limit": 16 << 30, "used": 15.9 * 2**30}
    assert isinstance(run.path, Path)
    (run.path / FILE).write_text(json.dumps(facts))
    os.utime(run.path / FILE)

    class Stopped(Run):
        state = "stopped"

    ending = Stopped(run.path).ending
    assert ending is not None
    assert ending.headline.endswith("at or after step 70, probably because memory ran out")


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used"),
    [
        ("0::", "", "memory.max", "memory.current"),
        ("7:cpu,memory:", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_limit_is_that_of_the_group_around_the_process_with_the_least_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, folder: str, limit: str, used: str
) -> None:
    groups = {"": ("max", 90), "job": ("50", 30), "job/step": ("40", 5), "job/step/task": ("60", 5)}
    for name, (most, now) in groups.items():
        place = tmp_path / folder / name
        place.mkdir(parents=True, exist_ok=True)
        (place / limit).write_text(f"{most}\n")
        (place / used).write_text(f"{now}\n")
    (tmp_path / "own").write_text(f"3:freezer:/elsewhere\n{line}/job/step/task/gone\n")
    monkeypatch.setattr(memory_use, "_MOUNT", tmp_path)
    monkeypatch.setattr(memory_use, "_GROUPS", tmp_path / "own")
    facts = memory_use.memory_limit()
    assert (facts["limit"], facts["used"]) == (50, 30)
    (tmp_path / "own").write_text("")
    assert memory_use.memory_limit()["limit"] > 1 << 20, "that of the machine"


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that may use 600 MB of memory, and whose processes the kernel then kills."""
    first = Path("/sys/fs/cgroup/memory")
    old = first.is_dir()
    made = (first if old else first.parent) / f"comgra-test-{os.getpid()}"
    limits = {"memory.limit_in_bytes": 6 * 10**8, "memory.swappiness": 0}
    try:
        made.mkdir()
        for name, value in (
            limits if old else {"memory.max": 6 * 10**8, "memory.swap.max": 0}
        ).items():
            (made / name).write_text(str(value))
    except OSError:
        with suppress(OSError):
            made.rmdir()
        pytest.skip("this process must not create control groups")
    yield made
    until = time.monotonic() + PATIENCE
    while made.is_dir():  # until the kernel has removed the process
        with suppress(OSError):
            made.rmdir()
        assert time.monotonic() < until


OUT_OF_MEMORY = TRAINING.replace(
    "    while True:\n",
    """    import os, pathlib, sys
    pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    kept = []
    while True:
        kept.append(torch.ones(1 << 18))
""",
)


@pytest.mark.slow
def test_of_a_process_that_the_kernel_kills_for_its_memory_the_reason_is_known(
    tmp_path: Path, group: Path
) -> None:
    program = Program(tmp_path, "-c", OUT_OF_MEMORY, str(group))
    assert program.ended().returncode == -signal.SIGKILL
    run = comgra.open_run(tmp_path / "runs" / "g" / "n")
    ending = run.ending
    assert ending is not None
    assert ending.headline.endswith("probably because memory ran out")
    assert any("of 0.56 GiB were in use" in line for line in ending.parts[0][1])
