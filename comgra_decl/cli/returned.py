"""Call a function in the user's file, named as FILE.py:FUNCTION on the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comgra_decl.errors import ComgraError, did_you_mean


def returned_pair(source: str, what: str, error: Callable[[str], ComgraError]) -> tuple[Any, Any]:
    """Return the two objects that the function returns.

    Args:
        source: FILE.py:FUNCTION; the function takes no arguments.
        what: what it returns, for error messages, as in "(model, batches)".
        error: makes an error of a message.

    Raises:
        ComgraError: there is no such function, or it returns something else.
    """
    from runpy import run_path

    file, _, name = source.rpartition(":")
    path = Path(file)
    if not file.endswith(".py"):
        raise error(f"the source must be FILE.py:FUNCTION, got {source!r}")
    if not path.is_file():
        raise error(f"{file} does not exist")
    sys.path.insert(0, str(path.parent.absolute()))  # as for a script
    space = run_path(file, run_name=path.stem)
    function = space.get(name)
    if not callable(function):
        there = [key for key, value in space.items() if callable(value)]
        raise error(f"{file} has no function {name!r}{did_you_mean(name, there)}")
    found = function()
    if not isinstance(found, tuple) or len(found) != 2:
        raise error(f"{name} must return {what}, got {type(found).__name__}")
    return found
