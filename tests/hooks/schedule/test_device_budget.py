"""The cost of recording when a device does the work, with a simulated host and device.

The simulated machine is the only oracle: it knows when each kernel runs, so the duration of a
training run with records can be compared with that of the same run without any.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.hooks.schedule.agenda import Agenda, Plan
from comgra_decl.hooks.schedule.budget import Budget, Meter
from comgra_decl.hooks.schedule.laps import Laps, Marks
from comgra_decl.spec import load_spec

KERNELS = 8  # of a step
QUEUE = 32  # kernels that the host may be ahead
STEPS = 2000


class Machine:
    """A host that launches kernels, and a device that runs them one after the other.

    It also stands in for the torch module of the device.
    """

    def __init__(self) -> None:
        self.host = 0.0  # the current time on the host
        self.free = 0.0  # when the device will have finished everything queued so far
        self.queue: deque[float] = deque()
        self.events: list[Event] = []
        self.capturing = False
        self.device = 0

    def launch(self, host: float, device: float) -> None:
        """The host takes `host` seconds to queue work that takes the device `device` seconds."""
        self.host += host
        while self.queue and self.queue[0] <= self.host:
            self.queue.popleft()
        if len(self.queue) >= QUEUE:
            self.host = self.queue.popleft()
        self.free = max(self.host, self.free) + device
        self.queue.append(self.free)

    def wait(self) -> None:
        """The host waits for everything that it has queued, as when reading a loss."""
        self.host = max(self.host, self.free)

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_device(self) -> int:
        return self.device

    def Event(self, *, enable_timing: bool) -> Event:  # noqa: N802 (as torch calls it)
        assert enable_timing
        self.events.append(Event(self))
        return self.events[-1]


class Event:
    """An event on the machine; its time cannot be read until the device has passed it."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.at, self.place = machine, 0.0, -1

    def record(self) -> None:
        machine = self.machine
        assert not machine.capturing, "it would become a part of the graph"
        assert self.place in (-1, machine.device), "an event stays where it was recorded first"
        self.at, self.place = max(machine.host, machine.free), machine.device

    def query(self) -> bool:
        assert not self.machine.capturing, "that ends the capture"
        return self.at <= self.machine.host

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query()
        assert self.place == other.place
        return 1000 * (other.at - self.at)

    def synchronize(self) -> None:
        raise AssertionError("the device is never waited for")

    wait = synchronize


class Training:
    """A training run in which host and device have separate work for a step and for a record.

    Args:
        schedule: the schedule of its spec.
        plain: seconds of a step on the host and on the device.
        record: seconds that a record adds on the host and on the device.
        reads: whether the loop reads the loss of each step.
        jitter: how much individual steps differ, as a share.
        writer: seconds that the writer thread spends on each record, during which the host's part
            of training makes no progress in the following steps.
        once: seconds of compiling in the first record.
    """

    def __init__(
        self,
        schedule: dict[str, Any] | None,
        *,
        plain: tuple[float, float],
        record: tuple[float, float],
        reads: bool = False,
        jitter: float = 0.0,
        writer: float = 0.0,
        once: float = 0.0,
    ) -> None:
        self.machine = Machine()
        self.plain, self.record, self.reads, self.jitter = plain, record, reads, jitter
        self.writer, self.meter, self.once = writer, Meter(), once
        self.said: list[str] = []
        self.recorded: list[int] = []
        self.agenda: Agenda | None = None
        self.laps = Laps(Marks(self.machine))
        if schedule is not None:
            spec = load_spec({"schedule": schedule})
            self.budget = Budget(
                spec.schedule.budget,
                meter=self.meter,
                say=lambda _, __, text: self.said.append(text),
                clock=lambda: self.machine.host,
                laps=self.laps,
            )
            self.agenda = Agenda(spec, self.budget, clock=lambda: self.machine.host)

    def run(self, steps: int = STEPS, *, each: Callable[[int], None] = lambda _: None) -> Training:
        machine, dice = self.machine, random.Random(0)
        disturbed = 0.0
        for step in range(steps):
            each(step)
            scale = 1 + self.jitter * dice.uniform(-1, 1)
            recorded = self.agenda is not None and self.agenda.plan(step) is Plan.ARM
            slice_ = min(disturbed, self.plain[0])
            disturbed -= slice_
            host, device = self.plain[0] * scale + slice_, self.plain[1] * scale
            once = self.once if recorded and not self.recorded else 0.0
            machine.host += once
            if recorded:
                host, device = host + self.record[0], device + self.record[1]
            for _ in range(KERNELS):
                machine.launch(host / KERNELS, device / KERNELS)
            if self.agenda is not None:
                if recorded:
                    self.recorded.append(step)
                    self.budget.recorded()
                    self.agenda.end(recorded=True)
                    disturbed += self.writer
                    self.meter.writer_seconds += self.writer
                self.budget.step_ended(self.record[0] if recorded else None, once=once)
            if self.reads:
                machine.wait()
        machine.wait()
        return self

    @property
    def seconds(self) -> float:
        return self.machine.host


def slowdown(percent: str = "3%", **what: Any) -> float:
    """Returns the share by which recording as much as the budget allows slows training down."""
    schedule = {"first": 1, "every": 1, "budget": {"time": percent}}
    traced, untraced = Training(schedule, **what).run(), Training(None, **what).run()
    return traced.seconds / untraced.seconds - 1


LOOPS = [pytest.param(True, id="reads the loss"), pytest.param(False, id="never waits")]
STEP = {
    "bound by the device": (0.010, 0.050),
    "balanced": (0.048, 0.050),
    "bound by launches": (0.050, 0.010),
}
RECORD = {
    "all of it on the device": (0.0005, 0.400),
    "most of it on the device": (0.004, 0.030),
    "most of it on the host": (0.030, 0.004),
    "a little of both": (0.003, 0.004),
}


@pytest.mark.parametrize("reads", LOOPS)
@pytest.mark.parametrize("step", STEP.values(), ids=[*STEP])
@pytest.mark.parametrize("record", RECORD.values(), ids=[*RECORD])
def test_a_training_gets_slower_by_what_the_budget_says(
    step: tuple[float, float], record: tuple[float, float], reads: bool
) -> None:
    untraced = Training(None, plain=step, record=record, reads=reads).run().seconds / STEPS
    every = Training({"first": 1, "every": 1}, plain=step, record=record, reads=reads).run()
    if every.seconds / STEPS < 1.03 * untraced:
        assert slowdown(plain=step, record=record, reads=reads) <= 0.04, "it costs less at most"
    else:
        assert slowdown(plain=step, record=record, reads=reads) == pytest.approx(0.03, abs=0.01)


@settings(max_examples=25, deadline=None)
@given(
    host=st.floats(0.001, 0.05),
    device=st.floats(0.001, 0.05),
    on_host=st.floats(0.01, 3.0),
    on_device=st.floats(0.01, 8.0),
    reads=st.booleans(),
    jitter=st.floats(0, 0.1),
    percent=st.integers(2, 20),
)
@pytest.mark.slow
def test_no_training_gets_slower_by_more_than_a_point_beyond_the_budget(
    host: float,
    device: float,
    on_host: float,
    on_device: float,
    reads: bool,
    jitter: float,
    percent: int,
) -> None:
    took = slowdown(
        f"{percent}%",
        plain=(host, device),
        record=(on_host * host, on_device * device),
        reads=reads,
        jitter=jitter,
    )
    share = percent / 100
    assert took <= share / (1 - share) + 0.01


@pytest.mark.parametrize("reads", LOOPS)
@pytest.mark.parametrize("step", STEP.values(), ids=[*STEP])
def test_compiling_is_no_part_of_what_records_cost(step: tuple[float, float], reads: bool) -> None:
    """Otherwise a minute of it would prevent records for half an hour."""
    what: dict[str, Any] = {"plain": step, "record": (0.004, 0.03), "reads": reads}
    schedule = {"first": 1, "every": 1, "budget": {"time": "3%"}}
    compiling = Training(schedule, **what, once=60.0).run()
    at_once = Training(schedule, **what).run()
    assert len(compiling.recorded) == pytest.approx(len(at_once.recorded), abs=3)
    price, same = compiling.budget.price, at_once.budget.price
    assert price is not None
    assert same is not None
    assert price.pop("once") == 60.0
    assert same.pop("once") == 0.0
    assert price["plain"] == pytest.approx(same["plain"], rel=0.1)
    assert price["added"] == pytest.approx(same["added"], rel=0.1, abs=1e-4)


# -- the writer thread ---------------------------------------------------------------------------


@pytest.mark.parametrize("reads", LOOPS)
@pytest.mark.parametrize("step", STEP.values(), ids=[*STEP])
@pytest.mark.parametrize("writer", [0.005, 0.02])
def test_the_writer_counts_as_far_as_it_delays_the_steps_that_follow(
    step: tuple[float, float], writer: float, reads: bool
) -> None:
    what: dict[str, Any] = {"plain": step, "record": (0.004, 0.03), "reads": reads}
    every = Training({"first": 1, "every": 1}, **what).run(100).seconds
    if every > 1.1 * Training(None, **what).run(100).seconds:
        assert slowdown(**what, writer=writer, jitter=0.02) == pytest.approx(0.03, abs=0.01)


# -- nothing that would affect training -----------------------------------------------------------


def budgeted(**schedule: Any) -> Training:
    schedule = {"first": 1, "every": 1, "budget": {"time": "10%"}} | schedule
    return Training(schedule, plain=(0.001, 0.01), record=(0.001, 0.01))


def test_events_are_used_again() -> None:
    training = budgeted().run()
    assert len(training.machine.events) <= QUEUE // KERNELS + 3


def test_a_device_that_does_not_get_on_has_no_more_than_so_many_events() -> None:
    training = budgeted()
    machine = training.machine
    machine.free = 1e9  # it is busy with something else
    training.run(1000, each=lambda _: machine.queue.clear())
    assert len(machine.events) <= 64
    assert training.recorded


def test_nothing_is_recorded_into_a_graph_that_is_captured() -> None:
    training = budgeted()
    machine = training.machine

    def capture(step: int) -> None:
        machine.capturing = 100 <= step < 120

    training.run(300, each=capture)  # the events themselves ensure this
    assert len(training.recorded) > 10


def test_devices_may_change() -> None:
    training = budgeted()
    training.run(300, each=lambda step: setattr(training.machine, "device", step // 7 % 2))
    assert len(training.recorded) > 10


def test_a_device_that_fails_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    training = budgeted()
    asked = []

    def fail(event: Event) -> bool:
        asked.append(event)
        raise RuntimeError("CUDA error: device-side assert triggered")

    training.run(50)
    monkeypatch.setattr(Event, "query", fail)
    training.run(50)
    assert len(asked) == 1


def test_an_evaluation_between_two_steps_is_no_part_of_them() -> None:
    training = budgeted()

    def evaluate(step: int) -> None:
        if step % 10 == 0:
            training.machine.launch(0.5, 5.0)
            training.budget.restart()

    training.run(500, each=evaluate)
    price = training.budget.price
    assert price is not None
    assert price["plain"]["device"] == pytest.approx(0.01, rel=0.01)
    assert price["added"]["device"] == pytest.approx(0.01, rel=0.01)


# -- what is reported about it --------------------------------------------------------------------


@pytest.mark.parametrize("timed", [True, False])
def test_the_price_of_a_record_is_told_by_both_clocks(timed: bool) -> None:
    budget = {"time": "10%"} if timed else {}
    training = Training(
        {"first": 1, "every": 20, "budget": budget}, plain=(0.01, 0.05), record=(0.002, 0.03)
    ).run(400)
    price = training.budget.price
    assert price is not None
    assert price["records"] == 20
    assert price["plain"] == pytest.approx({"host": 0.05, "device": 0.05}, rel=0.01), (
        "a host whose queue is full is as slow as the device"
    )
    assert price["added"]["device"] == pytest.approx(0.03, rel=0.01)
    assert price["added"]["host"] == pytest.approx(0.002, rel=0.1)


def test_a_run_says_its_price_by_both_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    monkeypatch.setattr("comgra_decl.hooks.schedule.laps.Marks", lambda: Marks(machine))
    spec = {"schedule": {"first": 1, "every": 4}, "graph": False}
    with comgra.trace(spec, root=tmp_path) as session:
        train(machine, recorded=range(0, 40, 4), steps=40)
    assert session.path is not None
    price = comgra.open_run(session.path).report["price"]
    assert price["records"] >= 9
    assert price["plain"]["device"] == pytest.approx(0.05)
    assert price["added"]["device"] == pytest.approx(0.02)
    assert 0 < price["added"]["host"] < 1
    with pytest.raises(SystemExit):
        main(["show", str(session.path)])
    assert "a record adds 20 ms to a step of 50 ms (device)" in capsys.readouterr().out


def test_a_plan_is_measured_by_the_clock_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    monkeypatch.setattr("comgra_decl.hooks.schedule.laps.Marks", lambda: Marks(machine))
    spec = {"graph": False, "dry_run": True, "run": {"root": str(tmp_path)}}
    with pytest.raises(SystemExit), comgra.trace(spec):
        train(machine, recorded=(0, 2, 4, 6), steps=10)
    said = " ".join(capsys.readouterr().out.split())
    assert "20 ms per recorded step (70 ms; 50 ms without), by the device's clock" in said


def train(machine: Machine, *, recorded: Collection[int], steps: int) -> None:
    """Trains on the simulated machine."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        model(torch.ones(4, 3)).sum().backward()
        machine.launch(0.0, 0.07 if step in recorded else 0.05)
        optimizer.step()
        optimizer.zero_grad()
        machine.wait()
