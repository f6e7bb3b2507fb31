"""What a program logs with Accelerate becomes metrics and notes of its run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from comgra_decl.query import open_run
from tests.support.programs import python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)

LOGGED = """
import json
import torch
from accelerate import Accelerator
from comgra_decl.integrations.accelerate import TraceTracker

accelerator = Accelerator(cpu=True, log_with=TraceTracker())
accelerator.init_trackers("project", config={"lr": 0.1, "api_key": "hidden"})
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
told = []
for step in range(4):
    loss = model(torch.randn(5, 3)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    told.append(loss.item())
    values = {"train/loss": loss.item(), "error": loss.detach(), "names": ["a"]}
    accelerator.log(values, step=100 * step)
accelerator.log({"verdict": "größer"})
assert accelerator.get_tracker("comgra", unwrap=True) is None
accelerator.end_training()
print(json.dumps(told))
"""


@pytest.mark.slow
def test_what_a_program_logs_is_kept(tmp_path: Path) -> None:
    (tmp_path / "train_it.py").write_text(LOGGED, encoding="utf-8")
    done = python(tmp_path, "train_it.py", env={"COMGRA": "debug"})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    run = open_run(tmp_path / "runs")
    table = run.kpis()
    for name in ("train/loss", "error"):
        found = table[table["name"] == name]
        assert found["step"].tolist() == [0, 1, 2, 3]
        assert found["value"].tolist() == told
    assert "names" not in set(table["name"])
    assert "verdict: größer" in run.notes()["text"].tolist()


@pytest.mark.slow
def test_without_a_run_nothing_happens(tmp_path: Path) -> None:
    (tmp_path / "train_it.py").write_text(LOGGED, encoding="utf-8")
    done = python(tmp_path, "train_it.py")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()
