"""The command `comgra-decl overfit-one-batch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

PANEL = "Look"

STEPS = 300

USAGE = f"""\
usage: comgra-decl overfit-one-batch [--json] [--for RUN] [--steps N] [--] SCRIPT [ARGS ...]
       comgra-decl overfit-one-batch [--json] [--for RUN] [--steps N] [--] -m MODULE [ARGS ...]

Runs a training script, unchanged, on a single batch and reports whether its model can fit that
batch. If it cannot, there is a bug in the code, the loss or the optimizer.

Each DataLoader yields its first batch repeatedly; random data from the global generators is
identical in each step. Nothing is recorded. The script can write files as usual; its output goes to
standard error.

  --for RUN   store the verdict with this run of the script; `comgra-decl diagnose` shows it
  --steps N   number of optimizer steps; default: {STEPS}
  --json      print JSON

Exit codes: 0 the model can fit the batch (the loss fell to a tenth or less); 3 it cannot; 4
inconclusive, with the reason; 2 invalid command line; otherwise the script's own.
"""


def passed_on(arguments: Sequence[str]) -> None:
    """Train on a single batch and report whether the model can fit it."""
    from comgra_decl.cli.experiments import Meaning, NumberOption, experiment

    steps = NumberOption("--steps", default=STEPS)
    asked = experiment("overfit-one-batch", arguments, usage=USAGE, option=steps)
    if asked is None:
        return
    from comgra_decl.cli.experiments import print_verdict
    from comgra_decl.cli.watched_script import Enough, run_watched
    from comgra_decl.experiments.overfit_one_batch import Seen, held, verdict

    seen = Seen()
    run_watched(asked.call, held(seen, asked.number, Enough))
    found = verdict(seen)
    means: dict[str, Meaning] = {"can": "good", "cannot": "bad", "unclear": "unclear"}
    asked.conclude(
        means[found.outcome],
        found.reason,
        content=asdict(found),
        show=lambda: print_verdict(found, seen.losses),
    )
