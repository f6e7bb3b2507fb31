"""A cache of computed results, bounded by size in bytes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import pandas as pd

T = TypeVar("T")
_ENTRY = 200  # bytes of overhead per entry


class Cache:
    """A least-recently-used cache with a size limit in bytes.

    Limiting the number of entries would not limit memory: one statistic of all tensors at 100,000
    steps is as large as ten thousand records. The newest result is kept even if it exceeds the
    limit.

    Args:
        limit: Maximum size in bytes.

    Attributes:
        size: Current size in bytes, estimated by `size_of`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.size = 0

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the result for a key, computing it if it is not cached."""
        known = self._held.get(key)
        if known is not None:
            self._held.move_to_end(key)
            value: T = known[0]
            return value
        value = compute()
        self._hold(key, value)
        return value

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def clear(self) -> None:
        """Remove all entries."""
        self._held.clear()
        self.size = 0

    def _hold(self, key: Hashable, value: object) -> None:
        size = size_of(value) + _ENTRY
        self._held[key] = value, size
        self.size += size
        while self.size > self._limit and len(self._held) > 1:
            _, (_, gone) = self._held.popitem(last=False)
            self.size -= gone


_SHARED = 1000
"""Longest string that counts as shared between results, such as a name; images are longer."""


def size_of(value: object) -> int:
    """Return the estimated size of a result in bytes; exact for arrays."""
    if isinstance(value, pd.DataFrame):
        return 8 * int(value.size + sum(value.shape))  # `memory_usage` takes 1 ms
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, Mapping):
        return sys.getsizeof(value) + sum(size_of(k) + size_of(v) for k, v in value.items())
    if isinstance(value, (tuple, list, set, frozenset)):
        return sys.getsizeof(value) + sum(map(size_of, value))
    if is_dataclass(value):
        return sys.getsizeof(value) + sum(size_of(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, str):
        return sys.getsizeof(value) if len(value) > _SHARED else 0
    return sys.getsizeof(value)
