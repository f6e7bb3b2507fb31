"""The command `comgra-decl plan`."""

from __future__ import annotations

from collections.abc import Sequence

PANEL = "Record"


def passed_on(arguments: Sequence[str]) -> None:
    """Say what a spec would catch of a script, and what it would cost, without training."""
    from comgra_decl.launch.rehearse import main

    main(arguments)
