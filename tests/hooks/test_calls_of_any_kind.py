"""Calls whose arguments nobody expects: they are recorded, or skipped, and never end tracing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.recording import recording

SPEC = {
    "nodes": {"all": {"select": "**", "capture": ["output"]}},
    "graph": True,
    "schedule": {"first": 1_000_000},
}
COMPLEX = torch.ones(4, 6, dtype=torch.complex64)
SPARSE = torch.eye(6).to_sparse()
ROWS = np.arange(4)


class Labelled(Tensor):
    """A subclass of a tensor, as libraries define it."""


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "NumPy indices": lambda x: x[ROWS, np.array([0, 1, 2, 3])],
    "a NumPy mask": lambda x: x[np.ones((4, 6), dtype=bool)],
    "a NumPy index first": lambda x: x[ROWS, 1:],
    "a NumPy integer": lambda x: x[:, np.int64(-1)],
    "lists as indices": lambda x: x[[0, 1], [2, 3]],
    "tensors as indices": lambda x: x[torch.arange(4), torch.arange(4)],
    "an ellipsis and None": lambda x: x[..., None, -1],
    "a boolean": lambda x: x[True],
    "complex numbers": lambda x: torch.view_as_real(x * COMPLEX),
    "a complex mask": lambda x: torch.where(x > 0, x.to(torch.complex64), COMPLEX).abs(),
    "a complex softmax's input": lambda x: F.softmax(torch.fft.fft(x).real, dim=-1),
    "a sparse factor": lambda x: torch.sparse.mm(SPARSE, x.T),
    "a sparse product": lambda x: (x @ SPARSE.to_dense()) * torch.eye(6)[:4].to_sparse().to_dense(),
    "a subclass": lambda x: F.softmax(x.as_subclass(Labelled), dim=1).as_subclass(Tensor),
    "a mask of a subclass": lambda x: x * torch.ones(4, 6).as_subclass(Labelled),
    "a number": lambda x: torch.mul(x, np.float64(2)),
    "a NumPy factor": lambda x: x * torch.from_numpy(np.ones((4, 6), dtype=np.float32)),
    "an empty mask": lambda x: x.masked_fill(torch.zeros(6, dtype=torch.bool), -1e9),
    "an infinite value": lambda x: x.masked_fill(torch.eye(6, dtype=torch.bool)[:4], -np.inf).exp(),
    "a value of NumPy": lambda x: x.masked_fill(x > 9, np.float64(-1e9)),
    "a tensor as value": lambda x: x.masked_fill(x > 9, torch.tensor(-1e9)),
    "nothing to sum": lambda x: x.sum() + x[:0].softmax(0).sum(),
    "a name of an axis as text": lambda x: torch.einsum("bi...->b...", x),
    "a list for einsum": lambda x: torch.einsum("bi,bi->b", [x, x]),
    "sublists for einsum": lambda x: torch.einsum(x, [0, 1], x, [0, 1], [0]),
    "an unknown dtype in softmax": lambda x: F.softmax(x, -1, dtype=torch.float64).float(),
    "a scalar softmax": lambda x: F.softmax(x.sum(), dim=0) * x,
    "a view of a view": lambda x: x.view(2, 2, 6).view(4, 6).reshape(-1).view(3, 8),
    "a nested tensor": lambda x: torch.nested.as_nested_tensor([*x]).to_padded_tensor(0.0),
    "quantized and back": lambda x: (
        x + torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()
    ),
    "where with three numbers": lambda x: x + torch.where(torch.tensor(True), 1.0, 2.0),
    "where with one argument": lambda x: x[torch.where(x > -9)],
}


@pytest.mark.filterwarnings("ignore:.*(nested|quantize|Sparse|prototype).*")
@pytest.mark.parametrize("call", CALLS)
def test_tracing_survives_any_call(call: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return CALLS[call](self.last(self.first(x).relu()))

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording(SPEC) as run:
        for _ in range(3):
            out = model(torch.randn(4, 3))
            # once more outside of all modules, where losses call such functions
            loss = CALLS[call](torch.ones(4, 6) * out.sum())
            optimizer.zero_grad()
            loss.square().mean().backward()
            optimizer.step()
    assert run.faults == []
    assert len(run.steps) == 3
