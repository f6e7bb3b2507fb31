"""The command `comgra-decl look`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from comgra_decl.cli.targets import fault_of_folder
from comgra_decl.cli.watched_script import options_of, refuse
from comgra_decl.doors.script import Call, UsageError, parse, require_script, run
from comgra_decl.errors import CallError, Exit

if TYPE_CHECKING:
    from comgra_decl.doors.repetition import Repetition
    from comgra_decl.query.checkpoints import Checkpoint
    from comgra_decl.record.context import RunContext
    from comgra_decl.record.session import Session
    from comgra_decl.spec import Spec

PANEL = "Look"

USAGE = """\
usage: comgra-decl look [--step N] [--model NODE] [--to FOLDER]
                        RUN [--spec NAME|FILE] [KEY=VALUE ...] SCRIPT [ARGS ...]
       comgra-decl look [...] RUN [--spec NAME|FILE] [KEY=VALUE ...] -m MODULE [ARGS ...]

Records a step again, with the weights of a checkpoint in RUN: what the spec did not record at the
time, or pictures that it did not declare. The script runs until its model is first called, receives
the weights, and ends after its first training step; its output goes to standard error. The record
is stored as a run of its own, whose path is printed.

  --step N          a step with a checkpoint; default: the last one
  --model NODE      the model, if the step has checkpoints of several
  --to FOLDER       where to store the new run; default: RUN-step-N
  --spec NAME|FILE  what to record: a preset or a YAML file; default: debug
  KEY=VALUE         an override, such as probes.eyes={} 'pictures.s={method: saliency, of: eyes}'
  -m MODULE         run a module instead of a file, like `python -m`

Exit codes: 0 the step was recorded; 3 the script ended without a training step of this model;
2 invalid command line, spec, run or weights; otherwise the script's own.
"""


def passed_on(arguments: Sequence[str]) -> None:
    """Record a step again, with the weights of a checkpoint, to see what was not recorded."""
    rest = [*arguments]
    if rest and rest[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    try:
        options = options_of(rest, flags=(), values=("--step", "--model", "--to"))
        if not rest:
            raise UsageError("missing run")
        run_path = rest.pop(0)
        call = parse(rest)
        require_script(call)
        step = options.get("--step")
        if step is not None and not step.isdecimal():
            raise UsageError(f"--step must be the number of a step, got {step!r}")
    except UsageError as error:
        refuse("look", error, USAGE)
    _look(_checkpoint(run_path, step, options.get("--model")), call, to=options.get("--to"))


def _checkpoint(path: str, step: str | None, model: str | None) -> tuple[Checkpoint, str]:
    """Return the checkpoint, and where the new run is stored by default."""
    from comgra_decl.query import open_run

    found = open_run(path)
    steps = found.checkpoints
    at = int(step) if step is not None else int(steps[-1]) if len(steps) else 0
    return found.checkpoint(at, model=model), f"{found.path}-step-{at}"


def _look(chosen: tuple[Checkpoint, str], call: Call, *, to: str | None) -> None:
    from comgra_decl.doors.repetition import Repetition, Stopped

    checkpoint, beside = chosen
    target = to or beside
    if "://" not in target and Path(target).exists():
        raise CallError(f"{target!r} already exists; pass another folder with --to")
    if "://" not in target and (fault := fault_of_folder(Path(target))) is not None:
        raise CallError(f"{target!r} cannot be created: {fault}")
    made: list[Repetition] = []

    def start(spec: Spec, context: RunContext) -> Session:
        session = Repetition(spec, context=context, checkpoint=checkpoint)
        made.append(session)
        session.start()
        return session

    call.overrides.append("dry_run=true")  # nothing is stored where the spec says
    try:
        with redirect_stdout(sys.stderr):
            run(call, start=start)
    except Stopped:
        pass
    except BaseException:
        for session in made:
            session.discard()
        raise
    (session,) = made
    ended = session.incomplete
    if ended is not None:
        session.discard()
        sys.stderr.write(f"comgra-decl look: {ended}\n")
        sys.exit(Exit.WANTING)
    sys.stdout.write(f"{session.save(target)}\n")
