"""What a run's process last reported about itself, in a small file next to the run.

The file is replaced every few seconds during recording and removed when the run is finished. If a
process is killed (by the system because memory ran out, or by a batch system), the file remains and
states the last known step and memory use. It also identifies the process, so that a run whose
process was killed before its first commit can be told from one that is being created.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from comgra_decl.errors import DamagedRunError

from .folder import read_file
from .location import Location
from .meta import process_identity

FILE = "last_seen.json"

_MOST = 1 << 16  # bytes
_WRITER = "writer"
_NUMBERS = ("time", "step", "host", "limit", "used", "device")
_LARGEST = 1 << 53


def write_last_seen(folder: Path, facts: dict[str, Any]) -> None:
    """Replace the file; facts that are not numbers are left out, and this process is added.

    The content is on disk before it replaces the previous one, so that one of the two is there
    after a power failure.

    Raises:
        OSError: the file cannot be written.
    """
    content: dict[str, Any] = {n: facts[n] for n in _NUMBERS if facts.get(n) is not None}
    content[_WRITER] = process_identity()
    draft = folder / f"{FILE}.{os.getpid()}"
    with draft.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / FILE)


def remove_last_seen(folder: Path) -> None:
    """Remove the file when a run is finished."""
    with suppress(OSError):
        (folder / FILE).unlink(missing_ok=True)


def is_begun(run: Location) -> bool:
    """Return whether the folder contains the file, even if it contains nothing else yet."""
    return isinstance(run, Path) and (run / FILE).is_file()


def last_seen(run: Location) -> dict[str, Any] | None:
    """Return the numbers in the file; None if there is none, or if it is not valid."""
    found = _content(run)
    kept = {name: found[name] for name in _NUMBERS if _is_number(found.get(name))}
    return kept if {"time", "step"} <= kept.keys() else None


def last_writer(run: Location) -> dict[str, Any] | None:
    """Return the identity of the process that wrote the file, as of `process_identity`."""
    found = _content(run).get(_WRITER)
    return found if isinstance(found, dict) else None


def _content(run: Location) -> dict[str, Any]:
    """Return the content of the file; nothing if there is none, or if it is not valid."""
    if not isinstance(run, Path):
        return {}
    try:
        content = read_file(run, FILE, most=_MOST)
        found = None if content is None else json.loads(content)
    except (DamagedRunError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _LARGEST
