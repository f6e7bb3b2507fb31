"""The phases of a step by the clock of a simulated device, which is never waited for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.hooks.scalars import automatic
from comgra_decl.hooks.scalars.device_phases import DevicePhases
from comgra_decl.hooks.schedule.laps import Marks
from tests.hooks.schedule.test_device_budget import Machine
from tests.support.uncompiled import uncompiled as uncompiled  # applies to all tests here

DATA, FORWARD, BACKWARD, CLIPPING, OPTIMIZER = 0.004, 0.02, 0.05, 0.003, 0.007
PHASES = {
    "device/data": DATA,
    "device/forward": FORWARD,
    "device/backward": BACKWARD,
    "device/optimizer": OPTIMIZER,
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The device of this program; every step that is not recorded is timed."""
    found = Machine()
    monkeypatch.setattr("comgra_decl.hooks.schedule.laps.Marks", lambda: Marks(found))
    monkeypatch.setattr(automatic, "INTERVAL", 0.0)
    return found


class Layer(nn.Module):
    """Its forward and backward pass are kernels of the machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self.inner = machine, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        self.machine.launch(0.0, FORWARD)
        out.register_hook(lambda _: self.machine.launch(0.0, BACKWARD))
        return out


def train(machine: Machine, root: Path, *, steps: int = 60, batches: int = 1) -> Any:
    """Train on the machine, whose host is never waited for, and return the metrics by name."""
    model = Layer(machine)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: machine.launch(0.0, OPTIMIZER))
    spec = {"schedule": {"first": 1, "every": 1000}, "graph": False}
    with comgra.trace(spec, root=root) as session:
        for _ in range(steps):
            machine.launch(0.0, DATA)
            for _ in range(batches):
                model(torch.ones(4, 3)).sum().backward()
            machine.launch(0.0, CLIPPING)
            optimizer.step()
            optimizer.zero_grad()
    return comgra.open_run(str(session.path)).kpis(automatic=True).groupby("name")


@pytest.mark.parametrize("batches", [1, 3])
def test_phases_are_those_of_the_device_and_not_of_the_host(
    batches: int, machine: Machine, tmp_path: Path
) -> None:
    table = train(machine, tmp_path, batches=batches)
    for name, seconds in PHASES.items():
        several = batches if name in ("device/forward", "device/backward") else 1
        values = table.get_group(name)["value"]
        assert len(values) > 1
        assert values.to_list() == pytest.approx([several * seconds] * len(values))


def test_times_are_told_after_the_device_has_passed_the_step(machine: Machine) -> None:
    told: dict[str, float] = {}
    phases = DevicePhases(told.__setitem__)
    phases.begin()
    machine.launch(0.0, DATA)
    phases.at("forward")
    machine.launch(0.0, FORWARD)
    phases.end()
    assert phases.ended
    phases.read()
    assert told == {}
    phases.begin()  # this step is not timed, because the last one is not known yet
    phases.at("forward")
    phases.stop()
    machine.wait()
    phases.read()
    assert told == {"data": pytest.approx(DATA)}
    assert not phases.ended


def test_events_are_used_again(machine: Machine) -> None:
    phases = DevicePhases(lambda *_: None)
    for _ in range(100):
        phases.begin()
        phases.at("forward")
        phases.at("backward")
        phases.end()
        machine.wait()
        phases.read()
    assert len(machine.events) == 4


@pytest.fixture
def interrupted(machine: Machine) -> Iterator[DevicePhases]:
    """Phases of which the step in progress can no longer be timed."""
    yield DevicePhases(lambda *_: pytest.fail("nothing is known"))
    assert len(machine.events) <= 3


def test_a_step_in_which_a_graph_is_captured_is_not_timed(
    interrupted: DevicePhases, machine: Machine
) -> None:
    interrupted.begin()
    machine.capturing = True
    interrupted.at("forward")
    machine.capturing = False
    interrupted.end()
    assert not interrupted.ended


def test_a_step_on_two_devices_has_no_times(interrupted: DevicePhases, machine: Machine) -> None:
    interrupted.begin()
    interrupted.at("forward")
    machine.device = 1
    interrupted.end()
    machine.wait()
    interrupted.read()
    assert not interrupted.ended


def test_without_a_device_there_are_no_such_times(tmp_path: Path) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("a device is in use")
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace({"graph": False}, root=tmp_path) as session:
        for _ in range(4):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    names = set(comgra.open_run(str(session.path)).kpis(automatic=True)["name"])
    assert not {name for name in names if name.startswith("device/")}
