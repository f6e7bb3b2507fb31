"""The command `comgra-decl batch-mixing`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

PANEL = "Look"

USAGE = """\
usage: comgra-decl batch-mixing [--json] [--for RUN] [--batch-dim N] [--] SCRIPT [ARGS ...]
       comgra-decl batch-mixing [--json] [--for RUN] [--batch-dim N] [--] -m MODULE [ARGS ...]

Runs a training script up to its first optimizer step and asks its networks whether the samples of
a batch know of each other, which they should not: a wrong view or transpose, a softmax or a mean
over the wrong dimension makes them. Each network is called a few times more, with copies of one
sample in place of all others; its answer to that sample must stay what it was. BatchNorm in
training mode, which mixes on purpose, is told apart. What the script prints goes to the standard
error output; what it writes it writes. Nothing is recorded.

  --for RUN       note the verdict beside a run of this script; `comgra-decl diagnose` shows it
  --batch-dim N   the dimension of the samples, of inputs and answers; default: 0
  --json          print JSON for other programs

Exit codes: 0 samples are kept apart, but for BatchNorm; 3 they are mixed; 4 not conclusive, with
the reason; 2 the command line is wrong; otherwise the script's own.
"""


def passed_on(arguments: Sequence[str]) -> None:
    """Ask the networks of a script whether the samples of a batch know of each other."""
    from comgra_decl.launch.noting import CODES, Meaning, note_verdict, run_named
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
        options = options_of(rest, flags=("--json",), values=("--for", "--batch-dim"))
        dim, run, call = number_of("--batch-dim", options, 0, 0), run_named(options), called(rest)
    except UsageError as error:
        refuse("batch-mixing", error, USAGE)
    from comgra_decl.launch.mixing import Mixing, asking, worst_of

    found: list[Mixing] = []
    run_watched(call, asking(found, Enough, dim=dim))
    worst = worst_of(found)
    if "--json" in options:
        content = dataclasses.asdict(worst) | {"networks": [dataclasses.asdict(m) for m in found]}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        from comgra_decl.launch.watched_tables import print_mixing

        print_mixing(worst, found)
    means: dict[str, Meaning] = {"apart": "good", "norm": "good", "mixed": "bad"}
    outcome = means.get(worst.outcome, "unclear")
    note_verdict(run, "batch_mixing", outcome, reason=worst.reason, arguments=arguments)
    sys.exit(CODES[outcome])
