"""The door for any script: `python -m comgra_decl [options] train.py ARGS`."""

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

from comgra_decl.doors.start import finish_session, start_session, wrong_spec
from comgra_decl.errors import SpecError, near_paths
from comgra_decl.record.context import RunContext

if TYPE_CHECKING:
    from comgra_decl.record.session import Session
    from comgra_decl.spec import Spec

USAGE = """\
usage: python -m comgra_decl [--spec NAME|FILE] [KEY=VALUE ...] SCRIPT [ARGS ...]
       python -m comgra_decl [--spec NAME|FILE] [KEY=VALUE ...] -m MODULE [ARGS ...]

Runs a training script unchanged and records what happens inside its networks.

  --spec NAME|FILE  a preset (attention, debug, light, off) or a YAML file; default: debug
  KEY=VALUE         a change to it, such as schedule.every=10 or run.root=/data/runs
  -m MODULE         run a module instead of a file, as python -m does
  --version, --help

To look at what was recorded: comgra-decl view runs
"""


@dataclass
class Call:
    """What a command line asks for.

    Attributes:
        spec: the preset or file.
        overrides: changes to it.
        script: a file, or a module's name if `module` is set.
        arguments: what the script is given.
    """

    spec: str = "debug"
    overrides: list[str] = field(default_factory=list)
    script: str = ""
    module: bool = False
    arguments: list[str] = field(default_factory=list)


class UsageError(Exception):
    """The command line makes no sense."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script that the command line names, traced.

    The script's exceptions and exit code are the program's own.
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
    """Returns what `arguments` ask for; everything behind the script is the script's.

    Raises:
        UsageError: an option is unknown, or there is no script.
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
            raise UsageError(f"there is no option {argument!r}")
        elif equals and not Path(argument).is_file():
            call.overrides.append(argument)
        else:
            call.script = argument
        if call.script:
            call.arguments = rest
            return call
    raise UsageError("there is no script to run")


def require_script(call: Call) -> None:
    """Says what is wrong with the path of a script that Python could not run.

    Raises:
        UsageError: it is missing (names near ones), a folder that is no program, or closed.
    """
    if call.module:
        return
    script = Path(call.script)
    if not script.exists():
        raise UsageError(f"there is no script {call.script!r}{near_paths(script)}")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the script {call.script!r} cannot be read: Permission denied")
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise UsageError(
            f"{call.script!r} is a folder without a __main__.py; pass the file of a script"
        )


def run(call: Call, *, start: Callable[[Spec, RunContext], Session] = start_session) -> None:
    """Runs the script of `call` as Python would, and records it in the session of `start`."""
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
    finally:
        finish_session(session)


def _wrong(error: SpecError) -> NoReturn:
    """Ends the program because of its spec."""
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
    """Says `message` and returns the exit code of a call that makes no sense."""
    sys.stderr.write(message)
    return 2


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
