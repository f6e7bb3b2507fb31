"""Runs a script that is to be looked at, not recorded: it ends where enough has been seen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, redirect_stdout

from comgra_decl.doors.script import Call, UsageError, parse, require_script, run_module, run_script
from comgra_decl.errors import Exit


class Enough(SystemExit):
    """Ends a program whose steps have been seen."""


def called(arguments: Sequence[str]) -> Call:
    """Returns the script that follows the options, after `--` or without it.

    Raises:
        UsageError: there is none, or none that Python could run.
    """
    rest = [*arguments]
    if rest[:1] == ["--"]:
        rest = rest[1:]
    call = parse(rest)
    require_script(call)
    return call


def run_watched(call: Call, watching: AbstractContextManager[None]) -> None:
    """Runs the script inside `watching`; what it prints goes to the standard error output.

    What it raises passes through, but for `Enough` and an end without an error.
    """
    with redirect_stdout(sys.stderr), watching:
        try:
            if call.module:
                run_module(call.script, call.arguments)
            else:
                run_script(call.script, call.arguments)
        except Enough:
            pass
        except SystemExit as error:
            if error.code not in (None, 0):
                raise


def refuse(command: str, problem: object, usage: str) -> None:
    """Says why a command line makes no sense, and ends."""
    sys.stderr.write(f"comgra-decl {command}: {problem}\n\n{usage}")
    sys.exit(Exit.WRONG)


def options_of(rest: list[str], *, flags: Sequence[str], values: Sequence[str]) -> dict[str, str]:
    """Takes our options from the front of `rest`, in any order; what follows is the script's.

    Args:
        rest: the command line.
        flags: options without a value, such as "--json"; each that is there has the value "".
        values: options with one, as `--steps 10` or `--steps=10`.

    Raises:
        UsageError: a value is missing.
    """
    found: dict[str, str] = {}
    while rest:
        name, equals, text = rest[0].partition("=")
        if name not in flags and name not in values:
            break
        del rest[0]
        if name in values and not equals:
            text = rest.pop(0) if rest else ""
        if (name in values) != bool(text):
            raise UsageError(f"{name} needs a value" if name in values else f"{name} takes none")
        found[name] = text
    return found


def number_of(option: str, options: dict[str, str], default: int, least: int = 1) -> int:
    """Returns the value of an option as a whole number.

    Raises:
        UsageError: it is none, or smaller than `least`.
    """
    text = options.get(option, str(default))
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{option} needs a whole number from {least} on, not {text!r}")
    return int(text)
