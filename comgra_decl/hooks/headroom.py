"""How deeply calls may nest while a step is recorded."""

from __future__ import annotations

import contextlib
import sys
from typing import ClassVar

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
