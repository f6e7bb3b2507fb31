"""The numbers of every step are the true ones, and taking them changes nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import comgra_decl as comgra
from comgra_decl.errors import RunNotFoundError
from comgra_decl.hooks.words.numbers import LateNumbers, read_number
from comgra_decl.query import Run

SPARSE = {"nodes": {"all": {"select": "**"}}, "schedule": {"first": 2, "every": 500}}


class Net:
    """A network of 17 parameters and its training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(2, 3)).square().mean()
        return loss

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def curve(run: Run, name: str = "loss") -> tuple[list[int], list[float]]:
    kpis = run.kpis()
    part = kpis[kpis["name"] == name]
    return part["step"].tolist(), part["value"].tolist()


def traced(tmp_path: Path, train: Callable[[], Any], **changes: Any) -> tuple[Run, Any]:
    with comgra.trace({**SPARSE, **changes}, root=tmp_path) as session:
        result = train()
    assert session.path is not None
    return comgra.open_run(session.path), result


def test_ten_thousand_losses_are_the_true_ones_bit_for_bit(tmp_path: Path) -> None:
    net = Net()
    run, truth = traced(tmp_path, lambda: [net.step() for _ in range(10_000)])
    assert len(run.steps) < 50
    assert curve(run) == (list(range(10_000)), truth)


def test_the_loss_can_be_left_out(tmp_path: Path) -> None:
    net = Net()
    run, _ = traced(tmp_path, lambda: [net.step() for _ in range(5)], kpis={"loss": False})
    assert curve(run)[0] == run.steps.tolist() == [0, 1]


def test_every_backward_of_a_step_has_a_curve(tmp_path: Path) -> None:
    net, truth = Net(), []

    def train() -> None:
        for _ in range(20):
            net.optimizer.zero_grad()
            for _ in range(3):
                loss = net.loss()
                loss.backward()
                truth.append(loss.item())
            net.optimizer.step()

    run, _ = traced(tmp_path, train)
    for number, name in enumerate(("loss", "loss[1]", "loss[2]")):
        assert curve(run, name) == (list(range(20)), truth[number::3])


def test_all_ways_of_calling_backward_are_seen(tmp_path: Path) -> None:
    net, truth = Net(), []

    def train() -> None:
        for _ in range(4):
            first, second = net.loss(), net.loss()
            torch.autograd.backward([first, second])
            third, fourth = net.loss(), net.loss()
            torch.autograd.backward(tensors=third)
            torch.autograd.backward(fourth)
            net.optimizer.step()
            truth.append([loss.item() for loss in (first, second, third, fourth)])

    run, _ = traced(tmp_path, train)
    assert set(run.kpis()["name"]) == {"loss", "loss[1]", "loss[2]", "loss[3]"}
    for number, name in enumerate(("loss", "loss[1]", "loss[2]", "loss[3]")):
        assert curve(run, name)[1] == [step[number] for step in truth]


def test_what_is_not_one_number_is_no_loss(tmp_path: Path) -> None:
    net = Net()

    def train() -> None:
        for _ in range(3):
            output = net.model(torch.randn(2, 3))
            output.backward(torch.ones_like(output))
            net.optimizer.step()

    run, _ = traced(tmp_path, train)
    assert run.kpis().empty


def test_under_mixed_precision_the_loss_is_the_unscaled_one(tmp_path: Path) -> None:
    net, truth = Net(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def train() -> None:
        for _ in range(20):
            net.optimizer.zero_grad()
            loss = net.loss()
            scaler.scale(loss).backward()
            scaler.step(net.optimizer)
            scaler.update()
            truth.append(loss.item())

    run, _ = traced(tmp_path, train)
    assert curve(run)[1] == truth


def test_a_loss_that_is_nan_is_kept(tmp_path: Path) -> None:
    net = Net()

    def train() -> None:
        for factor in (1.0, float("nan"), float("inf"), 1.0):
            (net.loss() * factor).backward()
            net.optimizer.step()

    run, _ = traced(tmp_path, train)
    steps, values = curve(run)
    assert steps == [0, 1, 2, 3]
    assert np.isnan(values[1:]).all()


def test_numbers_and_notes_belong_to_the_step_in_progress(tmp_path: Path) -> None:
    net = Net()

    def train() -> None:
        for step in range(200):
            net.optimizer.zero_grad()
            loss = net.loss()
            loss.backward()
            comgra.kpi("number", step)
            comgra.kpi("array", np.float32(step) / 3)
            comgra.kpi("tensor", loss * 0 + step)
            if step % 50 == 0:
                comgra.note(f"first of step {step}")
                comgra.note(f"second of step {step}")
            net.optimizer.step()

    run, _ = traced(tmp_path, train)
    assert curve(run, "number") == (list(range(200)), list(range(200)))
    assert curve(run, "tensor") == (list(range(200)), list(range(200)))
    assert curve(run, "array")[1] == [float(np.float32(i) / 3) for i in range(200)]
    notes = run.notes()
    assert notes["step"].tolist() == [s for s in (0, 50, 100, 150) for _ in range(2)]
    assert notes["text"].str.startswith("first").tolist() == [True, False] * 4
    assert notes["time"].is_monotonic_increasing
    assert (notes["time"] - time.time()).abs().max() < 600


def log(name: str, value: float) -> None:
    comgra.kpi(name, value)


def test_what_the_loop_says_after_a_step_is_about_that_step(tmp_path: Path) -> None:
    net = Net()

    def forward(step: int) -> torch.Tensor:
        log("within", step)
        return net.loss()

    def update() -> None:
        net.optimizer.step()
        log("helper", len(done))

    done: list[int] = []

    def train() -> None:
        for epoch in range(4):
            for batch in range(5):
                step = 5 * epoch + batch
                log("before", step)
                loss = forward(step)
                comgra.kpi("between", step)
                loss.backward()
                comgra.kpi("after backward", step)
                update()
                comgra.kpi("after", step)
                log("deep after", step)
                comgra.note(f"{step}")
                done.append(step)
            log("epoch", step)

    run, _ = traced(tmp_path, train)
    names = ("before", "within", "between", "after backward", "helper", "after", "deep after")
    for name in names:
        steps, values = curve(run, name)
        assert steps == values == list(range(20)), name
    assert curve(run, "epoch") == ([4, 9, 14, 19], [4, 9, 14, 19])
    assert run.notes()["step"].tolist() == run.notes()["text"].astype(int).tolist()


def test_other_threads_may_say_something_too(tmp_path: Path) -> None:
    net, done = Net(), threading.Event()

    def say(name: str) -> None:
        for number in range(2000):
            comgra.kpi(name, number)
        done.wait(60)

    def train() -> None:
        threads = [threading.Thread(target=say, args=(f"thread {i}",)) for i in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(300):
            net.step()
        done.set()
        for thread in threads:
            thread.join()

    run, _ = traced(tmp_path, train)
    for name in ("thread 0", "thread 1", "thread 2"):
        steps, values = curve(run, name)
        assert values == list(range(2000))
        assert steps == sorted(steps)


_ENDLESS = """
import sys, time, torch, comgra_decl as comgra
from torch import nn
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with comgra.trace({"nodes": {"all": {"select": "**"}}, "schedule": {"first": 1, "every": 10**9}},
                  root=sys.argv[1]) as session:
    print(session.path, flush=True)
    for step in range(10**9):
        model(torch.ones(1, 2)).sum().backward()
        comgra.kpi("step", step)
        optimizer.step()
        time.sleep(0.001)
"""


def _when_there_are(count: int, path: Path) -> pd.DataFrame:
    """The numbers of a run that lives, as soon as there are so many."""
    end = time.monotonic() + 60
    kpis = pd.DataFrame()
    while len(kpis) < count and time.monotonic() < end:
        time.sleep(0.2)
        with suppress(RunNotFoundError):  # it is being made
            kpis = comgra.open_run(path).kpis()
    return kpis


@pytest.mark.slow
def test_after_kill_what_was_committed_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            path = Path(process.stdout.readline().strip())
            before = _when_there_are(1500, path)
        finally:
            process.kill()
    after = comgra.open_run(path).kpis()
    assert len(before) >= 1500, "a run without records commits its numbers while it lives"
    assert after.head(len(before)).equals(before)
    told = after[after["name"] == "step"]
    assert told["value"].tolist() == told["step"].tolist() == list(range(len(told)))


# -- taking them changes nothing


class SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class SeesDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [SeesFunctions, SeesDispatch])
def test_the_modes_of_the_program_see_nothing_of_it(mode: Any, tmp_path: Path) -> None:
    def train(net: Net) -> list[str]:
        net.step()
        net.step()
        with mode() as seeing:
            net.loss().backward()
            comgra.kpi("x", torch.ones(()))
        return list(seeing.seen)

    plain = train(Net())
    schedule = {"first": 1, "every": 10**9}
    _, seen = traced(tmp_path, lambda: train(Net()), schedule=schedule)
    assert [name for name in seen if name != "ones.default"] == [
        name for name in plain if name != "ones.default"
    ]


def test_nothing_of_it_stays_behind(tmp_path: Path) -> None:
    before = torch.autograd.backward, torch.amp.GradScaler.scale
    net = Net()
    during: list[Any] = []

    def train() -> None:
        net.step()
        during.append(torch.autograd.backward)

    traced(tmp_path, train)
    assert (torch.autograd.backward, torch.amp.GradScaler.scale) == before
    assert during != [before[0]]


def test_a_fault_of_ours_never_reaches_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("comgra_decl.hooks.words.losses.read_number", lambda _: 1 / 0)
    net = Net()
    run, truth = traced(tmp_path, lambda: [net.step() for _ in range(5)])
    assert truth == [Net().step(), *truth[1:]]
    assert len(truth) == 5
    assert "tracing has stopped" in caplog.text
    assert run.kpis().empty


def test_a_compiled_training_is_not_compiled_again(tmp_path: Path) -> None:
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(1)
        return module.forward

    def train() -> list[float]:
        net = Net()
        forward = torch.compile(net.model, backend=backend)
        losses = []
        for _ in range(10):
            loss = forward(torch.randn(2, 3)).square().mean()
            loss.backward()
            net.optimizer.step()
            losses.append(loss.item())
        return losses

    plain = train()
    alone = len(graphs)
    torch._dynamo.reset()
    run, truth = traced(tmp_path, train)
    assert truth == plain
    assert curve(run)[1] == truth
    assert len(graphs) == 2 * alone


# -- reading one number


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor(1.5), 1.5),
        (torch.tensor([[2.5]]), 2.5),
        (torch.tensor(0.1, dtype=torch.bfloat16), float(torch.tensor(0.1, dtype=torch.bfloat16))),
        (torch.tensor(2**53, dtype=torch.int64), 2.0**53),
        (torch.tensor(True), 1.0),
        (nn.Parameter(torch.tensor(3.0)), 3.0),
        (torch.ones(2), None),
        (torch.tensor(1j), None),
        (torch.ones((), device="meta"), None),
    ],
)
def test_a_tensor_of_one_element_is_a_number(tensor: torch.Tensor, expected: float | None) -> None:
    assert read_number(tensor) == expected


def test_numbers_of_a_device_come_together_and_keep_their_places() -> None:
    """On this machine the "device" is the CPU: what is tested is who goes where."""
    late, values = LateNumbers(), np.full(6, np.nan)
    tensors = {
        0: torch.tensor(0.1),
        2: torch.tensor(7),
        3: torch.tensor([0.25]),
        5: torch.tensor(2.5),
    }
    for where, tensor in tensors.items():
        late.add(where, tensor)
    late.send()
    late.settle(values)
    expected = [float(np.float32(0.1)), np.nan, 7.0, 0.25, np.nan, 2.5]
    assert np.array_equal(values, expected, equal_nan=True)
