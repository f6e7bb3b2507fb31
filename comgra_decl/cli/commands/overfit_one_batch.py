"""The command `comgra-decl overfit-one-batch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

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
