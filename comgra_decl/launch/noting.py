"""Notes what an experiment with a script has shown beside a run of that script."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from comgra_decl.launch.exits import Exit
from comgra_decl.launch.script import UsageError

if TYPE_CHECKING:
    from comgra_decl.query import Run

Meaning = Literal["good", "bad", "unclear"]
"""What the verdict of an experiment says of the script."""

CODES: dict[Meaning, Exit] = {"good": Exit.DONE, "bad": Exit.WANTING, "unclear": Exit.UNCLEAR}
"""With which code the command ends."""


def run_named(options: dict[str, str]) -> Run | None:
    """Returns the run that `--for` names, before anything is run; None without that option.

    Raises:
        UsageError: there is no such run.
    """
    from comgra_decl.errors import ComgraError
    from comgra_decl.query import open_run

    if "--for" not in options:
        return None
    try:
        return open_run(options["--for"])
    except ComgraError as error:
        raise UsageError(f"--for: {error}") from None


def note_verdict(
    run: Run | None,
    name: str,
    outcome: Meaning,
    *,
    reason: str,
    arguments: Sequence[str],
) -> None:
    """Notes a verdict beside a run, where one is named, and says so.

    Args:
        run: of the script; None: nothing is noted.
        name: of the experiment, as the checklist knows it.
        outcome: what it means for the checklist.
        reason: in a sentence.
        arguments: the command line behind the command's name.
    """
    from comgra_decl.store.checks import NotedCheck, note_check

    if run is None:
        return
    command = shlex.join(["comgra-decl", name.replace("_", "-"), *arguments])
    note_check(run.path, NotedCheck(name, outcome, reason, command, time.time()))
    sys.stderr.write(f"noted beside {run.path}: comgra-decl diagnose {run.path}\n")
