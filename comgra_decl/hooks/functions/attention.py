"""Recompute the weights of fused attention, which the fused call never stores."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from comgra_decl.stats.quiet import quiet
from comgra_decl.torch_private import is_functorch_wrapped

AXES = ("head", "query", "key")
"""The names of the value dims of attention weights."""

FUNCTION = "torch.nn.functional.scaled_dot_product_attention"
"""The fused call; `nn.MultiheadAttention` also uses it unless its weights are requested."""


class FusedCall(NamedTuple):
    """The arguments of `scaled_dot_product_attention`, with the same names and defaults."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def weights_per_sample(self) -> int:
        """Number of weights per sample: heads x queries x keys."""
        heads = math.prod(self.query.shape[1:-2]) if self.query.dim() > 3 else 1
        return int(heads * self.query.shape[-2] * self.key.shape[-2])


def recomputed_weights(call: FusedCall, *, samples: int, most: int) -> torch.Tensor:
    """Return softmax(q k^T scale + mask) for the first samples, without dropout.

    As in `torch.nn.functional.scaled_dot_product_attention`, the scale defaults to 1 / sqrt(width),
    a boolean mask is true where attention is allowed, and a causal mask allows keys up to the
    query's index. If a query may not attend to any key, its weights are 0. The computation does not
    involve autograd, autocast or random number generators.

    Args:
        call: the fused call's arguments, of shape [samples, ..., queries, width]. The
            dimensions in between are heads; if there are none, one is added.
        samples: the maximum number of samples.
        most: the maximum number of weights per sample.

    Returns:
        A float32 tensor of shape [samples, heads, queries, keys].

    Raises:
        ValueError: the tensors are nested or inside a functorch transform, there are too many
            weights, or no sample is recorded.
    """
    tensors = (call.query, call.key, *([] if call.attn_mask is None else [call.attn_mask]))
    if any(is_functorch_wrapped(t) or t.is_nested for t in tensors):
        raise ValueError("tensors that are nested or in a functorch transform are not recomputed")
    if call.weights_per_sample > most:
        raise ValueError(
            f"{call.weights_per_sample} weights per sample exceed `values.max_elements`, {most}"
        )
    if not samples:
        raise ValueError("no sample is recorded (`samples.count` is 0)")
    with quiet():
        return _weights(call, samples)


def weights_of(call: FusedCall) -> torch.Tensor:
    """Return the weights of all samples, as `recomputed_weights` does, with their history."""
    return _weights(call, len(call.query))


def _weights(call: FusedCall, samples: int) -> torch.Tensor:
    query, key = (_first(t, samples) for t in (call.query, call.key))
    if call.enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scale = 1 / math.sqrt(query.shape[-1]) if call.scale is None else call.scale
    scores = (query @ key.transpose(-2, -1)) * scale
    scores = _masked(scores, call, samples)
    weights = scores.softmax(-1)
    weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    shape = weights.shape
    return weights.to(torch.float32).reshape(shape[0], -1, *shape[-2:])


def _first(tensor: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the first samples, at least float32, of shape [samples, heads, ..., rows, width]."""
    if tensor.dim() == 2:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(1)
    first = tensor[:samples]
    return first if first.dtype == torch.float64 else first.to(torch.float32)


def _masked(scores: torch.Tensor, call: FusedCall, samples: int) -> torch.Tensor:
    if call.is_causal:
        rows = torch.arange(scores.shape[-2], device=scores.device)
        keys = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill(keys > rows.unsqueeze(-1), -math.inf)
    if call.attn_mask is None:
        return scores
    # The mask may be smaller in any leading dimension; expanding it costs no memory.
    whole = torch.broadcast_shapes(call.attn_mask.shape, (*call.query.shape[:-1], 1))
    mask = call.attn_mask.expand(whole)
    mask = mask.reshape(1, 1, *mask.shape) if mask.dim() == 2 else mask
    mask = mask.unsqueeze(1) if mask.dim() == 3 else mask
    mask = mask[:samples]
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask.to(scores.dtype)
