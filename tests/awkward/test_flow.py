"""Models whose steps differ in which modules run, how often, and on how much data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.awkward.watching import assert_recorded, assert_same, both, step_of, watched
from tests.support.recording import recording


class Branches(nn.Module):
    """Takes the path that the data selects, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)
        self.never = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x[0, 0] > 0 else self.right(x)


def test_each_step_records_the_path_that_it_took() -> None:
    model = Branches()
    signs = [1.0, -1.0, -1.0, 1.0, -1.0]
    seen = []
    with recording() as traced:
        for sign in signs:
            with watched(model) as outputs:
                step_of(model, lambda m, sign=sign: m(torch.full((4, 3), sign)).square().sum())
            seen.append(outputs)
    assert traced.faults == []
    for step, (sign, outputs) in enumerate(zip(signs, seen, strict=True)):
        assert traced.has("left", step=step) == (sign > 0)
        assert traced.has("right", step=step) == (sign < 0)
        assert_recorded(outputs, traced, root="Branches", step=step)
    assert traced.report["never_called"] == ["never"]


class Loop(nn.Module):
    def __init__(self, calls: int) -> None:
        super().__init__()
        self.cell, self.calls = nn.Linear(3, 3), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.cell(x).tanh()
        return x


def test_hundreds_of_calls_of_one_cell_are_as_many_iterations() -> None:
    seen, traced = both(lambda: Loop(250), lambda m: m(torch.randn(4, 3)).sum())
    assert len(seen.outputs) == len(seen.gradients) == 251
    assert_recorded(seen, traced, root="Loop")


def test_a_loop_of_another_length_in_each_step() -> None:
    model = Loop(1)
    seen = []
    with recording() as traced:
        for calls in (3, 1, 7, 2):
            model.calls = calls
            with watched(model) as outputs:
                step_of(model, lambda m: m(torch.randn(4, 3)).sum())
            seen.append(outputs)
    for step, outputs in enumerate(seen):
        assert_recorded(outputs, traced, root="Loop", step=step)
        number = len([key for key in outputs.outputs if key[0] == "cell"])
        assert traced.has("cell", step=step, iteration=number - 1)
        assert not traced.has("cell", step=step, iteration=number)


class Tree(nn.Module):
    """Calls itself recursively."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(2, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        if depth == 0:
            return self.leaf(x)
        return self.join(torch.cat([self(x, depth - 1), self(x * 2, depth - 1)], dim=-1))


def test_a_module_that_calls_itself_is_recorded_in_the_order_of_its_returns() -> None:
    seen, traced = both(Tree, lambda m: m(torch.randn(4, 2)).sum())
    assert len([key for key in seen.outputs if key[0] == ""]) == 15
    assert_recorded(seen, traced, root="Tree")


class Shared(nn.Module):
    """One layer used in two places, one of them inside another module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.inner = nn.Sequential(nn.Tanh(), self.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.layer(x)) + self.layer(x)


def test_a_shared_module_is_one_node_with_all_its_calls() -> None:
    seen, traced = both(Shared, lambda m: m(torch.randn(4, 3)).sum())
    assert_recorded(seen, traced, root="Shared")
    assert not any(key.node == "inner.1" for key in traced.slots)


@pytest.mark.parametrize("sizes", [[4, 4, 1], [1, 5, 2], [0, 3, 0]])
def test_batches_of_different_sizes(sizes: list[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    seen = []
    with recording() as traced:
        for size in sizes:
            with watched(model) as outputs:
                step_of(model, lambda m, size=size: m(torch.randn(size, 3)).sum())
            seen.append(outputs)
    assert traced.faults == []
    for step, (size, outputs) in enumerate(zip(sizes, seen, strict=True)):
        assert len(traced.rows("0", step=step)) == max(size, 1)  # none: a batch without elements
        assert_recorded(outputs, traced, root="Sequential", step=step)


class MergedTime(nn.Module):
    """Folds time into the batch, as is common before a convolution or linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.over = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        merged = self.each(x.flatten(0, 1))
        return self.over(merged.unflatten(0, x.shape[:2]).mean(1))


def test_a_batch_merged_with_time_is_one_sample_and_whole() -> None:
    seen, traced = both(MergedTime, lambda m: m(torch.randn(4, 5, 3)).sum())
    assert_recorded(seen, traced, root="MergedTime")
    assert len(traced.rows("each")) == 1
    assert len(traced.rows("over")) == 4


def test_time_before_the_batch_can_be_declared() -> None:
    everything = {"select": "**", "capture": ["output", "output_grad"], "values": True}
    nodes = {"all": {**everything, "batch_dim": 1}}
    seen, traced = both(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh()),
        lambda m: m(torch.randn(5, 4, 3)).sum(),
        nodes=nodes,
    )
    for path in ("0", "1"):
        value = seen.outputs[path, 0]
        assert len(traced.rows(path)) == 4
        assert_same(traced.value(path), value.transpose(0, 1), path)


class Graph(nn.Module):
    """Passes messages between nodes; there is no batch, and each graph has a different size."""

    def __init__(self) -> None:
        super().__init__()
        self.send, self.read = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sent = self.send(nodes)[edges[0]]
        return self.read(torch.zeros_like(nodes).index_add(0, edges[1], sent)).sum()


@pytest.mark.parametrize("batch_dim", ["auto", None])
def test_graphs_of_another_size_in_each_step(batch_dim: str | None) -> None:
    entry = {"select": "**", "capture": ["output", "output_grad"], "values": True}
    model, sizes, seen = Graph(), [5, 9, 2], []
    with recording(nodes={"all": {**entry, "batch_dim": batch_dim}}) as traced:
        for size in sizes:
            edges = torch.randint(size, (2, 3 * size))
            with watched(model) as outputs:
                step_of(model, lambda m, n=size, e=edges: m(torch.randn(n, 3), e))
            seen.append(outputs)
    assert traced.faults == []
    for step, (size, outputs) in enumerate(zip(sizes, seen, strict=True)):
        assert len(traced.rows("send", step=step)) == (1 if batch_dim is None else size)
        got = traced.value("send", step=step)
        got = got[0] if batch_dim is None else got
        np.testing.assert_array_equal(got, outputs.outputs["send", 0].numpy()[: len(got)])


class Unrolled(nn.Module):
    """An encoder, and a decoder that is called once for each generated word."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(3, 4, batch_first=True)
        self.cell, self.word = nn.GRUCell(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.encoder(x)
        hidden, word, said = state[0], torch.zeros(len(x), 3), []
        for _ in range(6):
            hidden = self.cell(word, hidden)
            word = self.word(hidden)
            said.append(word)
        return torch.stack(said, 1)


def test_an_encoder_and_a_decoder() -> None:
    seen, traced = both(Unrolled, lambda m: m(torch.randn(4, 5, 3)).square().sum())
    assert_recorded(seen, traced, root="Unrolled")
    assert traced.has("encoder", "output[0]")
    assert traced.has("encoder", "output[1]")
    assert ("encoder", "cell") in traced.edges()
