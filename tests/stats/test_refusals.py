"""Tensors without numbers to reduce are reported by name, and the step continues without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from comgra_decl.errors import ComgraError
from comgra_decl.stats import CannotReduceError

from .recording import check, ready, reducer


class Mine(torch.Tensor):
    """A subclass that changes functions, but not what a tensor is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("called while reducing")


class Wrapper(torch.Tensor):
    """A subclass without numbers of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("called while reducing")


class Shard(torch.Tensor):
    """Has a local part, like a DTensor."""

    def to_local(self) -> torch.Tensor:
        return torch.full((2, 2), 7.0)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2, 3)


def freed(begin: int = 0) -> torch.Tensor:
    tensor = torch.ones(begin + 4)[begin:]
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "layout sparse_coo": lambda: torch.eye(3).to_sparse(),
    "layout sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "layout _mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(3, device="meta"),
    "dtype qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "Wrapper": lambda: torch.Tensor._make_wrapper_subclass(Wrapper, (2, 3)),
    "FakeTensor": fake,
    "uninitialised": lambda: torch.nn.LazyLinear(3).weight,
    "freed": freed,
    "storage was freed": lambda: freed(2),  # its address is not 0, but an offset from it
}


@pytest.mark.filterwarnings("ignore")  # beta layouts warn about themselves
@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what: str) -> None:
    by = reducer(histogram_elements=16)
    x = torch.randn(3, 4)
    bad = REFUSED[what]()
    for _ in range(3):
        assert by.add(x, batch_dim=0) == 0
        with pytest.raises(CannotReduceError, match=what) as caught:
            by.add(bad, batch_dim=None, values=True)
        assert isinstance(caught.value, ComgraError)
        assert by.add(x, batch_dim=None) == 1
        check([(x, 0), (x, None)], ready(by.finish()))


@pytest.mark.parametrize(("shape", "batch_dim"), [((), 0), ((3,), 1), ((3, 4), -3)])
def test_a_batch_dim_that_is_not_there(shape: tuple[int, ...], batch_dim: int) -> None:
    with pytest.raises(CannotReduceError, match="batch dim"):
        reducer().add(torch.ones(shape), batch_dim=batch_dim)


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("elements", [10, 100_000])
def test_memory_that_was_freed_after_the_first_step_is_not_read(elements: int, begin: int) -> None:
    by = reducer()
    x = torch.randn(begin + elements)[begin:]
    by.add(x, batch_dim=None)
    by.finish()
    x.untyped_storage().resize_(0)
    with pytest.raises(CannotReduceError, match="freed"):
        by.add(x, batch_dim=None)


def test_zeros_without_memory_are_zeros() -> None:
    by = reducer()
    for elements in (10, 100_000):
        by.add(torch._efficientzerotensor((elements,)), batch_dim=None)
    by.add(torch._efficientzerotensor((10,))[4:], batch_dim=None)
    zeros: list[tuple[torch.Tensor, int | None]] = [
        (torch.zeros(size), None) for size in (10, 100_000, 6)
    ]
    check(zeros, ready(by.finish()))


def test_subclasses_that_are_ordinary_tensors_are_reduced() -> None:
    x = torch.randn(4, 5)
    parameter = torch.nn.Parameter(x.clone())
    by = reducer()
    by.add(x.as_subclass(Mine), batch_dim=0)
    by.add(parameter, batch_dim=0)
    check([(x, 0), (x, 0)], ready(by.finish()))


def test_of_a_distributed_tensor_the_local_part_is_reduced() -> None:
    by = reducer()
    by.add(torch.ones(8, 2).as_subclass(Shard), batch_dim=0)
    check([(torch.full((2, 2), 7.0), 0)], ready(by.finish()))
