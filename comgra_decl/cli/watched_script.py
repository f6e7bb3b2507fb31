"""Run a script without recording, observe its first steps, then end the script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, redirect_stdout

from comgra_decl.doors.script import Call, UsageError, parse, require_script, run_module, run_script
from comgra_decl.errors import Exit


class Enough(SystemExit):
    """Ends a program once enough of its steps have been observed."""


def called(arguments: Sequence[str]) -> Call:
    """Return the script on the command line, which may follow `--`.

    Raises:
        UsageError: the script is missing, or Python cannot run it.
    """
    rest = [*arguments]
    if rest[:1] == ["--"]:
        rest = rest[1:]
    call = parse(rest)
    require_script(call)
    return call


def run_watched(call: Call, watching: AbstractContextManager[None]) -> None:
    """Run the script inside `watching`, with its standard output redirected to standard error.

    Exceptions propagate, except for `Enough` and an exit without an error.
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
    """Print a problem with the command line and the usage; exit with code 2."""
    sys.stderr.write(f"comgra-decl {command}: {problem}\n\n{usage}")
    sys.exit(Exit.WRONG)


def options_of(rest: list[str], *, flags: Sequence[str], values: Sequence[str]) -> dict[str, str]:
    """Remove comgra's options, in any order, from the front of `rest`, leaving those of the script.

    Args:
        rest: the command line.
        flags: options without a value, such as "--json"; the result maps them to "".
        values: options with a value, written as `--steps 10` or `--steps=10`.

    Raises:
        UsageError: an option lacks its value, or a flag has one.
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
            raise UsageError(f"{name} {'needs a' if name in values else 'takes no'} value")
        found[name] = text
    return found


def number_of(option: str, options: dict[str, str], default: int, least: int = 1) -> int:
    """Return the value of an option as an integer.

    Raises:
        UsageError: the value is not an integer, or is less than `least`.
    """
    text = options.get(option, str(default))
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{option} must be an integer of at least {least}, got {text!r}")
    return int(text)
