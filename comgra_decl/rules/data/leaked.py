"""Targets that are among the inputs."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    CLASSIFICATION,
    PERTURBATIONS,
    Count,
    Finding,
    Rows,
    Rule,
    RuleParameters,
    Scene,
    Tokens,
    Window,
    count_tokens,
    input_slots,
    per_run,
    read_rows,
    target_slots,
    targets_of_a_part,
    values_of,
)

_EQUAL = 1 - 1e-5  # correlation of a target with an input that contains it
_COPIED = 0.1  # share of the first loss, below which a model has learned to copy
_LONG = 8  # positions
_VARIED = 0.2  # share of positions at which a series changes
_FEW = 10  # losses
_ALIKE = 0.995  # share of tokens
_UNUSED = 1e-6  # relative change of outputs
_LENGTH = 8  # positions of a sequence in which shifts are told apart


class LeakParameters(RuleParameters):
    """Options of `target_among_inputs`."""

    least: Count = 40
    """Number of recorded samples, or tokens, required."""


class TargetAmongInputs(Rule):
    """Targets that are among the inputs."""

    name = "target_among_inputs"
    certainty = 0.8
    definition = (
        "Over at least `least` recorded samples, a target with one value per sample is a linear "
        f"function of a single input element (correlation above {_EQUAL}). The input must have at "
        "least two elements. The first step of a sequence is ignored, because the task may be to "
        "remember it. The rule also reports, as an error, integer targets with one token per "
        "position that are identical to the last integer input at the same positions (at least "
        f"{_ALIKE:.1%} of at least `least` tokens, in three records). Such targets were not "
        "shifted. A target of floating-point numbers per position that equals a feature of the "
        "input at the same position is a hint. Ignored targets (negative values) do not count, nor "
        "do inputs on which, in an experiment after the training, no output at the same position "
        "depends, because the decoder shifts them itself. A hint unless the loss falls to "
        f"{_COPIED:.0%} of its start, because a model that compresses sequences must restore them."
    )
    source = (
        "Kaufman et al., Leakage in Data Mining (2012), on features that are the target itself. "
        "Our own definition."
    )
    advice = (
        "Remove this element from the inputs. For sequences, check where windows end, and shift "
        "the targets: inputs x[:, :-1], targets x[:, 1:]."
    )
    Parameters = LeakParameters

    _rows: dict[tuple[int, int], tuple[Rows, Rows]] = per_run(dict)
    _tokens: dict[tuple[int, int], Tokens] = per_run(dict)
    # records, smallest shares of equal values for each feature, and last step
    _series: dict[tuple[int, int], tuple[int, NDArray[np.float64], int]] = per_run(dict)

    def look(self, window: Window) -> None:
        """Gathers inputs and targets of the same samples."""
        table = window.table
        sources, goals = input_slots(table), target_slots(table)
        for row in read_rows(window).tolist() if len(sources) and len(goals) else ():
            step = int(window.steps[row])
            given = {int(s): values_of(window, row, int(s)) for s in sources}
            wanted = {int(s): values_of(window, row, int(s)) for s in goals}
            for a, x in given.items():
                for b, y in wanted.items():
                    if x is not None and y is not None:
                        self._compare(window, step, (a, x), (b, y))

    def _compare(
        self,
        window: Window,
        step: int,
        source: tuple[int, NDArray[np.float64]],
        goal: tuple[int, NDArray[np.float64]],
    ) -> None:
        (a, x), (b, y) = source, goal
        infos = window.table.infos
        if "float" in infos[a].dtype and infos[a].batch_dim == 0 and infos[b].batch_dim == 0:
            if len(x) == len(y) == y.size and x.size >= 2 * len(x):
                mine, other = self._rows.setdefault((a, b), (Rows(), Rows()))
                mine.add(step, x)
                other.add(step, y)
            if x.ndim in (2, 3) and y.ndim == 2 and x.shape[:2] == y.shape and y.shape[1] >= _LONG:
                self._compare_series((a, b), step, x, y)
        elif "int" in infos[a].dtype and "int" in infos[b].dtype and x.ndim == 2:
            flat, length = y.reshape(-1), x.size
            whole = int(np.prod(infos[a].shape)) == int(np.prod(infos[b].shape))
            if whole and x.shape[1] > 1 and len(flat) >= length:
                known = self._tokens.setdefault((a, b), Tokens(step))
                count_tokens(known, x, flat[:length].reshape(x.shape))
                return
            per = prod(infos[b].shape) / infos[a].shape[0]
            part = targets_of_a_part(x, y, per)
            if part is not None:
                count_tokens(self._tokens.setdefault((a, b), Tokens(step)), x, part)

    def _compare_series(
        self, pair: tuple[int, int], step: int, x: NDArray[np.float64], y: NDArray[np.float64]
    ) -> None:
        """Compare each value of a series with that of each feature at the same position."""
        features = x if x.ndim == 3 else x[..., None]
        same = (features == y[..., None]).mean((0, 1))
        varied = bool((y[:, 1:] != y[:, :-1]).mean() > _VARIED)
        count, least, _ = self._series.get(pair, (0, np.ones(features.shape[-1]), step))
        if varied and len(same) == len(least):
            self._series[pair] = count + 1, np.minimum(least, same), step

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first target found among the inputs."""
        for pair, known in self._tokens.items():
            last = max(a for a, _ in self._tokens)
            enough = known.records >= 3 and known.count >= self.parameters.least
            if pair[0] != last or not enough or len(known.values) < 3:
                continue
            if _is_unused(scene, scene.table.infos[pair[0]].key.role):
                continue
            if known.same >= _ALIKE * known.count and _classifies(scene):
                return [self._unshifted(scene, pair, known)]
        for (a, b), (x, y) in self._rows.items():
            column = self._copied(scene, a, x.table, y.table)
            if column is not None:
                place, goal = scene.table.place(a), scene.table.place(b)
                return [
                    self.finding(
                        scene,
                        place=place,
                        first_step=x.steps[0],
                        message=f"Element {column} of each sample of {place} determines the "
                        f"target ({goal}): the two are identical up to scale and offset in all "
                        f"{x.count} recorded samples. The target has leaked into the input.",
                        evidence={"element": str(column), "samples": x.count},
                    )
                ]
        return self._in_series(scene)

    def _in_series(self, scene: Scene) -> list[Finding]:
        """Judge targets that have a value per position."""
        for (a, b), (records, least, _) in self._series.items():
            if records < 3 or not (least >= _ALIKE).any():
                continue
            place, goal = scene.table.place(a), scene.table.place(b)
            feature = "" if len(scene.table.infos[a].shape) == 2 else f" (feature {least.argmax()})"
            return [
                self.finding(
                    scene,
                    place=place,
                    first_step=0,
                    message=f"The target ({goal}) is the input itself ({place}{feature}): their "
                    "values are identical at the same position in all recorded samples. Was it "
                    "meant to be shifted by one?",
                    evidence={"records": records},
                    severity="hint",  # an autoencoder has the same data as its target
                )
            ]
        return []

    def _copied(
        self, scene: Scene, slot: int, x: NDArray[np.float64], y: NDArray[np.float64]
    ) -> list[int] | None:
        """Return the index of the input element that equals the target up to scale and offset."""
        if len(x) != len(y) or len(x) < self.parameters.least or len(np.unique(y)) < 2:
            return None
        with np.errstate(all="ignore"):
            left, right = x - x.mean(0), y - y.mean(0)
            size = np.sqrt((left**2).sum(0) * (right**2).sum(0))
            related = np.abs((left * right).sum(0)) / size
        shape = scene.table.infos[slot].shape[1:]
        for at in np.flatnonzero(related > _EQUAL).tolist():
            index = [int(i) for i in np.unravel_index(at, shape)]
            if len(shape) == 1 or index[0] > 0:
                return index
        return None

    def _unshifted(self, scene: Scene, pair: tuple[int, int], known: Tokens) -> Finding:
        place, goal = (scene.table.place(slot) for slot in pair)
        return self.finding(
            scene,
            place=place,
            first_step=known.step,
            severity="error" if _copies(scene) else "hint",
            message=f"The target ({goal}) is the input itself ({place}): "
            f"{100 * known.same / known.count:.4g}% of {known.count} tokens are identical at the "
            "same position. Was it meant to be shifted by one?",
            evidence={"same": known.same, "tokens": known.count},
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if self._rows or self._tokens:
            return None
        return "the values of inputs and targets are not recorded for the same samples"


def _is_unused(scene: Scene, role: str) -> bool:
    """Return whether, after the training, outputs did not depend on the token at their position.

    A decoder that receives the targets may shift them itself.
    """
    for found in scene.documents.get(PERTURBATIONS) or []:
        seen = found.get("ahead") or {}
        argument = str(seen.get("argument"))
        if role == ("input" if argument == "[0]" else f"input{argument}"):
            return float(seen["own"]) < _UNUSED
    return False


def _copies(scene: Scene) -> bool:
    """Whether the loss has fallen to a tenth, as it does if a model only has to copy its input.

    A model that compresses its input, such as an autoencoder of sequences, does not copy it.
    """
    curve = max(scene.curves.values(), key=lambda its: its.count, default=None)
    if curve is None or curve.count < _FEW:
        return False
    return bool(curve.mean(0.9, 1.0)[0] < _COPIED * curve.mean(0.0, 0.1)[0])


def _classifies(scene: Scene) -> bool:
    return any(call.function in CLASSIFICATION for call in scene.calls)


class WrongShift(Rule):
    """Targets that are shifted by two positions, or in the wrong direction."""

    name = "wrong_shift"
    certainty = 0.8
    definition = (
        "A model has a single input of tokens, or of values, with at least "
        f"{_LENGTH} positions, and a loss has a target per position. "
        f"At least {_ALIKE:.1%} of the targets (at least `least`) equal the input two positions "
        "later, or one position earlier, and no target of this input equals the next one in 90%. "
        "Only a hint if the values are no tokens, as the second next one may be forecast, or are "
        "those before, as the task may be to remember them."
    )
    source = (
        "A language model predicts the next token. Models of transformers shift labels themselves, "
        "so labels that are already shifted are shifted twice. Our own definition."
    )
    advice = (
        "Shift the targets by one: inputs x[:, :-1], targets x[:, 1:]. Do not shift labels that "
        "the model or the loss shifts itself."
    )
    Parameters = LeakParameters

    def look(self, window: Window) -> None:
        """Compare targets with the input at other positions."""
        self.scene.compare_tokens(window)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such target."""
        for (source, goal), known in scene.next_tokens.tokens.items():
            length = scene.table.infos[source].shape[1]
            enough = known.records >= 3 and known.count >= self.parameters.least
            enough &= length >= _LENGTH
            if not enough or len(known.values) < 3:
                continue
            others = (each for (x, _), each in scene.next_tokens.tokens.items() if x == source)
            if any(each.next_ > 0.9 * each.count for each in others):  # further answers look ahead
                continue
            later = known.second >= _ALIKE * known.count * (1 - 3 / length)
            earlier = known.previous >= _ALIKE * known.count * (1 - 2 / length)
            if known.same > 0.9 * known.count or not (later or earlier):
                continue
            where = "two positions later" if later else "one position earlier"
            tokens = "int" in scene.table.infos[goal].dtype
            advice = self.advice if later else f"{self.advice} The model only has to look back."
            return [
                self.finding(
                    scene,
                    place=scene.table.place(goal),
                    first_step=known.step,
                    message=f"The target of each position is the input {where}, not the next one.",
                    advice=advice,
                    evidence={"later": known.second, "earlier": known.previous},
                    **({} if later and tokens else {"severity": "hint"}),
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        known = scene.next_tokens.tokens
        return None if known else "no input and target with one value per position are recorded"
