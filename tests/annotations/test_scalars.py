"""The metrics stored for every step are correct."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import comgra_decl as comgra
from comgra_decl.errors import RunNotFoundError
from tests.annotations.nets import Net, curve, traced
from tests.support.forked import Program
from tests.support.shortened import shortened


@pytest.mark.slow
def test_four_thousand_losses_are_the_true_ones_bit_for_bit(tmp_path: Path) -> None:
    net = Net()
    run, truth = traced(tmp_path, lambda: [net.step() for _ in range(4_000)])
    assert len(run.steps) < 50
    assert curve(run) == (list(range(4_000)), truth)


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


@pytest.mark.parametrize(
    "dtype", shortened([torch.float32, torch.bfloat16, torch.float64], tried=2)
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_a_loss_of_one_element_is_one_of_any_shape_and_dtype(
    shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    net, truth = Net(), []

    def train() -> None:
        for _ in range(4):
            loss = net.loss().to(dtype).reshape(shape)
            loss.backward()
            net.optimizer.step()
            truth.append(loss.item())

    run, _ = traced(tmp_path, train)
    assert curve(run)[1] == truth


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
        net.optimizer.zero_grad()
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


@pytest.mark.slow
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
from comgra_decl.store import pace
pace.NUMBERS_PATIENCE = 0.2  # seconds; it is five
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with comgra.trace({"nodes": {"all": {"select": "**"}}, "schedule": {"first": 1, "every": 10**9}},
                  root=sys.argv[1]):
    for step in range(10**9):
        model(torch.ones(1, 2)).sum().backward()
        comgra.kpi("step", step)
        optimizer.step()
        time.sleep(0.001)
"""


def _when_there_are(count: int, path: Path) -> pd.DataFrame:
    """Returns the metrics of a live run once it has this many."""
    end = time.monotonic() + 60
    kpis = pd.DataFrame()
    while len(kpis) < count and time.monotonic() < end:
        time.sleep(0.2)
        with suppress(RunNotFoundError):  # still being created
            kpis = comgra.open_run(path).kpis()
    return kpis


@pytest.mark.slow
def test_after_kill_what_was_committed_is_there(tmp_path: Path) -> None:
    program = Program(tmp_path, "-c", _ENDLESS, tmp_path)
    try:
        before = _when_there_are(300, tmp_path)
    finally:
        program.kill()
    after = comgra.open_run(tmp_path).kpis()
    assert len(before) >= 300, "a run without records commits its numbers while it lives"
    assert after.head(len(before)).equals(before)
    told = after[after["name"] == "step"]
    assert told["value"].tolist() == told["step"].tolist() == list(range(len(told)))
