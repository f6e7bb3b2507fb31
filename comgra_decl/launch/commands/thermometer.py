"""The command `comgra-decl thermometer`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from comgra_decl.launch.exits import Exit

PANEL = "Look"

USAGE = """\
usage: comgra-decl thermometer [--] SCRIPT [ARGS ...]
       comgra-decl thermometer [--] -m MODULE [ARGS ...]
       comgra-decl thermometer RUN [STEP]

Prints mean and standard deviation of what goes into each layer and comes out of it, in the first
step of a training script, or in a recorded step. The script runs unchanged until its first
optimizer step and is ended there; what it prints goes to the standard error output.

Colours: green, the spread is between 0.5 and 2; yellow and red, larger; cyan and blue, smaller.
"""


def passed_on(arguments: Sequence[str]) -> None:
    """Print mean and spread into and out of every layer in one step, in colours."""
    from comgra_decl.launch.script import UsageError
    from comgra_decl.launch.thermometer import Reading, reading, readings_of
    from comgra_decl.launch.watched import Enough, called, refuse, run_watched
    from comgra_decl.launch.watched_tables import print_readings

    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    if Path(arguments[0]).is_dir() and len(arguments) <= 2:
        from comgra_decl.query import open_run

        step = int(arguments[1]) if arguments[1:] and arguments[1].isdecimal() else None
        print_readings(readings_of(open_run(arguments[0]), step))
        return
    try:
        call = called(arguments)
    except UsageError as error:
        refuse("thermometer", error, USAGE)
    readings: list[Reading] = []
    run_watched(call, reading(readings, Enough))
    print_readings(readings)
    if not readings:
        sys.exit(Exit.WANTING)
