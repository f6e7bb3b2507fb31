"""Models with hundreds or thousands of modules."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from tests.awkward.watching import assert_recorded, watched
from tests.support.recording import recording
from tests.support.shortened import shortened


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) / 100


@pytest.mark.parametrize("layers", shortened([50, 1000, 10_000], tried=1))
def test_many_modules_are_recorded_and_nothing_is_kept_between_steps(layers: int) -> None:
    model = nn.Sequential(*(Block() for _ in range(layers)))
    assert len(list(model.modules())) == 2 * layers + 1
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gc.collect()
    before = _on_a_graph()  # objects left over from other tests
    alive = []
    with recording() as traced:
        for _ in range(3):
            with watched(model) as seen:
                model(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
            seen_last = seen
            alive.append(_on_a_graph())
    assert traced.faults == []
    assert_recorded(seen_last, traced, root="Sequential", step=2)
    assert max(alive) <= before


def _on_a_graph() -> int:
    """Counts the live tensors that hold part of an autograd graph."""
    return sum(1 for one in gc.get_objects() if type(one) is Tensor and one.grad_fn is not None)
