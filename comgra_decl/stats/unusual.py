"""Sparse, nested and quantised tensors: the same numbers, as an ordinary tensor.

Asked only for what a reducer refuses, so that other tensors pay nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comgra_decl.stats.quiet import quiet
from comgra_decl.torch_private import is_functorch_wrapped

MOST_ELEMENTS = 1 << 24
"""A sparse tensor of more elements is not written out: 64 MiB of float32, mostly zeros."""

_SPARSE = tuple(
    getattr(torch, name)
    for name in ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
)


def ordinary(tensor: Tensor) -> Tensor | None:
    """Returns a strided tensor with the numbers of `tensor`; None if there is no such.

    A sparse tensor is written out, zeros included (statistics are those of the whole); of a nested
    one the parts are put one after the other (along dim 0 where the rest of their shapes agrees,
    else flat); a quantised one is what its integers stand for.
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
    if not isinstance(values, Tensor):  # of other tensors it is a method
        return list(nested.detach().unbind())
    # The jagged layout is a subclass, whose parts lie in ordinary tensors; there may be gaps.
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
