"""A spec that changes while its run is being recorded."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import comgra_decl as comgra
from comgra_decl.record.live_spec import SPEC_FILE, Attendant

SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**", "capture": ["output", "output_grad", "parameter"]}},
    "schedule": {"first": 1, "every": 10},
}


class Training:
    """A short training run whose spec is checked before each step, without waiting for a clock."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.path: Path = session.path or Path()
        self.step = 0
        self._model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._edits = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.session._attendant is not None:
                self.session._attendant.look()
            self._optimizer.zero_grad()
            self._model(torch.randn(5, 3)).square().mean().backward()
            self._optimizer.step()
            self.step += 1

    def parameters(self) -> list[np.ndarray]:
        return [p.detach().numpy() for p in self._model.parameters()]

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        file = self.path / SPEC_FILE
        content = yaml.safe_load(file.read_text())
        change(content)
        self.write(yaml.safe_dump(content))

    def write(self, text: str) -> None:
        file = self.path / SPEC_FILE
        file.write_text(text)
        self._edits += 1
        stamp = file.stat().st_mtime_ns + self._edits * 1_000_000
        os.utime(file, ns=(stamp, stamp))


@contextmanager
def training(root: Path, spec: Mapping[str, Any] = SPEC) -> Iterator[Training]:
    torch.manual_seed(0)
    with comgra.trace(spec, root=root) as session:
        yield Training(session)


def put(*keys: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return change


def test_the_runs_folder_holds_the_whole_spec_in_a_form_that_can_be_used_again(
    tmp_path: Path,
) -> None:
    with training(tmp_path) as live:
        live.run(1)
    run = comgra.open_run(live.path)
    assert comgra.load_spec(live.path / SPEC_FILE) == run.spec


def test_a_changed_schedule_takes_effect_at_the_next_step_and_is_noted(tmp_path: Path) -> None:
    with training(tmp_path) as live:
        live.run(13)
        live.edit(put("schedule", "every", to=2))
        live.run(8)
    run = comgra.open_run(live.path)
    # When the file is checked, the 13th step is in progress; the change applies from the 14th.
    assert run.steps.tolist() == [0, 10, 14, 16, 18, 20]
    assert run.notes().text.tolist() == ["spec.yaml was changed: schedule, from step 14 on"]


def test_changed_nodes_go_on_in_the_same_series_and_new_ones_begin(tmp_path: Path) -> None:
    with training(tmp_path, {**SPEC, "schedule": {"first": 100}}) as live:
        live.run(3)
        live.edit(put("nodes", "all", to={"select": "0", "capture": ["output", "parameter_grad"]}))
        live.run(3)
    run = comgra.open_run(live.path)
    kept, dropped = run.series("0", "mean"), run.series("2", "mean")
    assert kept.notna().tolist() == [True] * 6
    assert dropped.notna().tolist() == [True] * 4 + [False] * 2
    fresh = run.slot("0", role="weight", of="grad").series("mean")
    assert fresh.notna().tolist() == [False] * 4 + [True] * 2
    assert not run.slots.duplicated(["node", "role", "iteration", "pass"]).any()
    assert run.edges(step=5)


def test_a_wrong_edit_is_reported_whole_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training(tmp_path) as live, caplog.at_level(logging.ERROR):
        live.run(1)
        live.edit(lambda content: content["schedule"].update(evry=1, first=-1))
        live.run(5)
        live.write("nodes: [")
        live.run(6)
    run = comgra.open_run(live.path)
    assert run.steps.tolist() == [0, 10]
    first, second = (record.message for record in caplog.records)
    assert "unknown key 'evry'" in first
    assert "comgra.schedule.first: -1 must be at least 0" in first
    assert "cannot be read as YAML" in second
    assert len(run.notes()) == 2


def test_a_mistake_is_reported_once_however_often_it_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training(tmp_path) as live, caplog.at_level(logging.ERROR):
        for text in ("nodes: [", "nodes: [", "", "nodes: ["):  # some editors empty a file first
            live.write(text)
            live.run(1)
    assert len(caplog.records) == 1


def test_a_mistake_can_be_put_right(tmp_path: Path) -> None:
    with training(tmp_path) as live:
        live.run(2)
        live.edit(put("schedule", "every", to="often"))
        live.run(2)
        live.edit(put("schedule", "every", to=1))
        live.run(2)
    assert comgra.open_run(live.path).steps.tolist() == [0, 5]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("samples", {"count": 3}),
        ("stats", ["mean"]),
        ("histogram", {"bins": 8}),
        ("run", {"root": "elsewhere"}),
    ],
)
def test_what_is_on_disk_already_cannot_change(
    tmp_path: Path, key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with training(tmp_path) as live, caplog.at_level(logging.ERROR):
        live.run(1)
        live.edit(put(key, to=value))
        live.edit(put("schedule", "every", to=1))
        live.run(4)
    assert f"comgra.{key}: cannot change while a run is being recorded" in caplog.text
    assert comgra.open_run(live.path).steps.tolist() == [0]


def test_types_and_evaluation_can_change_too(tmp_path: Path) -> None:
    with training(tmp_path) as live:
        live.run(2)
        live.edit(put("types", to={"by": {"input": 0, "shape": 0}}))
        live.run(4)
    run = comgra.open_run(live.path)
    assert run.records.type.tolist() == ["train", "5"]


def test_an_edit_that_says_the_same_is_not_noted(tmp_path: Path) -> None:
    with training(tmp_path) as live:
        live.run(2)
        live.write((live.path / SPEC_FILE).read_text() + "\n# a remark\n")
        live.run(2)
    assert len(comgra.open_run(live.path).notes()) == 0


def test_the_training_is_the_same_when_its_spec_changes(tmp_path: Path) -> None:
    with training(tmp_path / "a", {"enabled": False}) as plain:
        plain.run(6)
    with training(tmp_path / "b") as live:
        live.run(3)
        live.edit(put("nodes", "all", "capture", to=["output", "output_grad", "parameter_grad"]))
        live.edit(put("schedule", "every", to=1))
        live.run(3)
    assert len(comgra.open_run(live.path).steps) == 3
    for expected, found in zip(plain.parameters(), live.parameters(), strict=True):
        np.testing.assert_array_equal(expected, found)


def test_the_file_is_looked_at_from_a_thread_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comgra_decl.record.live_spec._INTERVAL", 0.01)
    looked: list[str] = []
    original = Attendant.look

    def look(self: Attendant) -> None:
        looked.append(threading.current_thread().name)
        original(self)

    monkeypatch.setattr(Attendant, "look", look)
    with comgra.trace(SPEC, root=tmp_path) as session:
        waiting = threading.Event()
        while not looked:
            waiting.wait(0.01)
    assert session.path is not None
    assert set(looked) == {"comgra-attendant"}
