"""Check where a command writes before it does anything else."""

from __future__ import annotations

import os
from pathlib import Path

from comgra_decl.errors import near_paths


def fault_of_file(target: Path) -> str | None:
    """Return why a file cannot be written, as far as that can be known now; None if it can.

    An existing file counts as one that can be written. The command decides about overwriting.
    """
    if target.is_dir():
        return f"{str(target)!r} is a folder, not a file"
    parent = target.absolute().parent
    if not parent.exists():
        return f"the folder {str(target.parent)!r} does not exist{near_paths(target.parent)}"
    if not parent.is_dir():
        return f"{str(target.parent)!r} is not a folder"
    if not os.access(target if target.exists() else parent, os.W_OK):
        return f"{str(target)!r} may not be written by this user"
    return None


def fault_of_folder(target: Path) -> str | None:
    """Return why a folder cannot be created or written, likewise; missing parents are no fault."""
    known = next(path for path in (target.absolute(), *target.absolute().parents) if path.exists())
    if not known.is_dir():
        return f"{str(known)!r} is a file, not a folder"
    if not os.access(known, os.W_OK):
        return f"{str(known)!r} may not be written by this user"
    return None
