"""The door without edits and without another command: `COMGRA=debug python train.py`.

torch calls `attach` at the end of its own import: it is an entry point of the group
`torch.backends`. So a program that does not import torch never sees this file, one that does
without `COMGRA` reads one environment variable, and the interpreter starts as fast as ever. Must
not import torch itself, nor anything heavy before `COMGRA` has been found.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "COMGRA"
"""What to record: the name of a preset or a YAML file, and changes to it."""

OVERRIDES = "COMGRA_OVERRIDES"
"""More changes; stronger than those in `COMGRA`."""

RECORDED_BY = "COMGRA_RECORDED_BY"
"""Set for child processes: the process that records already."""

CHECKED = "COMGRA_CHECKED"
"""Set for child processes: what has been found to be a valid spec."""

_taken = False  # a session has begun in this process
_sessions: set[int] = set()  # ids of those that have not ended
_around: str | None = None  # what `RECORDED_BY` was before them

_SWITCHED_OFF = ("", "0", "off", "false", "no")
_SWITCHED_ON = ("1", "on", "true", "yes")


def attach() -> None:
    """Waits for a training if the environment asks for it.

    Raises:
        SystemExit: what the environment asks for is no valid spec; says every problem at once.
    """
    if _taken or not os.environ.get(VARIABLE):
        return
    try:
        _attach()
    except Exception as error:  # noqa: BLE001  (would break `import torch`)
        sys.stderr.write(f"comgra: nothing is recorded because of an error in it: {error!r}\n")


def taken() -> None:
    """Leaves this process to the session that is about to begin, here or through another door."""
    global _taken
    _taken = True
    if waiting := sys.modules.get("comgra_decl.doors.first_step"):
        waiting.stand_down()


def was_taken() -> bool:
    """Whether any session has begun in this process."""
    return _taken


def recorded(session: object, does: bool) -> None:
    """Lets child processes know whether this one is recorded: by a session, as long as it lasts."""
    global _around
    if does and not _sessions:
        _around = os.environ.get(RECORDED_BY)
    before = len(_sessions)
    (_sessions.add if does else _sessions.discard)(id(session))
    if _sessions:
        os.environ[RECORDED_BY] = str(os.getpid())
    elif before and _around is None:
        os.environ.pop(RECORDED_BY, None)
    elif before:
        os.environ[RECORDED_BY] = str(_around)


def _attach() -> None:
    declared = declaration(os.environ)
    if declared is None:
        return
    from comgra_decl.doors.first_step import wait_for_training

    known = repr(declared)
    if os.environ.get(CHECKED) != known and not _checks(declared):
        return
    os.environ[CHECKED] = known
    wait_for_training(*declared)


def _checks(declared: tuple[str, list[str]]) -> bool:
    """Returns whether the spec records anything; ends the program if it is wrong."""
    from comgra_decl.doors.checked_spec import load_spec
    from comgra_decl.doors.start import wrong_spec
    from comgra_decl.errors import SpecError

    try:
        return load_spec(*declared).enabled
    except SpecError as error:
        raise SystemExit(f"{wrong_spec(error)}\n  (from {VARIABLE} in the environment)") from None


def declaration(environment: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Returns the spec that `environment` names and the changes to it; None if it is off.

    Raises:
        SystemExit: the variables cannot be read.
    """
    if environment.get(VARIABLE, "").strip().lower() in _SWITCHED_OFF:
        return None
    words = [word for name in (VARIABLE, OVERRIDES) for word in _words(environment, name)]
    changes = [word for word in words if "=" in word or word.startswith("~")]
    specs = [word for word in words if word not in changes]
    if len(specs) > 1:
        raise SystemExit(
            f"comgra: {VARIABLE} names {len(specs)} specs ({', '.join(specs)}); it takes one, "
            f"and changes to it: {VARIABLE}='debug schedule.every=10 run.root=/data/runs'"
        )
    spec = specs[0] if specs else "debug"
    return "debug" if spec.lower() in _SWITCHED_ON else spec, changes


def _words(environment: Mapping[str, str], name: str) -> list[str]:
    import shlex

    try:
        return shlex.split(environment.get(name, ""))
    except ValueError as error:
        raise SystemExit(
            f"comgra: {name}={environment[name]!r} cannot be read: {str(error).lower()}; it is "
            "split into words as a shell does"
        ) from None
