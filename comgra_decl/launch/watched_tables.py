"""What `overfit-one-batch`, `batch-mixing` and `thermometer` print for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from comgra_decl.launch.tables import console

if TYPE_CHECKING:
    from comgra_decl.launch.mixing import Mixing
    from comgra_decl.launch.one_batch import Verdict
    from comgra_decl.launch.thermometer import Reading

_WORDS = {
    "can": ("It can learn one batch by heart", "bold green"),
    "cannot": ("It cannot learn one batch by heart", "bold red"),
    "unclear": ("Not conclusive", "bold yellow"),
}
_MIXING = {
    "apart": ("Samples are kept apart", "bold green"),
    "norm": ("Samples are kept apart, but for BatchNorm", "bold green"),
    "mixed": ("Samples are mixed", "bold red"),
    "unclear": ("Not conclusive", "bold yellow"),
}
_BANDS = ((0.1, "blue"), (0.5, "cyan"), (2.0, "green"), (10.0, "yellow"), (math.inf, "red"))
"""Upper ends of the spread: 0.5 to 2 is what TheDeepChecker takes for healthy activations."""


def print_verdict(verdict: Verdict, losses: Sequence[float]) -> None:
    """Prints the verdict, and the loss at some of the steps."""
    words, style = _WORDS[verdict.outcome]
    out = console()
    out.print(Text.assemble((f"{words}: ", style), verdict.reason, "."))
    if not losses:
        return
    at = sorted({round(i * (len(losses) - 1) / 5) for i in range(6)})
    line = ", ".join(f"{losses[i]:.4g} (step {i})" for i in at)
    out.print(Text(f"loss of the held batch: {line}", style="dim"))
    if verdict.outcome == "cannot":
        out.print(
            "What to do: check that the loss meets the right targets, that gradients reach every "
            "parameter, and the learning rate; comgra-decl diagnose on a recorded run tells more."
        )


def print_mixing(worst: Mixing, found: Sequence[Mixing]) -> None:
    """Prints the verdict on a program, and that on each of its networks if there are several."""
    out = console()
    words, style = _MIXING[worst.outcome]
    out.print(Text.assemble((f"{words}: ", style), worst.reason, "."))
    for mixing in found if len(found) > 1 else ():
        out.print(Text(f"{mixing.model}: {mixing.reason}", style="dim"))
    if worst.outcome == "mixed":
        out.print(
            "What to do: look there for a view, reshape or transpose that moves the samples' "
            "dimension, and for a softmax, mean or norm over it. If samples are meant to meet "
            "(contrastive losses, graphs, time in the first dimension: --batch-dim 1), all is well."
        )


def print_readings(readings: Sequence[Reading]) -> None:
    """Prints a line for each call of a layer."""
    if not readings:
        console().print("No layer was called before an optimizer stepped.")
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
