"""The exit codes of `comgra-decl`, the same for every command."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """How a command ended.

    Attributes:
        DONE: it did what was asked for.
        FAILED: something that nobody expected; there is a traceback.
        WRONG: what was asked for cannot be done: a wrong argument, no such run, no permission.
        WANTING: it was done, and what it found is wanting: a run is damaged, a pattern matched
            nothing, a rule has found an error.
        UNCLEAR: it was done, and says neither yes nor no.
    """

    DONE = 0
    FAILED = 1
    WRONG = 2
    WANTING = 3
    UNCLEAR = 4
