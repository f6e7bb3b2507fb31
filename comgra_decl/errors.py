"""Every error this package raises, in one family.

Each message says what is wrong, where, what would be valid, and what to do. What a user wrote
wrongly is a `ComgraError` that is also a `ValueError` or `KeyError`; what we broke is an `assert`.
"""

from __future__ import annotations

import enum
import re
import reprlib
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path


class ComgraError(Exception):
    """Base of all errors raised by comgra_decl."""


class SpecError(ComgraError, ValueError):
    """The declaration is wrong; carries every problem found, one line each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class AnnotationError(ComgraError, ValueError):
    """An annotation in the program is wrong: no name, no such kind, no number."""


class RunNotFoundError(ComgraError, FileNotFoundError):
    """There is no run where one was looked for."""


class DamagedRunError(ComgraError, OSError):
    """A run exists but cannot be read; says which file or key and why."""


class UnwrittenRunError(DamagedRunError):
    """A run's folder in which nothing was written: its program ended before the first commit."""


class FormatError(ComgraError, ValueError):
    """The run was written in a format this version cannot read."""


class StoreError(ComgraError, OSError):
    """Writing to the store failed."""


class RunGoneError(StoreError):
    """The folder of the run being written is no longer there."""


class NoMemoryError(StoreError, MemoryError):
    """The system refuses the memory that writing to the store may need."""


class MissingPackageError(ComgraError, ImportError):
    """An optional package is not installed; names the extra that brings it."""


class UnknownNameError(ComgraError, KeyError):
    """A node, slot, statistic or step that the run does not have."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""


def shown(value: object) -> str:
    """Returns a value as a message shows it: cut where it is long, by its class if it cannot be."""
    try:
        return _REPR.repr(value)
    except Exception:  # noqa: BLE001  (a `__repr__` of the user's, or a number of 5000 digits)
        return f"a {type(value).__name__}"


def is_one_of(name: object, known: Collection[str]) -> bool:
    """Whether something is one of those names; what is no text is not even compared with them."""
    return isinstance(name, str) and name in known


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Returns `"; did you mean 'x' or 'y'?"` for near matches of `name`, else an empty string.

    Only text resembles anything: who passes a number in a name's place made another mistake.
    """
    if not isinstance(name, str):
        return ""
    near = near_names(name, map(str, known))
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def near_paths(missing: Path) -> str:
    """Returns the same for a path that is missing, from what lies beside it."""
    try:
        beside = [entry.name for entry in missing.absolute().parent.iterdir()]
    except OSError:
        return ""
    return did_you_mean(missing.name, beside)


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Returns up to three of `known` that resemble `name`, or that have a part which does."""
    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.6)
    return near or [n for n in names if get_close_matches(name, _PARTS.split(n), 1, 0.8)][:3]


_PARTS = re.compile(r"[._\[\]]+")
"""What separates the parts of a key or of a module path."""


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
