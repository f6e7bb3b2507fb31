"""Options, verdicts and exit codes of the commands that run an experiment on a script."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from rich.table import Table
from rich.text import Text

from comgra_decl.cli.printing import shortened
from comgra_decl.cli.watched_script import called, number_of, options_of, refuse
from comgra_decl.doors.script import Call, UsageError
from comgra_decl.errors import Exit
from comgra_decl.terminal import console

if TYPE_CHECKING:
    from comgra_decl.experiments.batch_mixing import Mixing
    from comgra_decl.experiments.overfit_one_batch import Verdict
    from comgra_decl.experiments.thermometer import Reading
    from comgra_decl.query import Run


class NumberOption(NamedTuple):
    """The integer option that an experiment accepts in addition to `--json` and `--for`."""

    name: str
    default: int
    least: int = 1


@dataclass(frozen=True)
class Experiment:
    """An experiment on a script, as requested on the command line.

    Attributes:
        command: name of the command.
        arguments: everything after the command's name.
        number: value of the integer option.
        call: the script and its arguments.
        run: the run that receives the verdict; None to store nothing.
        as_json: whether the verdict is printed as JSON.
    """

    command: str
    arguments: tuple[str, ...]
    number: int
    call: Call
    run: Run | None
    as_json: bool

    def conclude(
        self, meaning: Meaning, reason: str, *, content: dict[str, Any], show: Callable[[], None]
    ) -> NoReturn:
        """Print the verdict, store it with the run, and exit with its exit code.

        Args:
            meaning: outcome of the experiment.
            reason: the reason, as a sentence.
            content: the verdict as JSON data.
            show: prints the verdict as text.
        """
        if self.as_json:
            sys.stdout.write(json.dumps(shortened(content), indent=2) + "\n")
        else:
            show()
        name = self.command.replace("-", "_")
        note_verdict(self.run, name, meaning, reason=reason, arguments=self.arguments)
        sys.exit(CODES[meaning])


def experiment(
    command: str, arguments: Sequence[str], *, usage: str, option: NumberOption
) -> Experiment | None:
    """Return the experiment requested on the command line; None after printing the help.

    Exits if the command line is invalid.
    """
    rest = [*arguments]
    if rest and rest[0] in ("-h", "--help"):
        sys.stdout.write(usage)
        return None
    try:
        options = options_of(rest, flags=("--json",), values=("--for", option.name))
        number = number_of(option.name, options, option.default, option.least)
        run, call = run_named(options), called(rest)
    except UsageError as error:
        refuse(command, error, usage)
    return Experiment(command, tuple(arguments), number, call, run, "--json" in options)


Meaning = Literal["good", "bad", "unclear"]
"""Outcome of an experiment."""

CODES: dict[Meaning, Exit] = {"good": Exit.DONE, "bad": Exit.WANTING, "unclear": Exit.UNCLEAR}
"""Exit code for each outcome."""


def run_named(options: dict[str, str]) -> Run | None:
    """Return the run given with `--for`; None without that option.

    Called before the script runs, so that a wrong name is reported early.

    Raises:
        UsageError: the run does not exist.
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
    """Store a verdict with the run, if one was given, and print where it is stored.

    Args:
        run: a run of the script; None to store nothing.
        name: the experiment's name in the checklist.
        outcome: its outcome, which sets the colour in the checklist.
        reason: the reason, as a sentence.
        arguments: everything after the command's name.
    """
    from comgra_decl.store.checks import NotedCheck, note_check

    if run is None:
        return
    command = shlex.join(["comgra-decl", name.replace("_", "-"), *arguments])
    note_check(run.path, NotedCheck(name, outcome, reason, command, time.time()))
    sys.stderr.write(f"verdict stored in {run.path}; to view it: comgra-decl diagnose {run.path}\n")


_WORDS = {
    "can": ("The model can fit one batch", "bold green"),
    "cannot": ("The model cannot fit one batch", "bold red"),
    "unclear": ("Inconclusive", "bold yellow"),
}
_MIXING = {
    "apart": ("Samples are independent", "bold green"),
    "norm": ("Samples are independent, except through BatchNorm", "bold green"),
    "mixed": ("Samples are mixed", "bold red"),
    "unclear": ("Inconclusive", "bold yellow"),
}
_BANDS = ((0.1, "blue"), (0.5, "cyan"), (2.0, "green"), (10.0, "yellow"), (math.inf, "red"))
"""Upper limits of the std for each colour; TheDeepChecker considers 0.5 to 2 healthy."""


def print_verdict(verdict: Verdict, losses: Sequence[float]) -> None:
    """Print the verdict and the loss at up to six steps."""
    words, style = _WORDS[verdict.outcome]
    out = console()
    out.print(Text.assemble((f"{words}: ", style), verdict.reason, "."))
    if not losses:
        return
    at = sorted({round(i * (len(losses) - 1) / 5) for i in range(6)})
    line = ", ".join(f"{losses[i]:.4g} (step {i})" for i in at)
    out.print(Text(f"loss on the batch: {line}", style="dim"))
    if verdict.outcome == "cannot":
        out.print(
            "What to do: check the learning rate, whether the loss uses the right targets, and "
            "whether gradients reach every parameter. For details, record a run and use "
            "comgra-decl diagnose."
        )


def print_mixing(worst: Mixing, found: Sequence[Mixing]) -> None:
    """Print the verdict on a script, and on each of its models if there are several."""
    out = console()
    words, style = _MIXING[worst.outcome]
    out.print(Text.assemble((f"{words}: ", style), worst.reason, "."))
    for mixing in found if len(found) > 1 else ():
        out.print(Text(f"{mixing.model}: {mixing.reason}", style="dim"))
    if worst.outcome == "mixed":
        out.print(
            "What to do: look for a view, reshape or transpose that moves the batch dimension, or "
            "for a softmax, mean or norm over it. If the first dimension is time, use --batch-dim "
            "1. If samples are meant to interact, as in contrastive losses or graphs, this is not "
            "a bug."
        )


def print_readings(readings: Sequence[Reading]) -> None:
    """Print a table with one row per layer call."""
    if not readings:
        console().print("No layer was called before the first optimizer step.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("layer", "class", "in mean", "in std", "out mean", "out std", "shape"):
        right = name.startswith(("in ", "out "))
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    for r in readings:
        shape = "\u00d7".join(str(n) for n in r.shape)
        table.add_row(
            r.node, r.module_class, _number(r.in_mean), _spread(r.in_std), _number(r.out_mean),
            _spread(r.out_std), shape,
        )  # fmt: skip
    console().print(table)


def _number(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.3g}"


def _spread(value: float | None) -> Text:
    if value is None or not math.isfinite(value):
        return Text(_number(value), style="" if value is None else "bold red")
    return Text(_number(value), style=next(colour for limit, colour in _BANDS if value <= limit))
