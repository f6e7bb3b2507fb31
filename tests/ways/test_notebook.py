"""A notebook whose cells train, in a separate kernel, with `COMGRA` in its environment."""

from __future__ import annotations

import os
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import comgra_decl as comgra

CELLS = [
    """
import hashlib, signal
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        loss = model(torch.randn(5, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    "train(3)",
    """
handle = model[1].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
train(3)
""",
    "handle.remove()",
    "model(torch.randn(5, 2))",
    """
train(2)
state = [*model.parameters(), torch.get_rng_state()]
print(hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in state)).hexdigest())
""",
]
"""The third is interrupted as by the notebook's button; the fifth raises an exception."""


def in_a_kernel(folder: Path) -> list[list[Any]]:
    """Runs the cells like a notebook, traced; returns the output of each."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "python3"}
    told = {"COMGRA": f"debug run.root={folder} schedule.first=100"}
    told["JPY_SESSION_NAME"] = str(folder / "looking.ipynb")  # like Jupyter's servers
    client = nbclient.NotebookClient(book, timeout=120, allow_errors=True)
    client.execute(env={**os.environ, **told})
    return [cell.outputs for cell in book.cells]


def plainly() -> str:
    """Runs the cells one after another in this process; returns what they print."""
    names: dict[str, Any] = {}
    with redirect_stdout(StringIO()) as out:
        for cell in CELLS:
            with suppress(KeyboardInterrupt, RuntimeError):
                exec(cell, names)
    return out.getvalue()


@pytest.mark.slow
def test_cells_that_train_are_one_run_and_train_as_they_would(tmp_path: Path) -> None:
    outputs = in_a_kernel(tmp_path)
    errors = [[o["ename"] for o in cell if o["output_type"] == "error"] for cell in outputs]
    assert errors == [[], [], ["KeyboardInterrupt"], [], ["RuntimeError"], []]
    printed = [o["text"] for cell in outputs for o in cell if o.get("name") == "stdout"]
    assert printed == [plainly()]
    (summary,) = comgra.list_runs(tmp_path)
    run = comgra.open_run(summary.path)
    assert (summary.group, summary.state) == ("looking", "finished")
    assert [*run.steps] == [0, 1, 2, 3, 4]
    assert {"0", "1", "2"} <= set(run.slots.node[run.slots["pass"] == "grad"])
