"""Read tensors with one element, without side effects and without waiting for a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl.stats.quiet import HIDDEN_KEYS, copied_to_host, quiet
from comgra_decl.torch_private import (
    dispatch_modes,
    function_modes,
    no_own_dispatch,
    without_functions,
    without_keys,
)

_ASYNCHRONOUS = ("cuda", "xpu")

Number = float | Tensor
"""A number, or a tensor that holds it on a device."""


def read_number(tensor: Tensor) -> Number | None:
    """Return the number in a tensor with one element.

    For a tensor on a device, the result is a copy on the device that is never modified, so the
    program does not wait. The result is None if no number can be read: the tensor has several
    elements, is complex, fake or inside a functorch transform, or is on a device whose work is
    being captured into a graph.
    """
    plain = type(tensor) is Tensor and not function_modes()
    if plain and tensor.is_cpu and not dispatch_modes():
        return _item(tensor)
    return _read_quietly(tensor)


def _item(tensor: Tensor) -> float | None:
    try:
        if not tensor.dim():
            only: Any = tensor.tolist()  # unlike `item`, skips the dispatcher and keeps the GIL
            return float(only)
        return float(tensor.item())
    except (RuntimeError, TypeError, ValueError):  # several elements, complex, in a transform
        return None


def _read_quietly(tensor: Tensor) -> float | Tensor | None:
    own_dispatch = type(tensor).__torch_dispatch__ is not no_own_dispatch
    if own_dispatch:  # fake or distributed tensors: reading could have any effect
        return None
    with without_functions(), without_keys(HIDDEN_KEYS):
        if tensor.is_cpu:
            return _item(tensor)
        if tensor.is_meta or tensor.numel() != 1 or tensor.is_complex() or _capturing(tensor):
            return None
        return tensor.detach().clone()


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class LateNumbers:
    """Numbers on devices, transferred together; only `settle` waits, in another thread."""

    def __init__(self) -> None:
        self._where: list[int] = []
        self._copies: list[Tensor] = []
        self._landed: list[tuple[list[int], Tensor, Any]] = []

    def __len__(self) -> int:
        return len(self._where)

    def add(self, where: int, copy: Tensor) -> None:
        """Add a copy whose number belongs at position `where`."""
        self._where.append(where)
        self._copies.append(copy)

    def send(self) -> None:
        """Start the transfers, one for each device and dtype."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, copy in enumerate(self._copies):
            groups.setdefault((copy.device, copy.dtype), []).append(number)
        with quiet():
            for members in groups.values():
                together = torch.stack([self._copies[i].reshape(()) for i in members])
                where = [self._where[i] for i in members]
                self._landed.append((where, *_transfer(together)))
        self._copies = []

    def settle(self, values: NDArray[np.float64]) -> None:
        """Wait for the numbers and write each to its position."""
        for where, host, event in self._landed:
            if event is not None:
                event.synchronize()
            values[where] = host.cpu().to(torch.float64).numpy()
        self._landed = []


def _transfer(tensor: Tensor) -> tuple[Tensor, Any]:
    """Return the destination tensor and the event to wait for; None if reading it waits."""
    return copied_to_host(tensor) if tensor.device.type in _ASYNCHRONOUS else (tensor, None)
