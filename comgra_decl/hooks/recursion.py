"""Raise the recursion limit while hooks are installed on all modules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch.nn.modules.module import register_module_forward_pre_hook

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_FACTOR, _MORE = 2, 200
"""The new limit is `_FACTOR` times the old limit plus `_MORE`. With hooks, torch needs about 7
frames instead of 4 for each level of nested modules, and our hooks add more at the innermost
level."""


class Headroom:
    """Raises the recursion limit, so that a program can nest calls as deeply as without tracing.

    If recordings are nested, the limit is restored when all of them have ended.
    """

    _users: ClassVar[set[int]] = set()  # ids of the instances that need it
    _theirs: ClassVar[int] = 0
    _ours: ClassVar[int] = 0

    def take(self) -> None:
        """Raise the limit. Idempotent."""
        cls = Headroom
        if not cls._users:
            cls._theirs = sys.getrecursionlimit()
            cls._ours = cls._theirs * _FACTOR + _MORE
            sys.setrecursionlimit(cls._ours)
        cls._users.add(id(self))

    def give_back(self) -> None:
        """Restore the limit, unless it is still needed or the program has set another one."""
        cls = Headroom
        last = cls._users == {id(self)}
        cls._users.discard(id(self))
        if last and sys.getrecursionlimit() == cls._ours:
            with contextlib.suppress(RecursionError):  # raised if the stack is deeper now
                sys.setrecursionlimit(cls._theirs)


class EveryCall:
    """A hook that runs before each call to any module, while installed.

    Args:
        before: the hook.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before
        self._headroom = Headroom()
        self._handle: RemovableHandle | None = None

    @property
    def on(self) -> bool:
        """Whether the hook is installed."""
        return self._handle is not None

    def install(self) -> None:
        """Install the hook. Idempotent."""
        if self._handle is None:
            self._headroom.take()
            self._handle = register_module_forward_pre_hook(self._before)

    def remove(self) -> None:
        """Remove the hook. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
            self._headroom.give_back()
