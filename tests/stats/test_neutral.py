"""Reducing a tensor changes nothing, and nothing around it changes the result."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from comgra_decl.stats import CannotReduceError, Reducer, to_numpy

from .recording import check, ready, reduce, reducer

TENSORS: list[tuple[Callable[[], torch.Tensor], int | None]] = [
    (lambda: torch.linspace(-3, 5, 60).view(6, 10), 0),
    (lambda: torch.linspace(-3, 5, 120_000).view(6, 20_000), 0),
    (lambda: torch.linspace(-1, 1, 40_000).bfloat16(), None),
    (lambda: torch.linspace(-1, 1, 40_000, dtype=torch.float64), None),
    (lambda: torch.linspace(-1, 1, 12).to(torch.complex64), None),
    (lambda: torch.full((3, 4), torch.nan), 0),
]


class SeesEverything(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"function mode saw {func}")


class SeesDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"dispatch mode saw {func}")


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device context": lambda: torch.device("meta"),
    "default device": default_device,
    "default dtype": default_dtype,
    "deterministic": deterministic,
    "function mode": SeesEverything,
    "dispatch mode": SeesDispatch,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_do_not_matter(name: str) -> None:
    tensors = [(make(), batch_dim) for make, batch_dim in TENSORS]
    by = reducer(histogram_elements=64)
    with SURROUNDINGS[name]():
        reduced = [reduce(tensors, by) for _ in range(4)][-1]
    plain = reduce(tensors, reducer(histogram_elements=64))
    np.testing.assert_array_equal(reduced.raw, plain.raw)
    np.testing.assert_array_equal(reduced.histogram_values, plain.histogram_values)
    with SURROUNDINGS["grad"]():  # memory allocated in inference mode would now reject writes
        check(tensors, reduce(tensors, by))


def test_inside_vmap_plain_tensors_are_reduced_and_wrapped_ones_refused() -> None:
    x = torch.randn(3, 4)
    by = reducer()
    steps = []

    def look(row: torch.Tensor) -> torch.Tensor:
        assert by.add(x, batch_dim=0) == 0
        with pytest.raises(CannotReduceError, match="functorch"):
            by.add(row, batch_dim=None)
        steps.append(ready(by.finish()))
        return (row * 2).sum()

    torch.vmap(look)(x)
    torch.vmap(torch.func.grad(look))(x)
    for reduced in steps:
        check([(x, 0)], reduced)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # jvp uses it
def test_what_is_wrapped_to_follow_derivatives_is_reduced() -> None:
    x = torch.randn(3, 4)
    by = reducer()
    steps = []

    def look(wrapped: torch.Tensor) -> torch.Tensor:
        for values in (False, True):
            assert by.add(wrapped, batch_dim=0, values=values) == 0
            steps.append(ready(by.finish()))
        return (wrapped * 2).square().sum()

    torch.func.grad(look)(x)
    torch.func.grad(lambda y: torch.func.grad(look)(y).sum())(x)
    torch.func.vjp(look, x)
    torch.func.jvp(look, (x,), (torch.ones(3, 4),))
    assert len(steps) == 8
    for reduced in steps:
        check([(x, 0)], reduced)


@pytest.mark.parametrize("make", [make for make, _ in TENSORS])
def test_the_tensor_is_left_as_it_is(make: Callable[[], torch.Tensor]) -> None:
    x = make().requires_grad_()
    y = x * 1
    before = y.detach().clone(), y._version, y.requires_grad, y.grad_fn, x.grad
    state = torch.get_rng_state()
    by = reducer(histogram_elements=10)
    for _ in range(3):
        by.add(y, batch_dim=None, values=True)
        reduced = ready(by.finish())
    assert torch.equal(torch.get_rng_state(), state)
    assert (y._version, y.requires_grad, y.grad_fn, x.grad) == before[1:]
    np.testing.assert_array_equal(to_numpy(y), to_numpy(before[0]))
    assert not any(isinstance(v, torch.Tensor) for v in reduced.values.values())
    y.abs().sum().backward()
    assert x.grad is not None


def test_gradient_mode_and_guards_are_restored_when_a_tensor_is_refused() -> None:
    keys = str(torch._C._dispatch_tls_local_exclude_set())
    for _ in range(2):
        with pytest.raises(CannotReduceError):
            reducer().add(torch.eye(3).to_sparse(), batch_dim=None)
    assert str(torch._C._dispatch_tls_local_exclude_set()) == keys
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad


@pytest.mark.parametrize("elements", [10, 100_000])
def test_a_tensor_is_not_kept_alive(elements: int) -> None:
    by = reducer(histogram_elements=16)
    x = torch.randn(elements, requires_grad=True) * 1
    gone = weakref.ref(x)
    by.add(x, batch_dim=None, values=True)
    del x
    gc.collect()
    assert gone() is None
    assert ready(by.finish()).samples.tolist() == [1]


def losses(by: Reducer | None) -> list[float]:
    """Trains a small network, with every output and gradient reduced if there is a reducer."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 8),
        torch.nn.ReLU(inplace=True),
        torch.nn.Dropout(),
        torch.nn.Linear(8, 1),
    )
    optimizer = torch.optim.Adam(net.parameters())

    def gradients(gradient: torch.Tensor) -> None:
        assert by is not None
        by.add(gradient, batch_dim=0)

    def look(_module: object, _inputs: object, output: torch.Tensor) -> None:
        if by is not None:
            by.add(output, batch_dim=0, values=True)
            output.register_hook(gradients)

    for module in net:
        module.register_forward_hook(look)
    found = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = net(torch.randn(16, 5)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        if by is not None:
            assert len(by.finish().samples) == 8
    return found


def test_training_is_bitwise_the_same() -> None:
    assert losses(None) == losses(reducer(histogram_elements=32))


def test_tensors_may_come_from_several_threads() -> None:
    by = reducer()
    x = torch.randn(8, 100)
    numbers: list[int] = []

    def work() -> None:
        numbers.extend(by.add(x.clone(), batch_dim=0) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(200))
    check([(x, 0)] * 200, ready(by.finish()))
