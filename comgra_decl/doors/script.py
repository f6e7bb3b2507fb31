"""Tracing any script: `python -m comgra_decl [options] train.py ARGS`."""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from comgra_decl.doors.start import finish_session, start_session
from comgra_decl.errors import SpecError, near_paths, wrong_spec
from comgra_decl.record.context import RunContext

if TYPE_CHECKING:
    from comgra_decl.record.session import Session
    from comgra_decl.spec import Spec

_COMMANDS = Path(__file__).parents[1] / "cli" / "commands"

USAGE = """\
usage: python -m comgra_decl [--spec NAME|FILE] [KEY=VALUE ...] SCRIPT [ARGS ...]
       python -m comgra_decl [--spec NAME|FILE] [KEY=VALUE ...] -m MODULE [ARGS ...]

Runs a training script unchanged and records what happens inside its models.

  --spec NAME|FILE  a preset (attention, debug, language, light, off, vision) or a YAML file;
                    default: debug
  KEY=VALUE         an override, such as schedule.every=10 or run.root=/data/runs
  -m MODULE         run a module instead of a file, like python -m
  --version, --help

To view the results: comgra-decl view runs
"""


@dataclass
class Call:
    """A parsed command line.

    Attributes:
        spec: the preset or file.
        overrides: overrides of the spec.
        script: a file, or a module's name if `module` is set.
        arguments: the script's arguments.
    """

    spec: str = "debug"
    overrides: list[str] = field(default_factory=list)
    script: str = ""
    module: bool = False
    arguments: list[str] = field(default_factory=list)


class UsageError(Exception):
    """The command line is invalid."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script named on the command line, with tracing.

    Exceptions and the exit code of the script pass through.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
    elif arguments and arguments[0] == "--version":
        from comgra_decl import __version__

        sys.stdout.write(f"comgra-decl {__version__}\n")
    else:
        try:
            call = parse(arguments)
        except UsageError as error:
            sys.exit(_failed(f"comgra: {error}\n\n{USAGE}"))
        run(call)


def parse(arguments: Sequence[str]) -> Call:
    """Parse a command line; everything after the script is passed to the script.

    Raises:
        UsageError: an option is unknown, or the script is missing.
    """
    call = Call()
    rest = [*arguments]
    while rest:
        argument = rest.pop(0)
        option, equals, value = argument.partition("=")
        if option == "--spec":
            call.spec = value if equals else _value_of("--spec", rest)
        elif argument == "-m":
            call.module, call.script = True, _value_of("-m", rest)
        elif argument.startswith("-"):
            raise UsageError(f"unknown option {argument!r}")
        elif equals and not Path(argument).is_file():
            call.overrides.append(argument)
        else:
            call.script = argument
        if call.script:
            call.arguments = rest
            return call
    raise UsageError("missing script to run")


def require_script(call: Call) -> None:
    """Check that Python can run the script of `call`.

    Raises:
        UsageError: the script does not exist (suggests similar names), is a folder without
            `__main__.py`, or is not readable.
    """
    if call.module:
        return
    script = Path(call.script)
    if not script.exists():
        hint = near_paths(script)
        name = call.script.replace("-", "_")
        if any((_COMMANDS / f"{name}{end}.py").is_file() for end in ("", "_")):  # `import_.py`
            hint = f". To run the command of this name, type `comgra-decl {call.script}`"
        raise UsageError(f"script {call.script!r} does not exist{hint}")
    if not os.access(script, os.R_OK):
        raise UsageError(f"cannot read script {call.script!r}: Permission denied")
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise UsageError(
            f"{call.script!r} is a folder without a __main__.py; pass the file of a script"
        )


def run(call: Call, *, start: Callable[[Spec, RunContext], Session] = start_session) -> None:
    """Run the script of `call` as Python would, while the session from `start` records it."""
    from comgra_decl.doors.checked_spec import declared, require_at_first_step

    try:
        require_script(call)
    except UsageError as error:
        sys.exit(_failed(f"comgra: {error}\n\n{USAGE}"))
    try:
        spec = declared(call.spec, call.overrides, functions=False)
    except SpecError as error:
        _wrong(error)
    session = start(spec, _context(call))
    require_at_first_step(spec, end=_wrong)
    if session.path is not None and not spec.dry_run:
        sys.stderr.write(f"comgra: recording to {session.path}\n")
    try:
        _execute(call)
    except BaseException as error:
        finish_session(session, error)
        raise
    finish_session(session)


def _wrong(error: SpecError) -> NoReturn:
    """End the program because its spec is invalid."""
    sys.exit(_failed(f"{wrong_spec(error)}\n"))


def _context(call: Call) -> RunContext:
    if call.module:
        return RunContext(job=call.script.removesuffix(".__main__").rpartition(".")[2])
    return RunContext.of_script(call.script)


def _execute(call: Call) -> None:
    if call.module:
        run_module(call.script, call.arguments)
    else:
        run_script(call.script, call.arguments)


def _value_of(option: str, rest: list[str]) -> str:
    if not rest:
        raise UsageError(f"{option} needs a value")
    return rest.pop(0)


def _failed(message: str) -> int:
    """Print `message` to standard error and return the exit code for invalid usage."""
    sys.stderr.write(message)
    return 2


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a Python file, or a folder or archive with a `__main__.py`; exceptions propagate."""
    sys.argv = [script, *arguments]
    path = Path(script).absolute()
    if path.suffix in ("", ".py") and path.is_file():
        _set_first_of_path(Path(script).resolve().parent)
        _run_file(path)
    else:
        runpy.run_path(script, run_name="__main__")


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module, or a package with a `__main__.py`; exceptions propagate."""
    sys.argv = [name, *arguments]
    _set_first_of_path(Path.cwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_file(path: Path) -> None:
    """Execute a file as the module `__main__`, and leave it there.

    `runpy` would remove the module at the end, but worker processes and functions that run at exit
    may still need it.
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
    """Replace the first entry of `sys.path`, which is comgra's own, with the script's `folder`."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(folder)
