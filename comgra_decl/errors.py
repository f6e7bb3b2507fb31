"""All errors raised by this package, with a common base class.

Each message states what is wrong, where, what would be valid, and what to do. User errors raise a
`ComgraError` that is also a `ValueError` or `KeyError`. Bugs in comgra_decl fail an `assert`.
"""

from __future__ import annotations

import enum
import re
import reprlib
import sys
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class ComgraError(Exception):
    """The base class of all errors raised by comgra_decl."""


class SpecError(ComgraError, ValueError):
    """The spec is invalid; `problems` lists every problem found, one line each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class AnnotationError(ComgraError, ValueError):
    """An annotation in the program is invalid: a missing name, an unknown kind, a non-number."""


class RunNotFoundError(ComgraError, FileNotFoundError):
    """No run was found at the given location."""


class DamagedRunError(ComgraError, OSError):
    """A run exists but cannot be read; the message names the file or key and the reason."""


class UnwrittenRunError(DamagedRunError):
    """The run's folder contains no data: the program ended before the first commit."""


class AccessError(ComgraError, PermissionError):
    """The run belongs to another user, who has not allowed others to read it."""


class FormatError(ComgraError, ValueError):
    """A run was written in a format this version cannot read, or a file has another format."""


class StoreError(ComgraError, OSError):
    """Writing to the store failed."""


class RunGoneError(StoreError):
    """The folder of the run being written no longer exists."""


class NoMemoryError(StoreError, MemoryError):
    """Memory that may be needed to write to the store could not be allocated."""


class MissingPackageError(ComgraError, ImportError):
    """An optional package is not installed or cannot be imported; the message says what to do."""


def needed(module: str, extra: str) -> Any:
    """Import a module that belongs to an extra.

    Raises:
        MissingPackageError: the package is missing, and the message says how to install it; or it
            is installed but broken, and the message contains the error.
    """
    package = module.partition(".")[0]
    missing = MissingPackageError(
        f"the {package!r} package is required but not installed: pip install 'comgra-decl[{extra}]'"
    )
    if module == package and _is_folder(package):  # which has no submodules either
        raise missing
    try:
        return import_module(module)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise missing from error
        raise MissingPackageError(
            f"the {package!r} package is installed, but importing it fails: "
            f"{type(error).__name__}: {error}"
        ) from error


def _is_folder(package: str) -> bool:
    """Return whether an import would find only a folder of this name, such as W&B's `wandb`."""
    if package in sys.modules:
        spec = getattr(sys.modules[package], "__spec__", None)
    else:
        spec = find_spec(package)
    return spec is not None and spec.origin is None


class UnknownNameError(ComgraError, KeyError):
    """The run has no such node, slot, statistic or step."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""


class SelectionError(ComgraError, ValueError):
    """More is selected than another tool should receive; the message proposes a selection."""


class PatternError(ComgraError, ValueError):
    """A pattern of nodes, classes or names is invalid; the message explains how to write it."""


class ContractError(ComgraError, ValueError):
    """A file is not a valid contract; the message says where."""


class EventFileError(ComgraError, ValueError):
    """There is no event file of TensorBoard at a path, or a file is not one."""


class ProbeError(ComgraError, ValueError):
    """A probe or picture cannot be made for this model; the message states the reason."""


class HarvestError(ComgraError, ValueError):
    """Activations cannot be harvested or read; the message states the reason."""


class CallError(ComgraError, ValueError):
    """A call of `comgra.look` is invalid, or could not be recorded; the message says why."""


class EditError(ComgraError, ValueError):
    """A change cannot be made permanent in weights; the message states the reason."""


class PlanError(ComgraError, ValueError):
    """A training script cannot be planned; the message holds the end of its output."""


class ReplayError(ComgraError, ValueError):
    """A step cannot be replayed; the message says why, and what to do."""


def reason_of(error: Exception) -> str:
    """Return why something failed; the type of the error is included unless the error is ours."""
    return str(error) if isinstance(error, ComgraError) else f"{type(error).__name__}: {error}"


def wrong_spec(error: SpecError) -> str:
    """Return the message that a program prints before it ends because of an invalid spec."""
    count = len(error.problems)
    problems = "1 problem" if count == 1 else f"{count} problems"
    return "\n".join([f"comgra: the spec has {problems}:", *(f"  {p}" for p in error.problems)])


def shown(value: object) -> str:
    """Return the repr of a value for a message, shortened; its class name if `repr` fails."""
    try:
        return _REPR.repr(value)
    except Exception:  # noqa: BLE001  (a user's `__repr__` that raises, or a number of 5000 digits)
        return f"a {type(value).__name__}"


def is_one_of(name: object, known: Collection[str]) -> bool:
    """Whether `name` is a string and one of the known names; other types are not compared."""
    return isinstance(name, str) and name in known


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return `"; did you mean 'x' or 'y'?"` for close matches of `name`, else an empty string.

    Only strings are matched, because a number passed instead of a name is a different mistake.
    """
    if not isinstance(name, str):
        return ""
    near = near_names(name, map(str, known))
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def near_paths(missing: Path) -> str:
    """Return the same suggestion for a missing path, from the names in its parent folder."""
    try:
        beside = [entry.name for entry in missing.absolute().parent.iterdir()]
    except OSError:
        return ""
    return did_you_mean(missing.name, beside)


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three of `known` that resemble `name`, as a whole or in one of its parts."""
    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.6)
    return near or [n for n in names if get_close_matches(name, _PARTS.split(n), 1, 0.8)][:3]


_PARTS = re.compile(r"[._\[\]]+")
"""Separators between the parts of a key or module path."""


class Exit(enum.IntEnum):
    """Exit code of a command.

    Attributes:
        DONE: success.
        FAILED: unexpected error, shown with a traceback.
        WRONG: invalid request: a wrong argument, a missing run or a missing permission.
        WANTING: success, but with a negative result: a run is damaged, a pattern matched
            nothing, or a rule found an error.
        UNCLEAR: success, but with a result that is neither yes nor no.
    """

    DONE = 0
    FAILED = 1
    WRONG = 2
    WANTING = 3
    UNCLEAR = 4


def message_of(error: BaseException) -> str:
    """Return the message of any program's error, or why it cannot be read."""
    try:
        return str(error)
    except Exception as reason:  # noqa: BLE001  (the error's own class may raise anything)
        return f"(its message cannot be read: {type(reason).__name__} in __str__)"
