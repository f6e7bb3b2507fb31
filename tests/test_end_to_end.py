"""The records of a traced training run equal what numpy computes from the same tensors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.support.programs import command

SPEC = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": ["output", "output_grad", "parameter", "parameter_grad"],
            "values": True,
        }
    },
    "schedule": {"first": 100},
    "samples": {"count": 3},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


class Witness:
    """Independently keeps every tensor of every step, for comparison with the run."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.steps: list[dict[tuple[str, str, str], NDArray[Any]]] = [{}]
        for name, module in model.named_modules():
            module.register_forward_hook(
                lambda m, _a, out, name=name: self._output(name or type(m).__name__, out)
            )

    def _output(self, node: str, out: torch.Tensor) -> None:
        self._keep((node, "output", "forward"), out)
        out.register_hook(lambda grad: self._keep((node, "output", "grad"), grad))

    def _keep(self, key: tuple[str, str, str], tensor: torch.Tensor) -> None:
        self.steps[-1][key] = tensor.detach().double().numpy().copy()

    def before(self) -> None:
        for name, parameter in self.model.named_parameters():
            node, _, role = name.rpartition(".")
            self._keep((node, role, "forward"), parameter)

    def after(self) -> None:
        for name, parameter in self.model.named_parameters():
            node, _, role = name.rpartition(".")
            assert parameter.grad is not None
            self._keep((node, role, "grad"), parameter.grad)
        self.steps.append({})


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Witness]:
    torch.manual_seed(0)
    model = Net()
    witness = Witness(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with comgra.trace(SPEC, root=tmp_path_factory.mktemp("runs")) as session:
        for step in range(5):
            witness.before()
            x = torch.randn(6, 1, 8, 8)
            if step == 3:
                x[2] = float("nan")
            loss = nn.functional.cross_entropy(model(x), torch.arange(6) % 5)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            witness.after()
    assert session.path is not None
    return comgra.open_run(session.path), witness


def rows_of(tensor: NDArray[Any], *, batched: bool) -> NDArray[Any]:
    return tensor.reshape(len(tensor), -1) if batched else tensor.reshape(1, -1)


STATISTICS = {
    "mean": lambda r: r.mean(1),
    "abs_mean": lambda r: np.abs(r).mean(1),
    "std": lambda r: r.std(1),
    "min": lambda r: r.min(1),
    "max": lambda r: r.max(1),
    "abs_max": lambda r: np.abs(r).max(1),
    "l2": lambda r: np.sqrt(np.square(r).sum(1)),
    "zero_fraction": lambda r: (r == 0).mean(1),
    "nonfinite": lambda r: (~np.isfinite(r)).sum(1),
}
OVER_BATCH = {
    "mean": lambda s: s.mean(),
    "std": lambda s: s.std(),
    "abs_max": lambda s: np.abs(s).max(),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("over_batch", OVER_BATCH)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_statistic_of_every_slot_equals_that_of_numpy(
    traced: tuple[Run, Witness], statistic: str, over_batch: str
) -> None:
    run, witness = traced
    compared = 0
    for step, tensors in enumerate(witness.steps[:-1]):
        for (node, role, pass_), tensor in tensors.items():
            per_sample = STATISTICS[statistic](rows_of(tensor, batched=role == "output"))
            expected = OVER_BATCH[over_batch](per_sample)
            series = run.slot(node, role=role, of=pass_).series(statistic, over_batch=over_batch)
            scale = np.nanmax(np.abs(tensor)) if np.isfinite(tensor).any() else 1.0
            np.testing.assert_allclose(
                series[step],
                expected,
                rtol=2e-5,
                atol=2e-6 * scale,
                err_msg=f"{node} {role} {pass_}",
            )
            compared += 1
    assert compared == 5 * 2 * (4 + 6)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_statistics_of_single_samples_and_raw_values(traced: tuple[Run, Witness]) -> None:
    run, witness = traced
    for step, tensors in enumerate(witness.steps[:-1]):
        for (node, role, pass_), tensor in tensors.items():
            value = run.slot(node, role=role, of=pass_).value(step)
            expected = tensor[:3] if role == "output" else tensor[None]
            np.testing.assert_array_equal(value, expected.astype(np.float32))
            if role == "output":
                table = run.slot(node, role=role, of=pass_).row(step)
                np.testing.assert_allclose(
                    table["std"], rows_of(tensor, batched=True)[:3].std(1), rtol=2e-5, atol=1e-9
                )


def test_histograms_count_the_values(traced: tuple[Run, Witness]) -> None:
    run, witness = traced
    counts, edges = run.slot("conv").histogram(1)
    tensor = witness.steps[1]["conv", "output", "forward"].astype(np.float32)
    assert counts.sum() == tensor.size
    assert edges[0] == pytest.approx(tensor.min())
    assert edges[-1] == pytest.approx(tensor.max())
    expected, _ = np.histogram(tensor, bins=edges)
    assert (
        np.abs(counts.astype(int) - expected).sum() <= 4
    )  # values on an edge may be rounded into the next bin


def test_graph_losses_and_facts_are_recorded(traced: tuple[Run, Witness]) -> None:
    run, _ = traced
    assert set(run.edges()) == {
        ("input", "conv"),
        ("conv", "norm"),
        ("norm", "head"),
        ("head", "Net"),
        ("Net", "loss"),
        ("target", "loss"),
    }
    losses = run.kpis().query("name == 'loss'")
    assert list(losses["step"]) == [0, 1, 2, 3, 4]
    assert np.isnan(losses["value"].iloc[3])
    assert run.facts["versions"]["torch"] == torch.__version__
    assert run.spec.samples.count == 3
    assert [m["path"] for m in run.modules] == ["", "conv", "norm", "head"]


def test_nan_values_are_distinguished_from_missing_ones(
    traced: tuple[Run, Witness],
) -> None:
    run, _ = traced
    # BatchNorm spreads the NaN over the batch; before it, only one sample is affected.
    assert run.slot("conv").row(3)["nonfinite"].tolist() == [0.0, 0.0, 4.0 * 36]
    assert run.series("conv", "nonfinite", over_batch="abs_max")[3] == 4 * 36
    assert np.isnan(run.series("conv", "mean")[3])
    assert run.series("conv", "nonfinite")[2] == 0


TRAINING = """
import sys, torch, comgra_decl as comgra
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with comgra.trace({"nodes": {"all": {"select": "**", "capture": ["output"], "values": True}},
                   "schedule": {"first": 10**9}}, root=sys.argv[1]) as session:
    print(session.path, flush=True)
    for step in range(10**9):
        model(torch.full((2, 4), float(step))).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_a_killed_training_leaves_a_readable_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and _records(path) <= 20:
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    run = comgra.open_run(path)
    assert run.state == "stopped"
    assert len(run.steps) > 20
    np.testing.assert_array_equal(run.steps, np.arange(len(run.steps)))
    for step in run.steps:
        np.testing.assert_array_equal(
            run.slot("input", role="input").value(step)[0], np.full(4, step)
        )


def _records(path: str) -> int:
    try:
        return len(comgra.open_run(path).steps)
    except comgra.ComgraError:
        return 0


def test_an_unwritable_folder_is_reported_and_the_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "runs"
    blocked.write_text("a file where the root folder should be")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace(SPEC, root=blocked):
        for _ in range(3):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
    assert "runs" in caplog.text


def test_two_traces_in_one_process_are_two_runs(tmp_path: Path) -> None:
    paths = []
    for _ in range(2):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with comgra.trace(SPEC, root=tmp_path) as session:
            for _ in range(3):
                model(torch.ones(2, 2)).sum().backward()
                optimizer.step()
        assert session.path is not None
        paths.append(session.path)
    assert len(set(paths)) == 2
    assert all(len(comgra.open_run(path).steps) == 3 for path in paths)


def test_the_command_line_shows_the_run_as_json(traced: tuple[Run, Witness]) -> None:
    run, _ = traced
    shown = command(Path.cwd(), "show", str(run.path), "--json")
    assert not shown.returncode
    assert json.loads(shown.stdout)["records"] == 5
