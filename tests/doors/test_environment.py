"""Tracing without edits to the code: `COMGRA=debug python train.py`."""

from __future__ import annotations

import os
import re
from ast import literal_eval
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import comgra_decl
from comgra_decl.doors.environment import declaration
from comgra_decl.query import list_runs, open_run
from tests.support.forked import forked
from tests.support.programs import HYDRA_YAML, TRAINING, loss_of, plain_loss, python

PARALLEL = f"""
import sys
import torch.multiprocessing
{TRAINING}
if __name__ == "__main__":
    context = torch.multiprocessing.get_context(sys.argv[1])
    children = [context.Process(target=train) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
"""
"""A program whose child processes do the training."""

LOADING = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset


class Embedded(Dataset):
    def __init__(self):
        self.embed = torch.nn.Linear(3, 3)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.embed(torch.ones(3) * index).detach()


if __name__ == "__main__":
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(
        Embedded(), batch_size=2, num_workers=1, multiprocessing_context=sys.argv[1]
    )
    for batch in data:
        model(batch).sum().backward()
        optimizer.step()
"""
"""Data-loading workers call a module with parameters, but none of them trains."""

COMPILED = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
model.compile(backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
"""

FREEZING = """
import gc
import torch
from torch import nn


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({"encoder": nn.Linear(6, 4), "decoder": nn.Linear(4, 6)})


def main():
    task = Task()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    gc.freeze()
    for _ in range(3):
        optimizer.zero_grad()
        task.net["decoder"](task.net["encoder"](torch.randn(8, 6))).square().mean().backward()
        optimizer.step()


main()
"""
"""A program that calls `gc.freeze`, as before forking workers; the model is a local variable."""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"COMGRA": ""}, None),
        ({"COMGRA": "0"}, None),
        ({"COMGRA": "off"}, None),
        ({"COMGRA": "1"}, ("debug", [])),
        ({"COMGRA": "light"}, ("light", [])),
        ({"COMGRA": "graph=false"}, ("debug", ["graph=false"])),
        (
            {"COMGRA": "my.yaml schedule.every=10 'run.root=/a b' ~nodes.weights"},
            ("my.yaml", ["schedule.every=10", "run.root=/a b", "~nodes.weights"]),
        ),
        (
            {"COMGRA": "light graph=true", "COMGRA_OVERRIDES": "graph=false"},
            ("light", ["graph=true", "graph=false"]),
        ),
        ({"COMGRA_OVERRIDES": "graph=false"}, None),
    ],
)
def test_what_the_variables_say(
    environment: dict[str, str], expected: tuple[str, list[str]] | None
) -> None:
    assert declaration(environment) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [("debug light", "names 2 specs (debug, light)"), ("debug 'a", "no closing quotation")],
)
def test_what_cannot_be_read_ends_the_program(value: str, message: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        declaration({"COMGRA": value})


def test_torch_knows_the_door() -> None:
    (door,) = entry_points(group="torch.backends", name="comgra-decl")
    assert door.value == "comgra_decl.doors.environment:attach"


def test_a_script_is_recorded_and_trains_the_same(tmp_path: Path) -> None:
    (tmp_path / "train_it.py").write_text(f"{TRAINING}\ntrain()\n")
    variables = {"COMGRA": "debug run.root=here", "COMGRA_OVERRIDES": "schedule.first=3"}
    done = python(tmp_path, "train_it.py", env=variables)
    assert loss_of(done.stdout) == plain_loss()
    (run,) = list_runs(tmp_path / "here")
    assert (run.group, run.state) == ("train_it", "finished")
    assert f"comgra: recording to {run.path}" in done.stderr
    assert [*open_run(run.path).steps][:4] == [0, 1, 2, 3]


def test_every_mistake_is_said_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\nprint('trained')")
    done = forked(tmp_path, "script.py", env={"COMGRA": "debug shedule.every=3 stats=[maen]"})
    assert done.returncode == 1
    assert "trained" not in done.stdout
    assert "did you mean 'schedule'?" in done.stderr
    assert "did you mean 'mean'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_variable_nothing_of_ours_is_done(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from torch import nn, optim\n"
        "print(nn.Module.__call__ is nn.Module._wrapped_call_impl)\n"
        "print('__wrapped__' in vars(optim.Optimizer.__init__))\n"
        "print(*sorted(m for m in sys.modules if m.startswith(('comgra_decl.', 'pydantic'))))"
    )
    done = python(tmp_path, "-c", code, env={"COMGRA": ""})
    call, init, modules = done.stdout.splitlines()
    assert (call, init) == ("True", "False")
    words = {
        f"comgra_decl.annotations{name}" for name in ("", ".hub", ".marks", ".step_annotations")
    }
    assert set(modules.split()) - words == {"comgra_decl.doors", "comgra_decl.doors.environment"}


def test_without_torch_nothing_of_ours_is_imported(tmp_path: Path) -> None:
    code = "import sys; print(any('comgra' in name for name in sys.modules))"
    assert python(tmp_path, "-c", code, env={"COMGRA": "debug"}).stdout.strip() == "False"


def test_a_program_that_trains_nothing_leaves_no_run_and_is_told(tmp_path: Path) -> None:
    code = "import torch; torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1)"
    done = forked(tmp_path, "-c", code, env={"COMGRA": "debug"})
    assert "comgra: nothing was recorded: the program called no torch module" in done.stderr
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_children_that_train_are_recorded_and_their_parent_is_not(tmp_path: Path) -> None:
    (tmp_path / "parallel.py").write_text(PARALLEL)
    done = python(tmp_path, "parallel.py", "fork", env={"COMGRA": "debug"})
    assert done.returncode == 0, done.stderr
    runs = list_runs(tmp_path / "runs")
    assert [(run.group, run.state, run.last_step) for run in runs] == [
        ("parallel", "finished", 11)
    ] * 2
    assert "nothing was recorded" not in done.stderr


@pytest.mark.slow
def test_workers_that_load_data_are_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "loading.py").write_text(LOADING)
    done = python(tmp_path, "loading.py", "spawn", env={"COMGRA": "debug"})
    assert done.returncode == 0, done.stderr
    (run,) = list_runs(tmp_path / "runs")
    assert (run.state, run.last_step) == ("finished", 3)


DIRECT = """
import torch
from torch import nn


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.relu = nn.ReLU()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x):
        return self.relu(nn.functional.linear(x, self.weight, self.bias))

    def learn(self, x):
        loss = (self.forward(x) - self.forward(2 * x)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item(), self.weight.grad.norm().item()


torch.manual_seed(0)
layer = Layer()
nn.Flatten()(torch.randn(4, 3))
print([layer.learn(torch.randn(4, 3)) for _ in range(3)])
"""
"""Calls `forward`, but no module with parameters."""


def test_a_program_that_calls_forward_is_recorded_from_its_first_call(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DIRECT)
    plain = forked(tmp_path, "train.py")
    done = forked(tmp_path, "train.py", env={"COMGRA": "debug"})
    assert done.stdout == plain.stdout
    (found,) = list_runs(tmp_path / "runs")
    run = open_run(found.path)
    losses, norms = zip(*literal_eval(done.stdout), strict=True)
    assert run.kpis().value.tolist() == pytest.approx(losses)
    for iteration in (0, 1):
        assert run.slot("Layer", iteration=iteration).series("mean").notna().tolist() == [True] * 3
    gradients = run.slot("Layer", role="weight", of="grad").series("l2")
    assert gradients.tolist() == pytest.approx(norms)


@pytest.mark.slow
def test_a_launcher_passes_it_on(tmp_path: Path) -> None:
    (tmp_path / "train_it.py").write_text(f"{TRAINING}\ntrain()\n")
    (tmp_path / "launcher.py").write_text(
        "import subprocess, sys, torch\n"
        "sys.exit(subprocess.call([sys.executable, 'train_it.py']))\n"
    )
    done = python(tmp_path, "launcher.py", env={"COMGRA": "debug"})
    assert loss_of(done.stdout) == plain_loss()
    (run,) = list_runs(tmp_path / "runs")
    assert (run.group, run.last_step) == ("train_it", 11)
    assert "nothing was recorded" not in done.stderr


@pytest.mark.parametrize(
    "door",
    ["script", *(pytest.param(door, marks=pytest.mark.slow) for door in ("hydra", "block"))],
)
def test_another_door_of_the_same_program_takes_over(tmp_path: Path, door: str) -> None:
    block = f"import comgra_decl\n{TRAINING}\nwith comgra_decl.trace('light'):\n    train()\n"
    scripts = {"script": f"{TRAINING}\ntrain()\n", "hydra": HYDRA_YAML, "block": block}
    (tmp_path / "app.py").write_text(scripts[door])
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("lr: 1")
    calls = {
        "script": ["-m", "comgra_decl", "--spec", "light", "app.py"],
        "hydra": ["app.py", "+comgra=light"],
        "block": ["app.py"],
    }
    done = forked(tmp_path, *calls[door], env={"COMGRA": "debug"})
    assert loss_of(done.stdout) == plain_loss(), done.stderr
    (run,) = list_runs(tmp_path / "runs")
    assert "outputs" in open_run(run.path).spec.nodes  # so the preset is "light"
    assert "nothing was recorded" not in done.stderr


@pytest.mark.slow
def test_a_compiled_model_is_seen_from_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "compiled.py").write_text(COMPILED)
    done = python(tmp_path, "compiled.py", env={"COMGRA": "debug"})
    assert done.returncode == 0, done.stderr
    (run,) = list_runs(tmp_path / "runs")
    assert [*open_run(run.path).steps] == [0, 1, 2]
    assert {"0", "1", "2"} <= set(open_run(run.path).nodes)


def test_children_know_of_a_recording_only_as_long_as_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMGRA_RECORDED_BY", "12")
    told = []
    with comgra_decl.trace("debug", root=tmp_path):
        told.append(os.environ["COMGRA_RECORDED_BY"])
        with comgra_decl.trace("light", root=tmp_path):
            told.append(os.environ["COMGRA_RECORDED_BY"])
        told.append(os.environ["COMGRA_RECORDED_BY"])
    assert told == [str(os.getpid())] * 3
    assert os.environ["COMGRA_RECORDED_BY"] == "12"
    monkeypatch.delenv("COMGRA_RECORDED_BY")
    with comgra_decl.trace("off", root=tmp_path):
        assert "COMGRA_RECORDED_BY" not in os.environ
    with comgra_decl.trace("debug", root=tmp_path):
        assert "COMGRA_RECORDED_BY" in os.environ
    assert "COMGRA_RECORDED_BY" not in os.environ


@pytest.mark.parametrize("command", [["-m", "comgra_decl"], []])
def test_a_model_that_is_frozen_before_the_first_step_keeps_its_names(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "freezing.py").write_text(FREEZING)
    environment = {} if command else {"COMGRA": "debug"}
    done = forked(tmp_path, *command, "freezing.py", env=environment)
    assert done.returncode == 0, done.stderr
    (run,) = list_runs(tmp_path / "runs")
    assert {"net.encoder", "net.decoder"} <= set(open_run(run.path).nodes)
