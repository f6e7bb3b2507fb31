"""The command `comgra-decl run`."""

from __future__ import annotations

from collections.abc import Sequence

PANEL = "Record"


def passed_on(arguments: Sequence[str]) -> None:
    """Run and record a training script, like `python -m comgra_decl`."""
    # Unlike other commands, this does not raise ComgraError, because the script's exceptions must
    # reach the caller.
    from comgra_decl.doors.script import main

    main(arguments)
