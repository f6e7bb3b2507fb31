"""Tracing through the environment, without editing code: `COMGRA=debug python train.py`.

torch calls `attach` at the end of its own import, because `attach` is an entry point in the
`torch.backends` group. Programs that do not import torch therefore never load this file, and
programs without `COMGRA` read only a single environment variable, so the interpreter starts at full
speed. This module must not import torch. It must not import any large module before it has found
`COMGRA`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "COMGRA"
"""What to record: the name of a preset or a YAML file, and overrides."""

OVERRIDES = "COMGRA_OVERRIDES"
"""Additional overrides, which take precedence over those in `COMGRA`."""

RECORDED_BY = "COMGRA_RECORDED_BY"
"""Set for child processes: the id of the process that is being recorded."""

CHECKED = "COMGRA_CHECKED"
"""Set for child processes: the declaration, which has already been validated."""

_taken = False  # whether a session has started in this process
_sessions: WeakSet[object] = WeakSet()  # the active ones
_around: str | None = None  # value of `RECORDED_BY` before they started

planned = False
"""Whether `comgra-decl plan` runs the program, which must then record nothing itself."""

_SWITCHED_OFF = ("", "0", "off", "false", "no")
_SWITCHED_ON = ("1", "on", "true", "yes")


def attach() -> None:
    """Wait for training to start, if the environment enables recording.

    Raises:
        SystemExit: the declared spec is invalid; lists every problem.
    """
    if _taken or not os.environ.get(VARIABLE):
        return
    try:
        _attach()
    except Exception as error:  # noqa: BLE001  (would break `import torch`)
        sys.stderr.write(f"comgra: nothing is recorded because of an internal error: {error!r}\n")


def taken() -> None:
    """Stop waiting, because a session is about to start, here or through another entry point."""
    global _taken
    _taken = True
    if waiting := sys.modules.get("comgra_decl.doors.first_step"):
        waiting.stand_down()


def was_taken() -> bool:
    """Return whether a session has started in this process."""
    return _taken


def is_recording() -> bool:
    """Return whether a session is active in this process."""
    return bool(_sessions)


def recorded(session: object, does: bool) -> None:
    """Set or restore `RECORDED_BY`, which tells child processes that this one is being recorded."""
    global _around
    if does and not _sessions:
        _around = os.environ.get(RECORDED_BY)
    before = len(_sessions)
    (_sessions.add if does else _sessions.discard)(session)
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
    """Return whether the spec enables recording; end the program if it is invalid."""
    from comgra_decl.doors.checked_spec import load_spec
    from comgra_decl.errors import SpecError, wrong_spec

    try:
        return load_spec(*declared).enabled
    except SpecError as error:
        raise SystemExit(f"{wrong_spec(error)}\n  (from {VARIABLE} in the environment)") from None


def declaration(environment: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Return the spec named in `environment` and its overrides; None if recording is off.

    Raises:
        SystemExit: the variables cannot be parsed.
    """
    if environment.get(VARIABLE, "").strip().lower() in _SWITCHED_OFF:
        return None
    words = [word for name in (VARIABLE, OVERRIDES) for word in _words(environment, name)]
    changes = [word for word in words if "=" in word or word.startswith("~")]
    specs = [word for word in words if word not in changes]
    if len(specs) > 1:
        raise SystemExit(
            f"comgra: {VARIABLE} names {len(specs)} specs ({', '.join(specs)}) instead of "
            f"one; for example: {VARIABLE}='debug schedule.every=10 run.root=/data/runs'"
        )
    spec = specs[0] if specs else "debug"
    return "debug" if spec.lower() in _SWITCHED_ON else spec, changes


def _words(environment: Mapping[str, str], name: str) -> list[str]:
    import shlex

    try:
        return shlex.split(environment.get(name, ""))
    except ValueError as error:
        raise SystemExit(
            f"comgra: {name}={environment[name]!r} cannot be parsed: {str(error).lower()}; it is "
            "split into words as in a shell"
        ) from None
