"""The accelerator code path, run here on the host (without streams or events)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from comgra_decl.stats import Reducer, device, sums, support, trie
from comgra_decl.stats.device import ASYNCHRONOUS

from .recording import Tensors, check, ready, reduce, reducer


@pytest.fixture(autouse=True)
def _without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "launcher_class", lambda _: None)


class Elsewhere(Reducer):
    """Treats tensors on the host as tensors on an accelerator without Triton."""

    _host = torch.device("cpu", 0)  # a name that no tensor's device has
    _away = (*ASYNCHRONOUS, "cpu")


def elsewhere(histogram_elements: int | None = 50) -> Elsewhere:
    return Elsewhere(histogram_elements=histogram_elements, sample_count=3)


def tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 12, generator=generator)
    y = torch.randn(4, 15_000, generator=generator) + 100
    bad = x.clone()
    bad[2, 3], bad[4, 0] = torch.nan, torch.inf
    return [
        (x, 0),
        (y, 0),
        (bad, 0),
        (y.bfloat16(), None),
        (x.double(), 1),
        (torch.zeros(3, 0), 0),
        (x.to(torch.complex64), None),
        (torch.complex(y, y), 0),
        (x * 0, 0),
        (x > 0, 0),
    ]


@pytest.mark.parametrize("histogram_elements", [50, None])
def test_equal_to_the_oracle_over_steps(histogram_elements: int | None) -> None:
    by = elsewhere(histogram_elements)
    steps = [(made, reduce(made, by)) for made in map(tensors, range(4))]
    for made, reduced in steps:
        check(made, reduced)


class NoFloat64(TorchDispatchMode):
    """A stand-in for a device that has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else (result,):
            assert getattr(each, "dtype", None) is not torch.float64, func
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int16])
def test_a_device_without_float64_is_asked_for_none(dtype: torch.dtype) -> None:
    x = tensors(0)[1][0].to(dtype)
    with NoFloat64():  # type: ignore[no-untyped-call]
        found = sums.lean(x, torch.float32)
    np.testing.assert_allclose(found, sums.exact(x, found[:, 0].double()), rtol=1e-6, atol=1e-2)


def test_a_device_without_float64_gives_numbers_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs more precision, whole numbers and float64, is copied to the host."""
    monkeypatch.setattr(device, "wide_dtype", lambda _: torch.float32)
    made, by = tensors(0), elsewhere()
    for _ in range(2):
        check(made, reduce(made, by))
    monkeypatch.setattr(trie, "MOST_ROWS", 200)
    monkeypatch.setattr(trie, "KEPT", 3)
    large = torch.randn(201, 300, generator=torch.Generator().manual_seed(0))
    check([(large, 0)], reduce([(large, 0)], elsewhere()))


def test_large_tensors_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "MOST_BLOCK", 1000)
    made = tensors(0)
    check(made, reduce(made, elsewhere()))


def scattered(seed: int) -> Tensors:
    """Tensors whose rows are not one block of memory, or whose numbers must be converted."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 14, 15, generator=generator) * 3 + 20
    bad = x.clone()
    bad[1, 4, 5], bad[3, 2, 1] = torch.nan, -torch.inf
    return [
        (x[:, ::2], 0),
        (x[:, :, 1:9], 1),
        (x.transpose(0, 2)[:, :5], 0),
        (x.permute(2, 1, 0), 2),
        (x[:, :, 3:], None),
        (bad[:, 1:], 2),
        (x[:1, :7].expand(5, 7, 15), 0),
        (torch.complex(x, x - 20)[:, 3:], 1),
        (torch.complex(x, x), None),
        (torch._neg_view(x), 0),
        (x[:, :, ::3].bfloat16()[:, 2:], 0),
        (x[:, ::5].long(), 2),
        (x.flatten()[::2], 0),
    ]


class Largest(TorchDispatchMode):
    """Tracks the largest result that has its own memory, in elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("part", [1, 13, 70, 500])
def test_what_must_be_copied_is_copied_and_reduced_in_parts(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_MOST_COPIED", 0)
    monkeypatch.setattr(device, "_PART", part)
    made = scattered(part)
    check(made, reduce(made, elsewhere()))
    check(made, reduce(made, elsewhere(None)))
    monkeypatch.setattr(device, "wide_dtype", lambda _: torch.float32)
    narrow = [each for each in made if each[0].dtype is not torch.int64]
    check(narrow, reduce(narrow, elsewhere()))


def test_the_histogram_of_what_is_read_in_parts_is_that_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = scattered(0)
    whole = reduce(made, elsewhere())
    monkeypatch.setattr(device, "_MOST_COPIED", 0)
    monkeypatch.setattr(device, "_PART", 17)
    parts = reduce(made, elsewhere())
    np.testing.assert_array_equal(parts.histogram_values, whole.histogram_values)


def test_very_many_scattered_samples_are_aggregated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie, "MOST_ROWS", 200)
    monkeypatch.setattr(trie, "KEPT", 3)
    monkeypatch.setattr(device, "_MOST_COPIED", 0)
    monkeypatch.setattr(device, "_PART", 900)
    x = torch.randn(201, 400, generator=torch.Generator().manual_seed(0))[:, ::2]
    check([(x, 0)], reduce([(x, 0)], elsewhere()))


@pytest.mark.parametrize("kind", ["slice", "complex", "one sample"])
def test_no_copy_of_a_large_tensor_exceeds_a_part(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors have 12.6 million numbers."""
    read: list[int] = []

    def lean(rows: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        read.append(rows.numel())
        return sums.lean(rows, wide)

    monkeypatch.setattr(device, "lean", lean)
    x = torch.zeros(3, 8_400_000)
    tensor = x[:, ::2] if kind == "slice" else torch.view_as_complex(x.view(3, -1, 2))
    reduced = reduce([(tensor, None if kind == "one sample" else 0)], elsewhere())
    assert sum(read) == tensor.numel()
    assert max(read) <= device._PART
    assert not reduced.raw.any()
    with Largest() as noted:
        for _ in support.parts_of(tensor, 0, device._PART):
            pass
    assert noted.elements <= device._PART


def test_nothing_is_there_before_it_was_waited_for_and_all_of_it_afterwards() -> None:
    by = elsewhere()
    for tensor, batch_dim in tensors(0):
        by.add(tensor, batch_dim=batch_dim)
    reduced = by.finish()
    assert reduced.wait is not None
    reduced.raw.fill(-1)
    ready(reduced)
    raw = reduced.raw.copy()
    check(tensors(0), reduced)
    reduced.wait()
    np.testing.assert_array_equal(reduced.raw, raw)


def test_histogram_elements_and_values_are_those_of_the_host_path() -> None:
    found, expected = elsewhere(), reducer(histogram_elements=50, sample_count=3)
    for by in (found, expected):
        for tensor, batch_dim in tensors(1):
            by.add(tensor, batch_dim=batch_dim, values=True)
    a, b = ready(found.finish()), ready(expected.finish())
    np.testing.assert_array_equal(a.histogram_values, b.histogram_values)
    np.testing.assert_array_equal(a.histogram_starts, b.histogram_starts)
    assert a.values.keys() == b.values.keys()
    for index, value in a.values.items():
        np.testing.assert_array_equal(value, b.values[index])
        assert value.dtype == b.values[index].dtype


def test_later_changes_do_not_matter_and_memory_is_bounded() -> None:
    by = elsewhere()
    held = 0
    for step in range(24):
        made = tensors(step % 3)
        for tensor, batch_dim in made:
            own = tensor.clone()
            by.add(own, batch_dim=batch_dim)
            own.zero_()
        reduced = by.finish()
        held = held or by._ring.nbytes
    check(made, ready(reduced))
    assert by._ring.nbytes == held


def test_tensors_that_are_recognised_later_are_not_kept_alive() -> None:
    by = elsewhere()
    x = tensors(0)[1][0]
    view = x.detach()
    for tensor in (x, view):
        by.add(tensor, batch_dim=0)
    storage = StorageWeakRef(x.untyped_storage())
    del x, view, tensor
    assert storage.expired()
    ready(by.finish())


VIEWS = ("empty", "view", "unsqueeze", "slice", "select", "alias", "as_strided", "expand", "detach")


class Operations(TorchDispatchMode):
    """Counts computing operations, each of which is a kernel on an accelerator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.overloadpacket.__name__.strip("_").startswith(VIEWS):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "wide", "most"),
    [
        (torch.float32, torch.float64, 13),
        (torch.bfloat16, torch.float64, 14),
        (torch.float32, torch.float32, 15),
        (torch.bfloat16, torch.float32, 16),
        (torch.float64, torch.float64, 21),
        (torch.int64, torch.float64, 21),
    ],
    ids=str,
)
def test_the_operations_for_a_tensor_are_few(
    dtype: torch.dtype, wide: torch.dtype, most: int
) -> None:
    x = (torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    with Operations() as counted:
        sums.lean(x, wide)
    assert len(counted.names) <= most, counted.names


def test_the_operations_for_a_large_tensor_are_those_of_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sums, "MOST_BLOCK", 1000)
    x = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    with Operations() as counted:
        sums.lean(x)
    # 2 for pivots, 11 for each of 10 blocks, 7 to merge those of a row, one to join the rows
    assert len(counted.names) <= 2 + 10 * 11 + 2 * 7 + 1, len(counted.names)
