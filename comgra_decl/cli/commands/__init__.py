"""The commands of `comgra-decl`, one per file of this package.

A file `name.py` defines the command `comgra-decl name` (`_` becomes `-`) and contains either

    def command(...) -> None: ... A Typer command: its annotations define the arguments, and its
        docstring is the help. It imports heavy modules only when called. It raises a `ComgraError`
        if the request cannot be carried out. If the result is negative, it raises `typer.Exit` with
        a code from `comgra_decl.errors`.

    def passed_on(arguments: Sequence[str]) -> None: ...
        Receives everything after the command's name, unparsed. Its docstring is the help.

and, optionally, `PANEL`: the heading under which the help lists the command.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

import typer

PassedOn = Callable[[Sequence[str]], None]
"""A command that parses its own command line."""


def register(app: typer.Typer) -> dict[str, PassedOn]:
    """Add every command to `app`; return those that parse their own command line, by name."""
    passed_on: dict[str, PassedOn] = {}
    for found in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{found.name}")
        name = found.name.strip("_").replace("_", "-")
        if hasattr(module, "passed_on"):
            passed_on[name] = module.passed_on
            _add_placeholder(app, name, module)
        else:
            app.command(name, rich_help_panel=_panel(module))(module.command)
    return passed_on


def _add_placeholder(app: typer.Typer, name: str, module: ModuleType) -> None:
    """Add a command to the help; `app` itself never runs it."""

    def command() -> None:
        raise AssertionError(f"{name} must be handled before the command line is parsed")

    command.__doc__ = module.passed_on.__doc__
    app.command(name, rich_help_panel=_panel(module), add_help_option=False)(command)


def _panel(module: ModuleType) -> str | None:
    panel: str | None = getattr(module, "PANEL", None)
    return panel
