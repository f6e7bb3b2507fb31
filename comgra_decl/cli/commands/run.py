"""The command `comgra-decl run`."""

from __future__ import annotations

from collections.abc import Sequence

PANEL = "Record"


def passed_on(arguments: Sequence[str]) -> None:
    """Run a training script and record it; same as `python -m comgra_decl`."""
    # Does not raise ComgraError like other commands: exceptions of the script must reach the
    # caller.
    from comgra_decl.doors.script import main

    main(arguments)
