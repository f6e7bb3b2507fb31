"""Read from all ranks at once: their requests are in flight together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import TypeVar

from comgra_decl.store.remote import AT_ONCE

S = TypeVar("S")
T = TypeVar("T")

_NEAR, _FAR = 4, AT_ONCE
"""Calls at once for runs in a folder, where more only compete for the interpreter, and for runs in
a bucket, where each waits for its requests."""

_within = threading.local()


def side_by_side(function: Callable[[S], T], items: Iterable[S], *, far: bool) -> list[T]:
    """Return the result of a function for each item, in order.

    The calls run in threads, and so do their requests. A call within such a call runs its own one
    after the other, because it would wait for threads that wait for it.

    Args:
        function: reads from one rank.
        items: the ranks.
        far: whether the run is in a bucket.

    Raises:
        Exception: that of the first item whose call raises one, after all calls have ended.
    """
    todo = list(items)
    if len(todo) < 2 or getattr(_within, "active", False):
        return [function(item) for item in todo]

    def call(item: S) -> T:
        _within.active = True
        try:
            return function(item)
        finally:
            _within.active = False

    pool = _pool(_FAR if far else _NEAR)
    futures = [pool.submit(copy_context().run, call, item) for item in todo]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


@cache
def _pool(at_once: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(at_once, "comgra_decl ranks")
