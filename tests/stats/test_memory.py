"""Memory is reused only when nothing refers to it."""

from __future__ import annotations

import numpy as np
import torch

from comgra_decl.stats.memory import Memory

SHAPE = (3, 4)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_what_nobody_uses_is_handed_out_again() -> None:
    memory = Memory()
    first = memory.take(SHAPE, np.float32)
    place = address(first)
    del first
    assert address(memory.take(SHAPE, np.float32)) == place


def test_what_is_used_in_any_way_is_not() -> None:
    memory = Memory()
    held = memory.take(SHAPE, np.float32)
    view = memory.take(SHAPE, np.float32)[1]
    deeper = memory.take(SHAPE, np.float32)[1:][0]
    tensor = torch.from_numpy(memory.take(SHAPE, np.float32))[0]
    used = {address(held), address(view) - 16, address(deeper) - 16, tensor.data_ptr()}
    assert len(used) == 4
    assert address(memory.take(SHAPE, np.float32)) not in used


def test_another_shape_or_dtype_is_other_memory() -> None:
    memory = Memory()
    assert memory.take(SHAPE, np.float32).dtype == np.float32
    assert memory.take(SHAPE, np.float64).dtype == np.float64
    assert memory.take((4, 3), np.float32).shape == (4, 3)


def test_it_does_not_hold_on_to_forms_that_never_come_back() -> None:
    memory = Memory()
    for size in range(1000):
        memory.take((size, 1000), np.float64)
    assert len(memory._arrays) <= 8
