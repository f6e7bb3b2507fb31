"""The commands of `comgra-decl`: one file each, found by being here.

A file `name.py` is the command `comgra-decl name` (`_` becomes `-`) and holds one of

    def command(...) -> None: ...
        A Typer command: its annotations are the arguments, its docstring is the help. Imports what
        is heavy when it runs, raises a `ComgraError` for what cannot be done, `typer.Exit` with a
        code of `comgra_decl.errors` for what was done and found wanting.

    def passed_on(arguments: Sequence[str]) -> None: ...
        Takes all that follows the command's name, unparsed. Its docstring is the help.

and may hold `PANEL`, the heading below which the help lists it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

import typer

PassedOn = Callable[[Sequence[str]], None]
"""A command that reads its own command line."""


def register(app: typer.Typer) -> dict[str, PassedOn]:
    """Adds every command to `app`; returns those that read their own command line, by name."""
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
    """Lets the help list a command that `app` never gets to see."""

    def command() -> None:
        raise AssertionError(f"{name} is passed on before the command line is parsed")

    command.__doc__ = module.passed_on.__doc__
    app.command(name, rich_help_panel=_panel(module), add_help_option=False)(command)


def _panel(module: ModuleType) -> str | None:
    panel: str | None = getattr(module, "PANEL", None)
    return panel
