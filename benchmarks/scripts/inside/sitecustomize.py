"""Load the watcher and the stand-ins into a script's process without changing the script.

An interpreter imports a module of this name when it starts. Nothing else happens until the script
imports torch or a library whose downloads are replaced.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent


def _load(name: str) -> ModuleType:
    """Load a file of this folder under a name that no script uses."""
    full = f"_scripts_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, _HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


class _After:
    """Import hook that calls a function after a module has been imported."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._functions = functions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in stand_ins.ALIASES:
            importlib.import_module(stand_ins.ALIASES[name])
            return importlib.machinery.ModuleSpec(name, _Known())
        if name not in self._functions:
            return None
        function = self._functions.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _wrap(spec.loader, function)
        return spec


class _Known(importlib.abc.Loader):
    """Loader for a module that is already imported under another name."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[stand_ins.ALIASES[spec.name]]

    def exec_module(self, module: ModuleType) -> None:
        pass


def _wrap(loader: Any, function: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        function(module)

    loader.exec_module = exec_module


if "SCRIPTS_WATCH" in os.environ:
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    stand_ins = _load("stand_ins")
    stand_ins.close_network()
    functions = dict(stand_ins.STAND_INS)
    functions["torch"] = lambda _: _load("watching").begin()
    for name in [name for name in functions if name in sys.modules]:
        functions.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _After(functions))
