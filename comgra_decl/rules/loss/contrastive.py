"""Contrastive losses that cannot teach what they should."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    CLASSIFICATION,
    Count,
    FactRule,
    Finding,
    LossCall,
    Patient,
    Place,
    Rule,
    Scene,
    Window,
    calls_missing,
    per_run,
    prediction_of,
    read_rows,
    target_of,
    values_of,
)

_SAME = 1e-4  # relative difference of similarities that count as the same


class SelfAsTargetParameters(Patient):
    """Options of `self_as_target`."""

    patience: Count = 5
    """Number of records that must meet the condition; only some records are checked."""


class SelfAsTarget(Rule):
    """Contrastive losses in which each sample's target is the sample itself."""

    name = "self_as_target"
    severity = "error"
    certainty = 0.85
    definition = (
        "A classification compares n samples with n classes, and in all checked records, at least "
        "`patience`, the logit of the target has the same value for all samples and is larger than "
        "all other logits. These are the similarities of each sample to itself, "
        "which are constant if vectors are normalized: the targets are on the diagonal of a "
        "matrix that compares samples with themselves. If logits are not recorded by sample, the "
        "targets must be 0, 1, ..., n - 1, and the largest logit must be the same in all records."
    )
    source = (
        "Chen et al., A Simple Framework for Contrastive Learning (2020), equation 1: a sample's "
        "similarity to itself is excluded. Our own definition."
    )
    advice = (
        "Mask the diagonal with -inf before the softmax, and make the index of the other view the "
        "target: torch.arange(2 * n).roll(n) for torch.cat([a, b])."
    )
    Parameters = SelfAsTargetParameters

    _values: dict[LossCall, list[float]] = per_run(dict)  # the common logit in each record
    _first: dict[LossCall, int] = per_run(dict)
    _others: set[LossCall] = per_run(set)  # calls whose targets had different logits

    def look(self, window: Window) -> None:
        """Compare the logits of targets."""
        for call in [*self.scene.calls]:
            shape = call.prediction.shape
            square = len(shape) == 2 and shape[0] == shape[1] == call.target.elements > 2
            if not square or call.function not in CLASSIFICATION or call in self._others:
                continue
            slots = prediction_of(self.scene, call), target_of(self.scene, call)
            for row in read_rows(window).tolist():
                logits, targets = (
                    None if slot is None else values_of(window, row, slot) for slot in slots
                )
                if targets is None or call in self._others:
                    continue
                if logits is None and slots[0] is not None:
                    logits = self._diagonal(window, row, slots[0], targets)
                if logits is not None:
                    self._compare(call, int(window.steps[row]), logits, targets)

    def _diagonal(
        self, window: Window, row: int, slot: int, targets: NDArray[np.float64]
    ) -> NDArray[np.float64] | None:
        """Return logits with the same maximum as those recorded, all of it on the diagonal.

        Of a matrix that is not recorded by sample, only its largest element is known. If the
        targets are on the diagonal and this element never changes, it is the similarity of samples
        to themselves.
        """
        there = window.has("max") and bool(window.present[row, slot])
        if not there or not np.array_equal(targets.reshape(-1), np.arange(targets.size)):
            return None
        largest = float(window.read("max", np.array([slot]))[row, 0])
        logits = np.full((targets.size, targets.size), -np.inf)
        np.fill_diagonal(logits, largest)
        return logits

    def _compare(
        self,
        call: LossCall,
        step: int,
        logits: NDArray[np.float64],
        targets: NDArray[np.float64],
    ) -> None:
        chosen = targets.reshape(-1).astype(np.int64)
        if logits.shape != (len(chosen), call.prediction.shape[1]) or len(chosen) < 2:
            return
        own = np.take_along_axis(logits, chosen[:, None], 1)
        others = logits.copy()
        np.put_along_axis(others, chosen[:, None], -np.inf, 1)
        known = self._values.setdefault(call, [])
        common = known[0] if known else float(own[0, 0])
        same = np.abs(own - common) <= _SAME * abs(common)
        if not same.all() or not (own > others).all():
            self._others.add(call)
        known.append(common)
        self._first.setdefault(call, step)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such loss."""
        for call, values in self._values.items():
            if call in self._others or len(values) < self.parameters.patience:
                continue
            return [
                self.finding(
                    scene,
                    first_step=self._first[call],
                    message=f"In {call.function} of {call.prediction.shape[0]} samples and as many "
                    f"classes, the logit of the target is always {values[0]:.4g} and the largest "
                    "one: each sample's target is the sample itself, so nothing has to be learned.",
                    evidence={"logit": values[0], "records": len(values)},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)


class TemperatureMultiplied(Rule):
    """Contrastive losses that multiply similarities by the temperature."""

    name = "temperature_multiplied"
    certainty = 0.8
    definition = (
        "In the first records, a square matrix of cosine similarities (at most 1 in magnitude, "
        "with ones on the diagonal) is multiplied by a number f below 1, and a classification has "
        "logits of the same shape. The logits of a sample then differ by at most 2 f, so that the "
        "loss stays close to ln(n), however similar the pairs are."
    )
    source = (
        "Chen et al., A Simple Framework for Contrastive Learning (2020), equation 1: similarities "
        "are divided by the temperature, for example 0.1. Our own definition."
    )
    advice = "Divide by the temperature: `similarity / 0.1`."

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such product."""
        classified = {c.prediction.shape for c in scene.calls if c.function in CLASSIFICATION}
        for fact in scene.told("temperature"):
            shape = tuple(fact.get("shape") or ())
            if shape not in classified:
                continue
            factor = float(fact["factor"])
            return [
                self.finding(
                    scene,
                    place=Place(str(fact.get("where") or "mul")),
                    first_step=0,
                    message=f"{fact['where']} multiplies cosine similarities by {factor:.3g}. The "
                    f"logits of {shape[0]} samples therefore differ by at most {2 * factor:.3g}, "
                    "and the loss stays close to that of guessing. They were probably meant to be "
                    "divided by this temperature.",
                    evidence={"factor": factor},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)


class OwnCandidate(FactRule):
    """Contrastive losses in which a sample competes with its own positive."""

    name = "own_candidate"
    certainty = 0.85
    definition = (
        "In the first records, a cross-entropy receives a square matrix whose largest element in "
        "each row is on the diagonal, and no row's target is on the diagonal. These are the "
        "similarities of samples to each other, and each sample is most similar to itself."
    )
    source = (
        "Chen et al., A Simple Framework for Contrastive Learning (2020), equation 1: the sum over "
        "candidates leaves out the sample itself."
    )
    advice = (
        "Mask the diagonal before the loss: similarities.fill_diagonal_(-inf), or "
        "masked_fill(torch.eye(n).bool(), -inf)."
    )
    kind = "own candidate"
    shown = ("shape",)

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} compares similarities of shape {fact['shape']} that include each "
            "sample's similarity to itself, the largest in its row: the positive sample cannot win."
        )
