"""The command `comgra-decl plan`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, TextIO

from comgra_decl.doors import environment
from comgra_decl.doors.script import Call, UsageError, parse, run
from comgra_decl.errors import needed

if TYPE_CHECKING:
    from comgra_decl.experiments.plan import Plan
    from comgra_decl.record.context import RunContext
    from comgra_decl.record.session import Session
    from comgra_decl.spec import Spec

PANEL = "Record"

USAGE = """\
usage: comgra-decl plan [--json] [--spec NAME|FILE] [KEY=VALUE ...] SCRIPT [ARGS ...]
       comgra-decl plan [--json] [--spec NAME|FILE] [KEY=VALUE ...] -m MODULE [ARGS ...]

Runs a training script for at most seven steps, prints what the spec would record and what that
would cost on this machine, and ends the script. No run is stored. The script can write files as
usual; its output goes to standard error.

  --json            print JSON of at most 20 kB; "left_out" tells what is missing
  --spec NAME|FILE  a preset or a YAML file; default: debug
  KEY=VALUE         an override, such as schedule.every=10
  -m MODULE         run a module instead of a file, like `python -m`

Where the program itself declares what to record, that is ignored. To plan it, set dry_run: true in
its spec. In a Hydra application: python train.py +comgra=debug +comgra.dry_run=true

Exit codes: 0 every pattern matched; 3 a pattern matched nothing, or nothing was recorded; 2 invalid
spec or command line; otherwise the script's own.
"""


def passed_on(arguments: Sequence[str]) -> None:
    """Show what a spec would record for a script, and at what cost."""
    rest = [*arguments]
    if rest and rest[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    needed("pandas", "read")  # before the script runs
    as_json = _taken(rest, "--json")
    try:
        call = parse(rest)
    except UsageError as error:
        sys.stderr.write(f"comgra-decl: {error}\n\n{USAGE}")
        sys.exit(2)
    _plan(call, as_json=as_json)


def _taken(rest: list[str], option: str) -> bool:
    """Remove `option` if it is the first argument; return whether it was."""
    found = rest[:1] == [option]
    if found:
        del rest[0]
    return found


def _plan(call: Call, *, as_json: bool) -> None:
    """Perform the dry run; only the plan goes to standard output, not the script's output."""
    from comgra_decl.experiments.dry_run import Rehearsal

    out, made = sys.stdout, []

    def start(spec: Spec, context: RunContext) -> Session:
        session = Rehearsal(
            spec, context=context, show=lambda plan: _show(plan, out, as_json=as_json)
        )
        made.append(session)
        session.start()
        return session

    call.overrides.append("dry_run=true")
    environment.planned = True
    try:
        with redirect_stdout(sys.stderr):
            run(call, start=start)
    finally:
        environment.planned = False
    sys.exit(made[0].exit_code)


def _show(plan: Plan, out: TextIO, *, as_json: bool) -> None:
    if as_json:
        from comgra_decl.cli.printing import shortened

        content = shortened(dataclasses.asdict(plan))
        out.write(json.dumps(content, indent=2, allow_nan=False) + "\n")
    else:
        from comgra_decl.experiments.plan import print_plan

        with redirect_stdout(out):
            print_plan(plan)
    out.flush()
