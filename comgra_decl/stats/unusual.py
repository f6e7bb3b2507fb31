"""Convert sparse, nested and quantised tensors to ordinary ones.

Called only for tensors that a reducer rejects, so that other tensors cost nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comgra_decl.stats.quiet import quiet
from comgra_decl.torch_private import is_functorch_wrapped

MOST_ELEMENTS = 1 << 24
"""Maximum number of elements in a sparse tensor to densify. In float32, they take 64 MiB, mostly
zeros."""

_SPARSE = tuple(
    getattr(torch, name)
    for name in ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
)


def ordinary(tensor: Tensor) -> Tensor | None:
    """Return a strided tensor with the numbers of `tensor`; None if impossible.

    Sparse tensors become dense, including zeros, because statistics cover the whole tensor. The
    parts of nested tensors are concatenated, along dim 0 if their other dims agree and flat
    otherwise. Quantised tensors become the numbers that their integers represent.
    """
    if is_functorch_wrapped(tensor) or tensor.is_meta:
        return None
    with torch.no_grad(), quiet():
        if tensor.is_nested:
            return _joined(_parts(tensor))
        if tensor.layout in _SPARSE and tensor.numel() <= MOST_ELEMENTS:
            return tensor.detach().to_dense()
        if tensor.is_quantized:
            return tensor.detach().dequantize()
    return None


def _parts(nested: Tensor) -> list[Tensor]:
    values = getattr(nested, "_values", None)
    if not isinstance(values, Tensor):  # other tensors have a method with this name
        return list(nested.detach().unbind())
    # The jagged layout is a subclass that stores its parts in ordinary tensors, possibly with gaps.
    lengths = getattr(nested, "_lengths", None)
    if lengths is None:
        return [values.detach()]
    dim = nested._ragged_idx - 1  # type: ignore[attr-defined]
    starts = nested._offsets.tolist()  # type: ignore[attr-defined]
    return [
        values.detach().narrow(dim, start, length)
        for start, length in zip(starts, lengths.tolist(), strict=False)
    ]


def _joined(parts: list[Tensor]) -> Tensor | None:
    if not parts:
        return None
    if parts[0].dim() and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(parts)
    return torch.cat([part.reshape(-1) for part in parts])
