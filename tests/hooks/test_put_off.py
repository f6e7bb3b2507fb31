"""GPU tensors that are read later than they are seen, while the program writes to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comgra_decl.hooks.tensors import capture, parameters
from comgra_decl.records import Raw
from comgra_decl.stats import OVERWRITTEN
from tests.stats.test_triton import OnGpu, launches, with_interpreter
from tests.support.recording import EVERYTHING, Recording, recording


class WritesLate(nn.Module):
    """From some call on, writes to its first layer's output."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1)
        self.left = begins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.left -= 1
        return self.second(hidden.mul_(2) if self.left < 0 else hidden * 2)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats the host as a GPU with Triton."""
    monkeypatch.setattr(capture, "Reducer", OnGpu)


def trained(begins: int) -> tuple[Recording, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = WritesLate(begins)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden = []
    with recording(EVERYTHING) as run:
        for _ in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 3)
            hidden.append(F.linear(x, model.first.weight, model.first.bias).detach())
            F.mse_loss(model(x), torch.zeros(4, 1)).backward()
            optimizer.step()
            run.rows("loss", step=len(run.steps) - 1)  # waited for, as the writer thread does
    assert run.faults == []
    return run, hidden


@pytest.mark.usefixtures("on_gpu")
@with_interpreter
@pytest.mark.slow
def test_triton_records_what_a_module_returned_or_says_that_it_did_not() -> None:
    run, hidden = trained(begins=3)
    assert run.report["refused"] == {"first output": OVERWRITTEN}
    for step, expected in enumerate(hidden):
        assert run.has("first", step=step) == (step != 3)
        assert run.has("second", step=step)
        if step != 3:
            raw = run.rows("first", step=step)
            np.testing.assert_allclose(raw[:, Raw.MAX], expected.numpy().max(1), rtol=1e-6)


AROUND_THE_STEP = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": ["parameter_grad", "parameter_grad_raw", "update", "optimizer_state"],
        }
    },
    "schedule": {"first": 1_000_000},
}


def launched_by_a_step(layers: int) -> int:
    """Returns how many launches a recorded step of Adam takes, once the model is known."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters())
    with recording(AROUND_THE_STEP) as run:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).sum().backward()
            with pytest.MonkeyPatch.context() as patch:
                counted = launches(patch)
                optimizer.step()
    assert run.faults == []
    for role in ("weight", "weight.exp_avg", "bias.exp_avg_sq"):
        assert any(key.role == role for key in run.slots), run.slots
    # gradients as left and as used, updates, two states; input and output were deferred
    assert sum(counted) == 2 * layers * 5 + 2
    return len(counted)


@pytest.mark.slow
@pytest.mark.usefixtures("on_gpu")
@with_interpreter
def test_triton_reads_all_of_the_parameters_in_launches_whose_number_is_fixed() -> None:
    few, many = (launched_by_a_step(layers) for layers in (2, 4))
    assert few == many == 4 * 2 + 1  # one each for weights, for biases, and for deferred tensors


@pytest.mark.parametrize("lists", [False, True], ids=["one by one", "as lists"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_are_what_the_step_has_added(
    dtype: torch.dtype, lists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes(tensor: torch.Tensor) -> bool:
        return lists and isinstance(tensor, torch.Tensor)

    monkeypatch.setattr(parameters, "takes_lists", takes)
    monkeypatch.setattr(parameters, "_MOST_COPIED", 4 * 30)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5, dtype=dtype) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected: list[dict[str, Any]] = []
    with recording(AROUND_THE_STEP) as run:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 5, dtype=dtype)).sum().backward()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.step()
            after = dict(model.named_parameters())
            expected.append(
                {n: (after[n].detach().double() - b.double()).numpy() for n, b in before.items()}
            )
    assert run.faults == []
    for step, updates in enumerate(expected):
        for name, update in updates.items():
            node, _, role = name.rpartition(".")
            rows = run.rows(node, role, step=step, pass_="update")
            narrow = update.astype(np.float32)
            np.testing.assert_array_equal(rows[:, Raw.MAX], narrow.max())
            np.testing.assert_array_equal(rows[:, Raw.MIN], narrow.min())
            np.testing.assert_allclose(rows[:, Raw.ABS_SUM], np.abs(narrow).sum(), rtol=1e-5)
