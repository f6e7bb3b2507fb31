"""What a run's process last reported about itself, in a small file next to the run.

The file is replaced every few seconds during recording and removed when the run is finished. If a
process is killed (by the system because memory ran out, or by a batch system), the file remains and
states the last known step and memory use.
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

FILE = "last_seen.json"

_MOST = 1 << 16  # bytes
_NUMBERS = ("time", "step", "host", "limit", "used", "device")
_LARGEST = 1 << 53


def write_last_seen(folder: Path, facts: dict[str, Any]) -> None:
    """Replace the file; facts that are not numbers are left out.

    The content is on disk before it replaces the previous one, so that one of the two is there
    after a power failure.

    Raises:
        OSError: the file cannot be written.
    """
    content = {name: facts[name] for name in _NUMBERS if facts.get(name) is not None}
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


def last_seen(run: Location) -> dict[str, Any] | None:
    """Return the content of the file; None if there is none, or if it is not valid."""
    if not isinstance(run, Path):
        return None
    try:
        content = read_file(run, FILE, most=_MOST)
        found = None if content is None else json.loads(content)
    except (DamagedRunError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    kept = {name: found[name] for name in _NUMBERS if _is_number(found.get(name))}
    return kept if {"time", "step"} <= kept.keys() else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _LARGEST
