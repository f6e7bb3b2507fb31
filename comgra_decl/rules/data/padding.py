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

_ENDS = 4  # different tokens, from which on none of them marks the end


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


@dataclass
class LastTokens:
    """The last targets of sequences that end with ignored targets, by their number."""

    step: int
    counts: dict[int, int] = field(default_factory=dict)


class IgnoredEnd(Rule):
    """Language models that never learn to end a sequence."""

    name = "ignored_end"
    severity = "hint"
    certainty = 0.6
    definition = (
        "The targets of a cross-entropy are the next tokens. Of the recorded sequences, at least "
        "`least` end with ignored targets (`ignore_index`), and the last targets that count are "
        f"at least {_ENDS} different tokens, none of which ends more than half of the sequences."
    )
    source = (
        "Tokenizers without a padding token often use the end token for both; ignoring the padding "
        "then ignores the end as well. Our own definition."
    )
    advice = (
        "Use different tokens for padding and for the end of a sequence, or ignore only the "
        "targets after the first end token. Ignore this hint if sequences are cut and need no end."
    )
    Parameters = PaddingParameters

    _last: dict[int, LastTokens] = per_run(dict)
    _ignored = -100

    def look(self, window: Window) -> None:
        """Store the last targets that count."""
        self.scene.compare_tokens(window)
        infos = window.table.infos
        goals = {goal for _, goal in self.scene.next_tokens.tokens if "int" in infos[goal].dtype}
        if not goals:
            return
        for call in self.scene.calls:
            ignored = call.argument("ignore_index", -100)
            self._ignored = ignored if isinstance(ignored, int) else -100
        for row in read_rows(window).tolist():
            for goal in sorted(goals):
                y = values_of(window, row, goal)
                if y is None or y.ndim != 2:
                    continue
                known = self._last.setdefault(goal, LastTokens(int(window.steps[row])))
                for sequence in y.astype(np.int64):
                    counted = np.flatnonzero(sequence != self._ignored)
                    if len(counted) and counted[-1] + 1 < len(sequence):
                        token = int(sequence[counted[-1]])
                        known.counts[token] = known.counts.get(token, 0) + 1

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first target whose ends are ignored."""
        for goal, known in self._last.items():
            total = sum(known.counts.values())
            if total < self.parameters.least or len(known.counts) < _ENDS:
                continue
            if max(known.counts.values()) > total / 2:
                continue
            return [
                self.finding(
                    scene,
                    place=scene.table.place(goal),
                    first_step=known.step,
                    message=f"No token marks the end of a sequence: in {total} recorded sequences, "
                    f"the last target that counts is one of {len(known.counts)} tokens, and all "
                    f"after it are ignored (ignore_index={self._ignored}), so the model never "
                    "learns to stop.",
                    evidence={"sequences": total, "tokens": len(known.counts)},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if scene.next_tokens.tokens:
            return None
        return "no input and target with one value per position are recorded"


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
