"""The command `comgra-decl overfit-one-batch`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

PANEL = "Look"

STEPS = 300

USAGE = f"""\
usage: comgra-decl overfit-one-batch [--json] [--for RUN] [--steps N] [--] SCRIPT [ARGS ...]
       comgra-decl overfit-one-batch [--json] [--for RUN] [--steps N] [--] -m MODULE [ARGS ...]

Runs a training script unchanged, but on one and the same batch, and says whether its network can
learn that by heart. One that cannot has a bug: in the code, the loss, or the optimizer.

Each DataLoader gives its first batch again and again; data that are drawn from the global random
generators are drawn again. What the script prints goes to the standard error output; what it
writes it writes. Nothing is recorded.

  --for RUN   note the verdict beside a run of this script; `comgra-decl diagnose` shows it
  --steps N   optimizer steps; default: {STEPS}
  --json      print JSON for other programs

Exit codes: 0 it can (a tenth of the first loss is left, or less); 3 it cannot; 4 not conclusive,
with the reason; 2 the command line is wrong; otherwise the script's own.
"""


def passed_on(arguments: Sequence[str]) -> None:
    """Train on one batch alone and say whether the network can learn it by heart."""
    from comgra_decl.launch.noting import CODES, Meaning, note_verdict, run_named
    from comgra_decl.launch.one_batch import Seen, held, verdict
    from comgra_decl.launch.script import UsageError
    from comgra_decl.launch.watched import (
        Enough,
        called,
        number_of,
        options_of,
        refuse,
        run_watched,
    )

    rest = [*arguments]
    if not rest or rest[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    try:
        options = options_of(rest, flags=("--json",), values=("--for", "--steps"))
        steps, run, call = number_of("--steps", options, STEPS), run_named(options), called(rest)
    except UsageError as error:
        refuse("overfit-one-batch", error, USAGE)
    seen = Seen()
    run_watched(call, held(seen, steps, Enough))
    found = verdict(seen)
    if "--json" in options:
        sys.stdout.write(json.dumps(dataclasses.asdict(found), indent=2) + "\n")
    else:
        from comgra_decl.launch.watched_tables import print_verdict

        print_verdict(found, seen.losses)
    means: dict[str, Meaning] = {"can": "good", "cannot": "bad", "unclear": "unclear"}
    outcome = means[found.outcome]
    note_verdict(run, "overfit_one_batch", outcome, reason=found.reason, arguments=arguments)
    sys.exit(CODES[outcome])
