"""A tensor with one element is read as a number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from comgra_decl.hooks.scalars.numbers import LateNumbers, read_number


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor(1.5), 1.5),
        (torch.tensor([[2.5]]), 2.5),
        (torch.tensor(0.1, dtype=torch.bfloat16), float(torch.tensor(0.1, dtype=torch.bfloat16))),
        (torch.tensor(2**53, dtype=torch.int64), 2.0**53),
        (torch.tensor(True), 1.0),
        (nn.Parameter(torch.tensor(3.0)), 3.0),
        (torch.ones(2), None),
        (torch.tensor(1j), None),
        (torch.ones((), device="meta"), None),
    ],
)
def test_a_tensor_of_one_element_is_a_number(tensor: torch.Tensor, expected: float | None) -> None:
    assert read_number(tensor) == expected


def test_numbers_of_a_device_come_together_and_keep_their_places() -> None:
    """The "device" here is the CPU; these tests check which path each tensor takes."""
    late, values = LateNumbers(), np.full(6, np.nan)
    tensors = {
        0: torch.tensor(0.1),
        2: torch.tensor(7),
        3: torch.tensor([0.25]),
        5: torch.tensor(2.5),
    }
    for where, tensor in tensors.items():
        late.add(where, tensor)
    late.send()
    late.settle(values)
    expected = [float(np.float32(0.1)), np.nan, 7.0, 0.25, np.nan, 2.5]
    assert np.array_equal(values, expected, equal_nan=True)
