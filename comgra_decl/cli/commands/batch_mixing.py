"""The command `comgra-decl batch-mixing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

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
    from comgra_decl.cli.experiments import Meaning, NumberOption, experiment

    dimension = NumberOption("--batch-dim", default=0, least=0)
    asked = experiment("batch-mixing", arguments, usage=USAGE, option=dimension)
    if asked is None:
        return
    from comgra_decl.cli.experiments import print_mixing
    from comgra_decl.cli.watched_script import Enough, run_watched
    from comgra_decl.experiments.batch_mixing import Mixing, asking, worst_of

    found: list[Mixing] = []
    run_watched(asked.call, asking(found, Enough, dim=asked.number))
    worst = worst_of(found)
    means: dict[str, Meaning] = {"apart": "good", "norm": "good", "mixed": "bad"}
    asked.conclude(
        means.get(worst.outcome, "unclear"),
        worst.reason,
        content=asdict(worst) | {"networks": [asdict(mixing) for mixing in found]},
        show=lambda: print_mixing(worst, found),
    )
