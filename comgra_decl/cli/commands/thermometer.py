"""The command `comgra-decl thermometer`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from comgra_decl.errors import Exit

if TYPE_CHECKING:
    from comgra_decl.experiments.thermometer import Reading

PANEL = "Look"

USAGE = """\
usage: comgra-decl thermometer [--] SCRIPT [ARGS ...]
       comgra-decl thermometer [--] -m MODULE [ARGS ...]
       comgra-decl thermometer RUN [STEP]

Prints the mean and standard deviation of the input and output of each layer in the first step of a
training script, or in a recorded step. The script runs unchanged until its first optimizer step and
is then stopped; its output goes to standard error.

Colours: green for a std between 0.5 and 2; yellow and red for larger values; cyan and blue for
smaller ones.
"""


def passed_on(arguments: Sequence[str]) -> None:
    """Print the mean and std of every layer's input and output in one step, in colour."""
    from comgra_decl.cli.experiments import print_readings
    from comgra_decl.cli.watched_script import refuse
    from comgra_decl.doors.script import UsageError
    from comgra_decl.store.location import Remote, location

    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    try:
        recorded = any(
            isinstance(location(first), Remote) or Path(first).is_dir() for first in arguments[:1]
        )
        readings = _of_run(arguments) if recorded else _of_script(arguments)
    except UsageError as error:
        refuse("thermometer", error, USAGE)
    print_readings(readings)
    if not readings:
        sys.exit(Exit.WANTING)


def _of_run(arguments: Sequence[str]) -> list[Reading]:
    from comgra_decl.doors.script import UsageError
    from comgra_decl.experiments.thermometer import readings_of
    from comgra_decl.query import open_run

    run, *rest = arguments
    if len(rest) > 1 or not all(step.isdecimal() for step in rest):
        raise UsageError(f"expected a run and, optionally, a step, got {' '.join(arguments)!r}")
    return readings_of(open_run(run), int(rest[0]) if rest else None)


def _of_script(arguments: Sequence[str]) -> list[Reading]:
    from comgra_decl.cli.watched_script import Enough, called, run_watched
    from comgra_decl.experiments.thermometer import reading

    readings: list[Reading] = []
    run_watched(called(arguments), reading(readings, Enough))
    return readings
