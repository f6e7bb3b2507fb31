"""Padding that is included in the loss."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    CLASSIFICATION,
    Count,
    Finding,
    Fraction,
    Rule,
    RuleParameters,
    Scene,
    Window,
    input_slots,
    per_run,
    read_rows,
    target_of,
    target_slots,
    values_of,
)


class PaddingParameters(RuleParameters):
    """Options of `padding_in_loss`."""

    share: Fraction = 0.2
    """Smallest reported share of padding among the targets."""

    least: Count = 20
    """Number of recorded sequences required."""


@dataclass
class Ends:
    """Runs of the same token at the end of sequences: their tokens, lengths and number."""

    step: int
    sequences: int = 0
    tokens: int = 0
    padding: dict[int, int] = field(default_factory=dict)
    lengths: set[int] = field(default_factory=set)


class PaddingInLoss(Rule):
    """Padding that is included in the loss."""

    name = "padding_in_loss"
    certainty = 0.7
    definition = (
        "The targets of a cross-entropy have one token per position. Of the recorded sequences (at "
        "least `least`), half or more end with two or more repetitions of the same token. These "
        "runs differ in length, and together they make up more than `share` of all targets. The "
        "loss is the mean over all targets, does not ignore this token (`ignore_index`), and has "
        "no weights."
    )
    source = "Our own definition; PyTorch's documentation of `ignore_index` in CrossEntropyLoss."
    advice = "Pass ignore_index=<the padding token>, or mask the loss at padded positions."
    Parameters = PaddingParameters

    _ends: dict[int, Ends] = per_run(dict)

    def look(self, window: Window) -> None:
        """Measures the runs at the end of targets."""
        infos = window.table.infos
        goals = [s for s in target_slots(window.table).tolist() if "int" in infos[s].dtype]
        sources = [s for s in input_slots(window.table).tolist() if "int" in infos[s].dtype]
        for row in read_rows(window).tolist() if goals and sources else ():
            x = values_of(window, row, sources[-1])
            for goal in goals:
                y = values_of(window, row, goal)
                if x is None or y is None or x.ndim != 2 or x.shape[1] < 4:
                    continue
                table = _as_sequences(y, infos[goal].shape, infos[sources[-1]].shape)
                if table is not None:
                    _add(self._ends.setdefault(goal, Ends(int(window.steps[row]))), table)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first loss that includes padding."""
        for call, seen in scene.calls.items():
            slot = target_of(scene, call)
            known = None if slot is None else self._ends.get(slot)
            if known is None or call.function not in CLASSIFICATION or not known.padding:
                continue
            token = max(known.padding, key=known.padding.__getitem__)
            share = known.padding[token] / known.tokens
            options = dict(call.arguments)
            plain = options.get("reduction", "mean") == "mean" and options.get("weight") is None
            ignored = options.get("ignore_index", -100) == token or token < 0
            enough = known.sequences >= self.parameters.least and len(known.lengths) > 2
            if share > self.parameters.share and plain and not ignored and enough:
                return [
                    self.finding(
                        scene,
                        place=scene.table.place(slot or 0),
                        first_step=seen.first,
                        last_step=seen.last,
                        message=f"About {100 * share:.0f}% of the targets are padding (token "
                        f"{token} at the end of sequences), and {call.function} includes them all: "
                        "the model is mostly trained to predict padding.",
                        evidence={"percent": 100 * share, "token": token},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if self._ends else "the values of integer inputs and targets are not recorded"


def _as_sequences(
    y: NDArray[np.float64], shape: tuple[int, ...], source: tuple[int, ...]
) -> NDArray[np.float64] | None:
    """Return targets as [sequences, positions]; None if their length is unknown."""
    if y.ndim == 2 and len(shape) == 2:
        return y
    length = source[1] if len(source) == 2 else 0
    whole = y.ndim == 1 and len(shape) == 1 and length and shape[0] == source[0] * length
    return y[: len(y) // length * length].reshape(-1, length) if whole else None


def _add(known: Ends, table: NDArray[np.float64]) -> None:
    known.sequences += len(table)
    known.tokens += table.size
    for sequence in table:
        token = int(sequence[-1])
        others = np.flatnonzero(sequence != token)
        run = len(sequence) - (int(others[-1]) + 1 if len(others) else 0)
        if run > 1 and token not in sequence[: len(sequence) - run]:
            known.padding[token] = known.padding.get(token, 0) + run
            known.lengths.add(run)
