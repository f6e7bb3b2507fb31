"""What modules hold in the measured steps, and that measuring changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from comgra_decl.cli.main import main
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run
from tests.record.test_around import HEALTHY, traced
from tests.record.test_profile import BATCH, WIDTH, Net, program
from tests.support.uncompiled import uncompiled as uncompiled  # applies to all tests here

STEP = 4
SPEC = {"memory": {"steps": STEP}, "schedule": {"first": 100}}
HIDDEN = BATCH * WIDTH * 4
"""Bytes of a hidden tensor of the program."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return traced(tmp_path_factory.mktemp("memory"), program, **SPEC)


def test_activations_are_what_autograd_saves(run: Run) -> None:
    """The oracle is the sum over the saved tensors of one call, seen from outside."""
    model, seen = Net(), {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.randn(BATCH, 16))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    expected = sum(size for address, size in seen.items() if address not in weights)
    assert out.requires_grad
    table = run.memory()
    assert table.loc["Net", "activations"] == expected
    assert table["activations_self"].sum() == expected
    assert table.loc["Net", "peak"] == expected


def test_each_storage_is_counted_for_the_module_that_saves_it_first(run: Run) -> None:
    table = run.memory()
    assert table.loc["first", "activations"] == BATCH * 16 * 4  # the model's input
    assert table.loc["block.twice", "activations"] == HIDDEN  # the input of its first call
    # the result of relu, which is also the input of the second call, and the checkpoint's input
    assert table.loc["block", "activations_self"] == 2 * HIDDEN
    assert table.loc["block", "activations"] == 3 * HIDDEN
    assert table.loc["block.kept", "activations"] == 0  # a checkpoint saves nothing
    assert table.loc["head", "activations"] == HIDDEN
    assert table.loc["block", "checkpoint_saves"] == 2 * HIDDEN
    assert table["allocated"].isna().all()
    assert table["calls"].to_dict() == {
        "Net": 1, "block": 1, "block.twice": 2, "block.kept": 1, "first": 1, "head": 1
    }  # fmt: skip


def test_parameters_gradients_and_states_are_those_of_the_model(run: Run) -> None:
    model, table = Net(), run.memory()
    for node in ("Net", "block", "block.twice", "first"):
        part = model if node == "Net" else model.get_submodule(node)
        size = sum(p.numel() * p.element_size() for p in part.parameters())
        count = len([*part.parameters()])
        assert table.loc[node, "parameters"] == size
        assert table.loc[node, "gradients"] == size
        assert table.loc[node, "optimizer"] == 2 * size + 4 * count  # Adam, with its step numbers


def test_the_measured_step_is_not_recorded(run: Run) -> None:
    assert [*run.steps] == [step for step in range(10) if step != STEP]
    assert run.damage == []


@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.__name__)
def test_measured_programs_train_bit_equal(
    program: Callable[[], list[float]], tmp_path: Path
) -> None:
    plain, state = program(), torch.get_rng_state()
    losses: list[float] = []
    run = traced(
        tmp_path, lambda: losses.extend(program()), memory={"steps": [3, 5]}, profile={"steps": 4}
    )
    assert losses == plain
    assert torch.equal(torch.get_rng_state(), state)
    table = run.memory()
    assert (table["parameters"] >= table["gradients"]).all()
    assert (table["peak"] >= table["activations"]).all()
    assert table["activations"].max() > 0
    assert len(run.profile(by="step")) == 1


def test_functions_that_do_not_allow_hooks_still_run(tmp_path: Path) -> None:
    class Transformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            slope = torch.func.grad(lambda t: self.first(t).square().sum())(x)
            out: Tensor = self.last(slope)
            return out

    def train() -> list[float]:
        torch.manual_seed(0)
        model, losses = Transformed(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain, traced_losses = train(), []
    run = traced(tmp_path, lambda: traced_losses.extend(train()), **SPEC)
    assert traced_losses == plain
    assert any("do not allow tensors to be followed" in each for each in run.report["warnings"])
    assert run.memory().loc["first", "parameters"] == 80


def test_hooks_of_the_program_remain_in_place(tmp_path: Path) -> None:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    def train() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            for _ in range(8):
                (model(torch.ones(2, 4)) ** 2).sum().backward()
                optimizer.step()

    train()
    plain, saved[:] = [*saved], []
    run = traced(tmp_path, train, **SPEC)
    assert saved == plain
    assert any("uses hooks for saved tensors itself" in each for each in run.report["warnings"])
    assert run.memory().loc["Linear", "activations"] == 0


def test_the_command_prints_the_table_and_a_hint(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["memory", str(run.path), *arguments])
        assert ended.value.code == 0
        return capsys.readouterr().out

    text = printed()
    assert "block.twice" in text
    assert "A checkpoint (torch.utils.checkpoint) of block would save 0.02 MB" in text
    assert "temporary memory is not measured" in text
    rows = {row["node"]: row for row in json.loads(printed("--json"))}
    assert rows["block"]["activations"] == 3 * HIDDEN
    assert rows["block"]["allocated"] is None


def test_a_run_without_a_measurement_says_how_to_make_one(tmp_path: Path) -> None:
    run = traced(tmp_path, lambda: program(2))
    with pytest.raises(UnknownNameError, match=r"memory: \{steps: 10\}"):
        run.memory()
