"""The command `comgra-decl batch-mixing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

PANEL = "Look"

USAGE = """\
usage: comgra-decl batch-mixing [--json] [--for RUN] [--batch-dim N] [--] SCRIPT [ARGS ...]
       comgra-decl batch-mixing [--json] [--for RUN] [--batch-dim N] [--] -m MODULE [ARGS ...]

Runs a training script up to its first optimizer step and checks that its models keep the samples in
a batch independent. A wrong view or transpose, or a softmax or mean over the wrong dimension, mixes
the samples. Each model is called a few more times, with all samples but one replaced by copies of
the remaining one; the output for that sample must not change. BatchNorm in training mode, which
mixes samples by design, is reported separately. Nothing is recorded. The script can write files as
usual; its output goes to standard error.

  --for RUN       store the verdict with this run of the script; `comgra-decl diagnose` shows it
  --batch-dim N   the batch dimension of inputs and outputs; default: 0
  --json          print JSON

Exit codes: 0 samples are independent, except through BatchNorm; 3 samples are mixed; 4
inconclusive, with the reason; 2 invalid command line; otherwise the script's own.
"""


def passed_on(arguments: Sequence[str]) -> None:
    """Check that the models of a script keep the samples in a batch independent."""
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
