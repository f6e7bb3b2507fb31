"""Following every call in a step changes no bit of training and leaves nothing behind."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.hooks.graph.drawing import PARAMETERS, Net, arrows, drawn, followed
from tests.hooks.graph.test_opaque import InPlace, Tagged, bounded, double, two_results


def everything(m: Net, x: torch.Tensor) -> torch.Tensor:
    """One forward pass through everything that is wrapped or kept while a graph is followed."""
    hidden = double(m.a(x)) * 1
    hidden[0] += F.dropout(m.b(x), 0.5)[1]
    values, mask = two_results(hidden)
    values = torch.vmap(torch.tanh)(values) * mask
    values = checkpoint(lambda h: m.b(h).relu_(), values, use_reentrant=True)
    values = checkpoint(lambda h: m.a(h).relu_(), values, use_reentrant=False)
    values = bounded((values * 1).as_subclass(Tagged).as_subclass(torch.Tensor), -1.0, 1.0)
    slope = torch.func.grad(lambda h: h.pow(2).sum())(values)
    in_place: Any = InPlace
    return m.c(in_place.apply(slope * 1) + m.e(x.argmax(1)) + torch.randn_like(x))


def train(*, traced: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = Net(everything)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    with followed(PARAMETERS) if traced else nullcontext() as run:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3)).pow(2).mean()
            loss.backward()
            optimizer.step()
            seen += [
                loss.detach(),
                *(p.grad.clone() for p in model.parameters() if p.grad is not None),
            ]
    assert run is None or run.faults == []
    return [*seen, *(p.detach() for p in model.parameters()), torch.get_rng_state()]


def test_training_is_the_same_bit_for_bit() -> None:
    plain, traced = train(traced=False), train(traced=True)
    assert len(plain) == len(traced)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def test_calls_of_other_threads_are_no_part_of_the_step() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = m.a(x)
        worker = threading.Thread(target=lambda: double(hidden).sum())
        worker.start()
        worker.join()
        return m.c(hidden)

    model = Net(forward)
    with followed() as run:
        model(torch.randn(4, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert run.faults == []
    assert drawn(run.structures[0]) == arrows("input -> a => c => Net => loss")


def test_memory_is_not_held() -> None:
    """Activations that the program releases are freed, even if they were written in place."""
    alive: list[Any] = []

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            large = (m.a(x) * 1).relu_()
            storage = torch.multiprocessing.reductions.StorageWeakRef(large.untyped_storage())
            del large
            alive.append(not storage.expired())
        return m.c(x)

    model = Net(forward)
    with followed() as run:
        model(torch.randn(4, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert run.faults == []
    assert alive == [False]


@pytest.mark.parametrize("fails", [True, False])
def test_an_error_of_the_program_stays_its_own(fails: bool) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if fails:
                raise KeyError("mine")
            return x * 1

        @staticmethod
        def backward(_ctx: Any, *grads: Any) -> Any:
            return grads[0]

    function: Any = Fails
    model = Net(lambda m, x: m.c(function.apply(m.a(x))))
    with followed() as run:
        with pytest.raises(KeyError, match="mine") if fails else nullcontext():
            model(torch.randn(4, 3))
        assert run.faults == []
    assert torch._C._len_torch_function_stack() == 0
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
