"""Runs a script or a module in this process as `python SCRIPT` and `python -m MODULE` would."""

from __future__ import annotations

import builtins
import io
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a file of Python; what it raises passes through.

    A folder or an archive with a `__main__.py` runs too.
    """
    sys.argv = [script, *arguments]
    path = Path(script).absolute()
    if path.suffix in ("", ".py") and path.is_file():
        _set_first_of_path(Path(script).resolve().parent)
        _run_file(path)
    else:
        runpy.run_path(script, run_name="__main__")


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Runs a module, or a package with a `__main__.py`; what it raises passes through."""
    sys.argv = [name, *arguments]
    _set_first_of_path(Path.cwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_file(path: Path) -> None:
    """Makes the file the module `__main__` and leaves it there.

    `runpy` would take it away at the end, when functions that run at exit and worker processes may
    still need it.
    """
    module = ModuleType("__main__")
    vars(module).update(
        __file__=str(path),
        __builtins__=builtins,
        __cached__=None,
        __loader__=SourceFileLoader("__main__", str(path)),
    )
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec")
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _set_first_of_path(folder: Path) -> None:
    """Puts `folder` where Python puts the script's folder; our own stood there until now."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(folder)
