"""How deeply calls may nest while hooks of ours are on all modules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch.nn.modules.module import register_module_forward_pre_hook

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_FACTOR, _MORE = 2, 200
"""With hooks, torch needs about 7 frames for each module within another instead of 4, and ours come
on top of the innermost one."""


class Headroom:
    """Raises the interpreter's recursion limit, so that a program may nest as deeply as it may.

    With one recording inside another, it is lowered again when both are done.
    """

    _users: ClassVar[set[int]] = set()  # ids of those that need it
    _theirs: ClassVar[int] = 0
    _ours: ClassVar[int] = 0

    def take(self) -> None:
        """Makes room; calling it twice is harmless."""
        cls = Headroom
        if not cls._users:
            cls._theirs = sys.getrecursionlimit()
            cls._ours = cls._theirs * _FACTOR + _MORE
            sys.setrecursionlimit(cls._ours)
        cls._users.add(id(self))

    def give_back(self) -> None:
        """Needs it no longer; a limit that the program has set meanwhile stays."""
        cls = Headroom
        last = cls._users == {id(self)}
        cls._users.discard(id(self))
        if last and sys.getrecursionlimit() == cls._ours:
            with contextlib.suppress(RecursionError):  # refused in the depth of a call
                sys.setrecursionlimit(cls._theirs)


class EveryCall:
    """A hook that runs before each call of any module, as long as it is wanted.

    Args:
        before: the hook.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before
        self._headroom = Headroom()
        self._handle: RemovableHandle | None = None

    @property
    def on(self) -> bool:
        """Whether it runs."""
        return self._handle is not None

    def install(self) -> None:
        """Lets it run from now on; calling it twice is harmless."""
        if self._handle is None:
            self._headroom.take()
            self._handle = register_module_forward_pre_hook(self._before)

    def remove(self) -> None:
        """Lets it run no longer."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
            self._headroom.give_back()
