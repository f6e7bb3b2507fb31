"""The command `comgra-decl run`."""

from __future__ import annotations

from collections.abc import Sequence

PANEL = "Record"


def passed_on(arguments: Sequence[str]) -> None:
    """Run a training script and record it; the same as `python -m comgra_decl`."""
    # Not a command like the others: what the script raises is the script's own business.
    from comgra_decl.doors.script import main

    main(arguments)
