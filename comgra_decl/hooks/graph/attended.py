"""Facts about attention in the first records of a run: which positions attend to which others.

The attention weights of a whole model are large, and most implementations do not return them. A few
values per call are enough to store what a mask allows, or which weights are exactly zero. See
`records.ATTENTIONS`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from comgra_decl.stats.quiet import quiet
from comgra_decl.stats.support import is_readable

_SAMPLES = 8
_MOST_CALLS = 16
_MOST_WEIGHTS = 1 << 22  # maximum number of elements to read per call
_BLOCKED = -1e4  # an added score below this value leaves no weight


class Attended:
    """Collects facts about the attention calls in a step.

    Attributes:
        tokens: the integer input [batch, positions] of the model, used to recognise padding.
    """

    def __init__(self) -> None:
        self.tokens: weakref.ref[torch.Tensor] | None = None
        self._found: list[dict[str, Any]] = []

    def take(self) -> list[dict[str, Any]]:
        """Return the facts about the calls so far, and clear them."""
        found, self._found = self._found, []
        self.tokens = None
        return found

    def see(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Store the facts about an attention call. Torch function modes must be disabled."""
        read = _READ.get(name)
        if read is None or len(self._found) >= _MOST_CALLS:
            return
        with quiet():
            facts = read(args, kwargs, result)
            if facts is not None:
                shape, open_ = facts
                self._found.append({"function": name, "shape": shape, **self._seen(open_)})

    def _seen(self, open_: torch.Tensor | bool) -> dict[str, Any]:
        """Return the facts about which keys each query sees.

        Args:
            open_: bool or weights [samples, ..., queries, keys]; True if every key is seen, False
                if a causal mask hides the later ones.
        """
        if isinstance(open_, bool):
            return {"future": float(open_), "past": 1.0}
        seen = _without_blocked_queries(open_.to(torch.float32))
        total = max(float(seen.sum()), 1e-30)
        facts: dict[str, Any] = {}
        if seen.shape[-1] == seen.shape[-2]:
            facts["future"] = float(seen.triu(1).sum()) / total
            facts["past"] = float(seen.tril(-1).sum()) / total
        return facts | self._padding(seen)

    def _padding(self, seen: torch.Tensor) -> dict[str, int]:
        """Return how many different tokens at least one query sees, and how many no query sees."""
        tokens = None if self.tokens is None else self.tokens()
        if tokens is None or seen.dim() < 3:
            return {}
        count, keys = len(seen), seen.shape[-1]
        ids = tokens[:count]
        extra = keys - ids.shape[1]  # a token for the class comes first
        if len(ids) != count or extra not in (0, 1):
            return {}
        kept = seen.reshape(count, -1, keys).amax(1)[:, extra:] > 0
        return {
            "tokens_seen": len(torch.unique(ids[kept])),
            "tokens_unseen": len(torch.unique(ids[~kept])),
        }


Facts = tuple[list[int], "torch.Tensor | bool"] | None


def _of_softmax(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Facts:
    """Read the weights of a softmax over the keys."""
    if not isinstance(result, torch.Tensor) or _is_odd(result) or result.dim() < 3:
        return None
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    shape = list(result.shape)
    if dim not in (-1, len(shape) - 1) or shape[-1] != shape[-2] or shape[-1] < 2:
        return None
    part = result.detach()[:_SAMPLES]
    return (shape, part) if part.numel() <= _MOST_WEIGHTS else None


def _of_fused(args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any) -> Facts:
    """Read the mask of `scaled_dot_product_attention`."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    if _is_odd(query) or query.dim() < 3:
        return None
    shape = [*query.shape[:-1], key.shape[-2]]
    if given.get("is_causal"):
        return shape, False
    if mask is None:
        return shape, True
    allowed = mask if mask.dtype == torch.bool else mask > _BLOCKED
    return shape, _expanded(allowed, shape)


def _of_module(args: tuple[Any, ...], kwargs: Mapping[str, Any], _result: Any) -> Facts:
    """Read the masks of `multi_head_attention_forward`, whose tensors are [time, batch, ...]."""
    query = args[0] if args else kwargs["query"]
    key = args[1] if len(args) > 1 else kwargs["key"]
    heads = args[4] if len(args) > 4 else kwargs["num_heads"]
    if _is_odd(query) or query.dim() != 3:
        return None
    (queries, batch, _), keys = query.shape, key.shape[0]
    shape = [batch, int(heads), queries, keys]
    allowed: torch.Tensor | None = None
    mask, padding = kwargs.get("attn_mask"), kwargs.get("key_padding_mask")
    if mask is not None:
        allowed = ~mask if mask.dtype == torch.bool else mask > _BLOCKED
        if allowed.dim() == 3:
            allowed = allowed.reshape(-1, int(heads), queries, keys)
    if padding is not None:
        kept = ~padding if padding.dtype == torch.bool else padding > _BLOCKED
        kept = kept[:, None, None, :]
        allowed = kept if allowed is None else kept & allowed
    if allowed is None:
        return shape, True
    return shape, _expanded(allowed, shape)


def _expanded(allowed: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return a mask of the first samples and the first head, [samples, 1, queries, keys]."""
    while allowed.dim() < len(shape):
        allowed = allowed[None]
    count = min(_SAMPLES, shape[0])
    allowed = allowed[:count, :1] if len(shape) > 3 else allowed[:count]
    whole = [count, *([1] if len(shape) > 3 else []), *shape[-2:]]
    if len(shape) > 4:
        whole = [count, *allowed.shape[1:-2], *shape[-2:]]
    return allowed.expand(whole)


def _without_blocked_queries(seen: torch.Tensor) -> torch.Tensor:
    """Set the weights of queries to 0 whose keys are all hidden.

    A softmax over scores that a mask has all replaced by the same number returns equal weights for
    them. If no weight at all is 0, there is no mask, and equal weights come from equal scores.
    """
    if not bool((seen == 0).any()):
        return seen
    return seen.masked_fill((seen == seen[..., :1]).all(-1, keepdim=True), 0)


def _is_odd(tensor: torch.Tensor) -> bool:
    return not is_readable(tensor)


_READ: Mapping[str, Callable[[tuple[Any, ...], Mapping[str, Any], Any], Facts]] = {
    "softmax": _of_softmax,
    "scaled_dot_product_attention": _of_fused,
    "multi_head_attention_forward": _of_module,
}
"""The reader for each function, by the function's name."""
