"""One batch is held fixed in any script, and the verdict follows from its losses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from comgra_decl.experiments.overfit_one_batch import Seen, verdict
from tests.support.programs import Ended, command

TRAIN = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
torch.manual_seed(0)
x, y = torch.randn(128, 8), torch.randint(0, 3, (128,))
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(net.parameters(), 0.0 if kind == "stuck" else 2e-2)
own = torch.Generator().manual_seed(1)


def drawn(generator):
    while True:
        at = torch.randint(0, 128, (16,), generator=generator)
        yield x[at], y[at]


def loaded():
    for _ in range(100):
        yield from DataLoader(TensorDataset(x, y), 16, shuffle=True)


print("begins")
batches = {"own": drawn(own), "random": drawn(None)}.get(kind) or loaded()
for inputs, targets in batches:
    loss = nn.functional.cross_entropy(net(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    inputs.add_(1.0)  # a copy of the batch, so the next step does not see it
"""


def run(folder: Path, *arguments: str) -> Ended:
    (folder / "train.py").write_text(TRAIN)
    return command(folder, "overfit-one-batch", *arguments)


@pytest.mark.parametrize(
    ("kind", "outcome", "code"),
    [
        ("loader", "can", 0),
        ("random", "can", 0),
        ("stuck", "cannot", 3),
        ("own", "unclear", 4),
    ],
)
def test_the_verdict_on_a_script_is_its_exit_code(
    tmp_path: Path, kind: str, outcome: str, code: int
) -> None:
    done = run(tmp_path, "--json", "--steps", "80", "--", "train.py", kind)
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    assert found["outcome"] == outcome
    assert found["steps"] == 80
    assert "begins" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_wrong_command_line_is_said(tmp_path: Path) -> None:
    for arguments in (["--steps", "none", "train.py"], ["--", "missing.py"], ["--steps=0", "x"]):
        done = run(tmp_path, *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("comgra-decl overfit-one-batch: ")


def seen(losses: list[float], inputs: list[object] | None = None) -> Seen:
    return Seen(losses, [1] * len(losses) if inputs is None else inputs)


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [
        (list(2.0 * 0.9 ** np.arange(100)), "can"),
        ([2.0] * 100, "cannot"),
        ([2.0, *[0.5] * 99], "cannot"),
        ([2.0] * 50 + [float("nan")] * 50, "cannot"),
        (list(2.0 * 0.99 ** np.arange(100)), "unclear"),
        ([2.0] * 5, "unclear"),
        ([1.0] * 50 + [-1.0] * 50, "unclear"),
        ([], "unclear"),
    ],
)
def test_the_verdict_is_what_the_losses_say(losses: list[float], outcome: str) -> None:
    assert verdict(seen(losses)).outcome == outcome


def test_an_input_that_changed_leaves_it_open() -> None:
    losses = list(2.0 * 0.9 ** np.arange(100))
    assert verdict(seen(losses, list(range(100)))).outcome == "unclear"
    assert verdict(seen(losses, [0, *[1] * 99])).outcome == "can"
