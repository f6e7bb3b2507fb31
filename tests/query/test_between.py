"""What happens between two tensors, computed by hand from the recorded rows."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run
from tests.support.traced import traced, train


class Branch(nn.Module):
    """A residual branch; its two layers differ in size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 18), nn.ReLU(), nn.Linear(18, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two = nn.Linear(4, 6), Block(), Block()
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.two(self.one(self.first(x))))


NODES = {"all": {"select": "**", "capture": ["output", "output_grad"]}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.manual_seed(1)
    model, x = Net(), torch.randn(5, 4)
    return traced(tmp_path_factory.mktemp("between"), NODES, lambda: train(model, x, steps=3))


def l2(run: Run, node: str, pass_: str = "forward", step: int = 2) -> float:
    return float(run.row(step)["l2"][node, "output", 0, pass_])


def test_gains_compare_values_and_gradients_whatever_the_sizes_of_the_tensors(run: Run) -> None:
    found = run.between("first", "last")
    assert found.step == 2
    signal = (l2(run, "last") / math.sqrt(3)) / (l2(run, "first") / math.sqrt(6))
    gradient = (l2(run, "first", "grad") / math.sqrt(6)) / (l2(run, "last", "grad") / math.sqrt(3))
    assert found.signal == pytest.approx(signal, rel=1e-6)
    assert found.gradient == pytest.approx(gradient, rel=1e-6)
    earlier = run.between("first", "last", step=0)
    assert earlier.signal == pytest.approx(
        l2(run, "last", step=0) / l2(run, "first", step=0) * math.sqrt(2), rel=1e-6
    )


def test_gains_of_parts_multiply_to_the_gain_of_the_whole(run: Run) -> None:
    whole, parts = run.between("first", "last"), [("first", "one"), ("one", "two"), ("two", "last")]
    found = [run.between(*ends) for ends in parts]
    assert whole.signal == pytest.approx(math.prod(part.signal for part in found), rel=1e-5)
    assert whole.gradient == pytest.approx(math.prod(part.gradient for part in found), rel=1e-5)


def test_the_dead_share_is_the_largest_share_of_zeros_on_the_way(run: Run) -> None:
    zeros = run.row(2)["zero_fraction"]
    acts = {
        node: zeros[node, "output", 0, "forward"] for node in ("one.branch.act", "two.branch.act")
    }
    worst = max(acts, key=acts.__getitem__)
    found = run.between("first", "last")
    assert found.dead_at == worst
    assert found.dead == pytest.approx(acts[worst])
    assert run.between("two", "last").dead == 0


def test_paths_are_ranked_by_the_gradients_of_what_reads_a_tensor(run: Run) -> None:
    found = run.between("first", "two")
    assert found.count == 4  # two blocks, each with a shortcut and a branch
    block = [("one.branch.up", "one"), ("two.branch.up", "two")]
    kept = {}
    for branch, end in block:
        lengths = [l2(run, branch, "grad"), l2(run, end, "grad")]
        kept[end] = lengths[1] / sum(lengths)
    shares = {path.nodes: path.share for path in found.paths}
    assert shares["first", "one", "two"] == pytest.approx(kept["one"] * kept["two"], rel=1e-6)
    through = ("one.branch.up", "one.branch.act", "one.branch.down", "one.branch")
    assert shares["first", *through, "one", "two"] == pytest.approx(
        (1 - kept["one"]) * kept["two"], rel=1e-6
    )
    assert sum(shares.values()) == pytest.approx(1)
    assert [*shares.values()] == sorted(shares.values(), reverse=True)
    assert found.table["share"].tolist() == [*shares.values()]


def test_a_branch_without_gradient_carries_nothing(tmp_path: Path) -> None:
    model = Net()
    nn.init.zeros_(model.one.branch.down.weight)  # as timm initialises residual branches
    run = traced(tmp_path, NODES, lambda: train(model, torch.randn(5, 4)))
    best, other = run.between("first", "one").paths
    assert (best.nodes, best.share) == (("first", "one"), 1.0)
    assert other.share == 0.0


def test_more_paths_than_can_be_listed_are_counted(tmp_path: Path) -> None:
    model = nn.Sequential(*(Block() for _ in range(12)))
    run = traced(tmp_path, NODES, lambda: train(model, torch.randn(2, 6)))
    found = run.between("0", "11")
    assert found.count == 2**11
    assert len(found.paths) == 10
    assert found.paths[0].share >= found.paths[-1].share > 0


def test_without_gradients_paths_are_found_and_their_shares_are_missing(tmp_path: Path) -> None:
    nodes = {"all": {"select": "**", "capture": ["output"]}}
    run = traced(tmp_path, nodes, lambda: train(Net(), torch.randn(5, 4)))
    found = run.between("first", "one")
    assert {path.nodes[1] for path in found.paths} == {"one", "one.branch.up"}
    assert np.isnan([path.share for path in found.paths]).all()
    assert math.isnan(found.gradient)
    assert found.signal > 0


def test_nothing_leads_from_a_later_tensor_to_an_earlier_one(run: Run) -> None:
    found = run.between("last", "first")
    assert (found.paths, found.count) == ((), 0)
    assert found.signal == pytest.approx(1 / run.between("first", "last").signal, rel=1e-6)


def test_calls_of_one_module_are_told_apart_by_slots(tmp_path: Path) -> None:
    cell = nn.Linear(3, 3)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = self.cell(x)
            return x

    run = traced(tmp_path, NODES, lambda: train(Loop(), torch.randn(2, 3)))
    found = run.between(run.slot("cell", iteration=1), run.slot("cell", iteration=3))
    assert [path.nodes for path in found.paths] == [("cell #1", "cell #2", "cell #3")]
    assert (found.source, found.sink) == ("cell #1", "cell #3")


@pytest.mark.parametrize("ends", [("frist", "last"), ("first", "lsat")])
def test_a_wrong_name_suggests_the_right_one(run: Run, ends: tuple[str, str]) -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean '(first|last)'"):
        run.between(*ends)
    with pytest.raises(UnknownNameError, match="step 9 was not recorded"):
        run.between("first", "last", step=9)
