"""Describe the tensors of a failed program as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.stats.quiet import quiet
from comgra_decl.torch_private import no_own_dispatch

MOST = 24
"""Maximum number of tensors described in one place."""

_ON_HOST = 1 << 20
"""Maximum number of elements read from a tensor on the host; larger tensors are sampled."""

_ON_DEVICE = 1 << 16
"""The same for a device, whose memory may be exhausted."""


def described(named: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Return facts about several tensors, at most `MOST`, each tensor once."""
    found: dict[int, dict[str, Any]] = {}
    for name, tensor in named:
        if id(tensor) not in found:
            if len(found) == MOST:
                break
            found[id(tensor)] = describe(name, tensor)
    return list(found.values())


def describe(name: str, tensor: Tensor) -> dict[str, Any]:
    """Return shape, dtype, device and statistics of a tensor.

    `min`, `max`, `mean` and `std` (population) are those of its finite elements, `nonfinite` counts
    the others. They are missing if the tensor cannot be read, for example because its device has
    failed. If only a strided sample was read, `read` is the number of its elements.
    """
    with quiet():
        facts: dict[str, Any] = {
            "name": name,
            "shape": _shape(tensor),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": str(tensor.device),
            "requires_grad": bool(tensor.requires_grad),
        }
        try:
            facts |= _statistics(tensor)
        except Exception:  # noqa: BLE001  (the device, or the tensor's own class, may raise anything)
            return facts
    return facts


def _shape(tensor: Tensor) -> list[int]:
    try:
        return [int(size) for size in tensor.shape]
    except (AttributeError, RuntimeError, TypeError, ValueError):  # nested or symbolic
        return []


def _statistics(tensor: Tensor) -> dict[str, Any]:
    own = type(tensor).__torch_dispatch__ is not no_own_dispatch
    if own or tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return {}
    values = _read(tensor)
    if np.iscomplexobj(values):
        values = np.abs(values)
    values = values.astype(np.float64)
    finite = values[np.isfinite(values)]
    facts: dict[str, Any] = {"nonfinite": int(values.size - finite.size)}
    if finite.size:
        facts |= {
            "min": float(finite.min()),
            "max": float(finite.max()),
            "mean": float(finite.mean()),
            "std": float(finite.std()),
        }
    if values.size < tensor.numel():
        facts["read"] = int(values.size)
    return facts


def _read(tensor: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Return all elements in a tensor or, if it is large, every k-th element."""
    most = _ON_HOST if tensor.is_cpu else _ON_DEVICE
    tensor = tensor.detach()
    if tensor.numel() > most:
        while not tensor.is_contiguous() and tensor.numel() > most:  # a copy could be too large
            longest = max(range(tensor.dim()), key=tensor.size)
            tensor = tensor.narrow(longest, 0, (tensor.size(longest) + 1) // 2)
        tensor = tensor.reshape(-1)[:: -(-tensor.numel() // most)]
    host = tensor.cpu()
    if host.dtype in (torch.complex64, torch.complex128):
        return host.resolve_conj().numpy()
    return host.to(torch.float64).numpy()


def in_value(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value with their names: `x`, `batch[0]`, `batch.labels`."""
    for path, tensor in tensors_in(value):
        yield f"{name}{path}", tensor
