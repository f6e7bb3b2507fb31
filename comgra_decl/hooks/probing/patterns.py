"""Attention patterns, which functions compute inside modules, as tensors that passes may change."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.functions.attention import FusedCall, weights_of
from comgra_decl.hooks.modes import CallWatch
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.patches import Patch


class Attending(Protocol):
    """Receives each attention pattern while the modules around it are running."""

    def attended(self, weights: torch.Tensor) -> torch.Tensor:
        """Return attention weights [samples, heads, queries, keys], or a replacement."""


class AttentionCalls(CallWatch):
    """The base class of modes that read the functions which compute attention weights."""

    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function, and pass on what computes attention weights."""
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "softmax":
            return self.of_softmax(result, args, kwargs)
        if name == "scaled_dot_product_attention":
            return self.of_fused(result, FusedCall(*args, **kwargs))
        return result

    @abstractmethod
    def of_softmax(
        self, result: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return the result of `softmax` with these arguments, or a replacement."""

    @abstractmethod
    def of_fused(self, result: torch.Tensor, call: FusedCall) -> torch.Tensor:
        """Return the result of `scaled_dot_product_attention`, or a replacement."""


class Patterns(AttentionCalls):
    """Passes the weights of attention on, and computes with what comes back.

    They are read from `softmax` over the last dimension of what has the shape [samples, heads,
    queries, keys], or [samples * heads, positions, positions], and from
    `scaled_dot_product_attention`, which does not return its weights: they are recomputed, and a
    change of theirs is added to the output, times the values. With gradients, the output is the
    product of the weights and the values, so that it depends on them. `nn.MultiheadAttention` calls
    both inside a function of torch, which hides its calls from modes.

    Args:
        attending: receives the weights.
        samples: the number of samples in the batch.

    Attributes:
        samples: the same; change it between calls of the model.
    """

    def __init__(self, attending: Attending, samples: int) -> None:
        super().__init__()
        self._attending = attending
        self.samples = samples
        self._inside = False  # a function of torch that computes attention

    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function, and pass on what computes attention weights, also inside it."""
        if getattr(func, "__name__", "") != "multi_head_attention_forward":
            return super().handle(func, args, kwargs)
        with self._opened():
            return func(*args, **kwargs)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """See the functions that another function of torch calls in this thread."""
        thread = this_thread.number

        def around(
            read: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            result = original(*args, **kwargs)
            return read(result, args, kwargs) if this_thread.number == thread else result

        def fused(result: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.of_fused(result, FusedCall(*args, **kwargs))

        with ExitStack() as stack:
            for name, read in (
                ("softmax", self.of_softmax),
                ("scaled_dot_product_attention", fused),
            ):
                patch = Patch(functional, name, partial(around, read))
                patch.apply()
                stack.callback(patch.restore)
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    def of_softmax(
        self, result: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return the weights, or what replaces them."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        rank = result.dim()
        square = rank == 3 and (self._inside or result.shape[-1] == result.shape[-2])
        if dim not in (-1, rank - 1) or not (rank == 4 or square):
            return result
        if len(result) != self.samples and (rank == 4 or len(result) % self.samples):
            return result
        by_head = result.reshape(self.samples, -1, *result.shape[-2:])
        changed = self._attending.attended(by_head)
        return result if changed is by_head else changed.reshape(result.shape)

    def of_fused(self, result: torch.Tensor, call: FusedCall) -> torch.Tensor:
        """Return the output, or that of the weights that replace its own."""
        if call.query.dim() != 4 or len(call.query) != self.samples:
            return result
        weights = weights_of(call)
        changed = self._attending.attended(weights)
        if changed is weights:
            return result
        if call.dropout_p > 0:
            raise ProbeError("the attention has dropout; use a probe with `mode: eval`")
        value = call.value
        if call.enable_gqa:
            value = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
        if torch.is_grad_enabled():
            return changed.to(value.dtype) @ value
        return result + (changed - weights).to(value.dtype) @ value
