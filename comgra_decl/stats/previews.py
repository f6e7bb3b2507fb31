"""Take previews: small parts of tensors, averaged along large axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from comgra_decl.records import POOLED, PREVIEW_BYTES, SAMPLE, Axis, StoredPreview
from comgra_decl.stats.device import ASYNCHRONOUS
from comgra_decl.stats.quiet import copied_to_host, quiet
from comgra_decl.stats.support import as_numpy, plain, real, with_memory

_STAGES = ((SAMPLE, 1), ("entries", 16), ("space", 10), ("entries", 4), ("space", 1),
           ("entries", 1))  # fmt: skip
"""Which axes are reduced, and to what size, until a preview is small enough.

One sample with many channels or heads is more informative than several samples with few, and 10 x
10 cells still show the structure of an image or of attention.
"""

_POOLS: tuple[Callable[..., Tensor], ...] = (
    functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d,
)  # fmt: skip
_WHOLE_NUMBERS = frozenset({torch.bool, torch.int8, torch.int16, torch.int32, torch.int64})
"""Dtypes of ids and masks, for which means are meaningless. Bytes are averaged, because they may be
images.
"""


def sizes_of(shape: Sequence[int], names: Sequence[str], *, samples: int, limit: int) -> list[int]:
    """Return how many entries of each axis a preview keeps, at most `limit` in total.

    Args:
        shape: sizes of the axes.
        names: their names; the first may be `SAMPLE`.
        samples: maximum number of samples.
        limit: maximum number of elements.
    """
    sizes = [
        min(size, samples if name == SAMPLE else limit)
        for size, name in zip(shape, names, strict=True)
    ]
    groups = [
        SAMPLE if name == SAMPLE else "space" if name in POOLED else "entries" for name in names
    ]
    for group, floor in _STAGES:
        mine = [i for i, each in enumerate(groups) if each == group]
        while mine and prod(sizes) > limit:
            largest = max(sizes[i] for i in mine)
            if largest <= floor:
                break
            for i in mine:
                sizes[i] = min(sizes[i], largest - 1)
    return sizes


class _Plan:
    """What to take from all tensors with the same shape, dtype and meaning."""

    def __init__(
        self, shape: Sequence[int], names: Sequence[str], dtype: torch.dtype, samples: int
    ) -> None:
        ids = dtype in _WHOLE_NUMBERS
        itemsize = dtype.itemsize if ids or dtype is torch.uint8 else 4
        limit = PREVIEW_BYTES // max(itemsize, 1)
        sizes = sizes_of(shape, names, samples=samples, limit=limit)
        if dtype is torch.uint8 and _pools(names, shape, sizes):
            sizes = sizes_of(shape, names, samples=samples, limit=PREVIEW_BYTES // 4)
        self.axes = tuple(
            Axis(name, _how(name, size, kept, pooled=not ids), size)
            for name, size, kept in zip(names, shape, sizes, strict=True)
        )
        self.sizes = sizes
        self.pooled = [i for i, axis in enumerate(self.axes) if axis.how == "mean"]
        self.unchanged = not self.pooled and (ids or dtype is torch.uint8)

    def take(self, x: Tensor) -> Tensor:
        """Return a new contiguous tensor on the device of `x`; its first dim is the samples."""
        part = x[tuple(slice(0, n if i not in self.pooled else None)
                       for i, n in enumerate(self.sizes))]  # fmt: skip
        if self.unchanged:
            return part.clone(memory_format=torch.contiguous_format)
        part = real(part).to(torch.float32)
        for dims in (self.pooled[:3], self.pooled[3:6]):
            if dims:
                part = _pool(part, dims, [self.sizes[i] for i in dims])
        # a copy, since the program may write to the tensor before the record is stored
        return part.clone(memory_format=torch.contiguous_format) if _shares(part, x) else part


class Previews:
    """The previews of one step.

    Args:
        samples: maximum number of samples in a preview.
    """

    def __init__(self, *, samples: int) -> None:
        self._samples = max(samples, 1)
        self._plans: dict[Any, _Plan] = {}
        self._taken: dict[int, tuple[_Plan, Tensor]] = {}
        self._events: list[Any] = []  # those that complete the copies to the host

    def clear(self) -> None:
        """Start another step."""
        self._taken, self._events = {}, []

    def add(
        self, index: int, tensor: Tensor, batch_dim: int | None, names: tuple[str, ...]
    ) -> None:
        """Take a preview of the tensor numbered `index`, whose value dims have these `names`."""
        if index in self._taken:  # the same tensor under another name
            return
        with quiet():
            x = with_memory(plain(tensor)).detach()
            if not x.numel():
                return
            if not x.dim():
                x, names = x.reshape(1), ("value",)
            elif batch_dim is not None:
                x, names = x.movedim(batch_dim, 0), (SAMPLE, *names)
            key = x.shape, x.dtype, names
            plan = self._plans.get(key)
            if plan is None:
                if len(self._plans) >= 4096:  # shapes that change every step
                    self._plans.clear()
                plan = self._plans[key] = _Plan(x.shape, names, x.dtype, self._samples)
            taken = plan.take(x)
            if taken.device.type in ASYNCHRONOUS:
                taken, event = copied_to_host(taken)
                self._events.append(event)
            elif taken.device.type != "cpu":
                taken = taken.cpu()
        self._taken[index] = plan, taken

    def finish(self) -> tuple[dict[int, StoredPreview], Callable[[], None] | None]:
        """End the step; return the previews by number, valid after the function has run."""
        found = {
            index: StoredPreview(plan.axes, as_numpy(taken))
            for index, (plan, taken) in self._taken.items()
        }
        events = self._events
        self.clear()

        def wait() -> None:
            for event in events:
                event.synchronize()

        return found, wait if events else None


def _pools(names: Sequence[str], shape: Sequence[int], sizes: Sequence[int]) -> bool:
    return any(n in POOLED and k < s for n, s, k in zip(names, shape, sizes, strict=True))


def _how(name: str, size: int, kept: int, *, pooled: bool) -> str:
    if kept == size:
        return "all"
    return "mean" if pooled and name in POOLED else "first"


def _pool(part: Tensor, dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Average up to three dims."""
    last = list(range(-len(dims), 0))
    moved = part.movedim(list(dims), last)
    rows = moved.reshape(1, -1, *moved.shape[-len(dims) :])
    pooled = _POOLS[len(dims) - 1](rows, tuple(sizes))
    return pooled.reshape(*moved.shape[: -len(dims)], *sizes).movedim(last, list(dims)).contiguous()


def _shares(part: Tensor, x: Tensor) -> bool:
    """Whether a part shares memory with the program's tensor, or is not contiguous."""
    return not part.is_contiguous() or part.untyped_storage().data_ptr() == (
        x.untyped_storage().data_ptr()
    )
