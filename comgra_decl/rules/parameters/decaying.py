"""Weight decay and gradient clipping that are strong enough to prevent learning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from comgra_decl.rules.api import (
    DECOUPLED,
    OPTIMIZERS,
    Clipping,
    Count,
    Finding,
    Fraction,
    Positive,
    Rule,
    RuleParameters,
    Scene,
    Window,
    parameter_groups,
    per_run,
)

_ADAPTIVE = ("Adam", "RMSprop", "Adagrad", "Adadelta", "Lion", "Adafactor", "Rprop", "LAMB")
"""Substrings in the names of optimizers whose steps do not depend on the scale of gradients."""


class DecayParameters(RuleParameters):
    """Options of `strong_decay`."""

    share: Fraction = 5e-3
    """Largest share of a weight that decay may remove per step."""

    least: Count = 10
    """Number of records required."""


class StrongDecay(Rule):
    """Weight decay that erases weights within a few hundred steps."""

    name = "strong_decay"
    certainty = 0.8
    definition = (
        "The optimizer is AdamW or SGD, and its learning rate times its weight decay is above "
        "`share` in most records, and in at least `least` of them. At the default, decay alone "
        "then halves the weights within 140 steps."
    )
    source = (
        "Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019). Usual values, such "
        "as 1e-3 times 0.1 or 0.1 times 5e-4, are 1e-4 or less."
    )
    advice = "Lower the weight decay (usual for AdamW: 0.01 to 0.1; for SGD: 1e-4 to 5e-4)."
    explained_by = ("nonfinite",)
    Parameters = DecayParameters

    _count = 0
    _high = 0
    _first = 0
    _worst = (0.0, 0.0, 0.0)

    def look(self, window: Window) -> None:
        """Count the records with strong decay."""
        for step, facts in zip(window.steps.tolist(), window.facts, strict=False):
            shares = [*_decays(facts)]
            if not shares:
                continue
            self._count += 1
            worst = max(shares)
            if worst[0] > self.parameters.share:
                self._first = step if not self._high else self._first
                self._high += 1
                self._worst = max(self._worst, worst)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding if decay is strong in most records."""
        if self._high < max(self.parameters.least, 0.5 * self._count):
            return []
        share, rate, decay = self._worst
        half = math.log(2) / -math.log1p(-min(share, 0.999))
        return [
            self.finding(
                scene,
                first_step=self._first,
                message=f"Weight decay {decay:.3g} times learning rate {rate:.3g} removes "
                f"{100 * share:.3g}% of each weight per step. Without gradients, weights are "
                f"halved in {half:.0f} steps.",
                evidence={"share": share, "decay": decay, "rate": rate},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if self._count < self.parameters.least:
            return f"it needs {self.parameters.least} records with such an optimizer"
        return None


def _decays(facts: Mapping[str, Any]) -> Iterator[tuple[float, float, float]]:
    for rate, decay, kind in parameter_groups(facts.get(OPTIMIZERS) or ()):
        if kind in DECOUPLED:
            yield rate * decay, rate, decay


class ClippingParameters(RuleParameters):
    """Options of `tiny_clipping`."""

    smallest: Positive = 0.02
    """Smallest norm to which gradients may be clipped."""

    least: Count = 10
    """Number of consecutive records that must have the same norm."""


class TinyClipping(Rule):
    """Gradients that are clipped to a tiny norm in every step."""

    name = "tiny_clipping"
    certainty = 0.75
    definition = (
        "The total norm of the gradients that the optimizer uses is the same (within 0.1%) in at "
        "least the last `least` records and in most records. It is below `smallest`, "
        "although the shares of individual parameters differ: gradients are clipped in every "
        "step. The rule applies only to optimizers whose steps depend on the scale of gradients "
        "(SGD, not Adam)."
    )
    source = (
        "Our own definition. Usual limits are 0.1 to 10. Gradients become this small if they are "
        "clipped while they are still scaled by GradScaler, and are unscaled afterwards."
    )
    advice = (
        "Raise the clipping limit to about 1. With mixed precision, call `scaler.unscale_` "
        "before `clip_grad_norm_`."
    )
    explained_by = ("nonfinite",)
    Parameters = ClippingParameters

    _clipping = per_run(Clipping, different=1e-3)

    def look(self, window: Window) -> None:
        """Follow the total norm."""
        at = np.flatnonzero(window.table.parameter_gradients)
        if len(at) and window.has("l2"):
            self._clipping.look(window.steps, window.read("l2", at))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding if gradients are clipped to a tiny norm."""
        known = self._clipping
        enough = known.run >= max(self.parameters.least, 0.5 * known.records)
        if not enough or known.total >= self.parameters.smallest or not _scales(scene):
            return []
        return [
            self.finding(
                scene,
                first_step=known.first,
                message=f"The gradients have a total norm of exactly {known.total:.3g} in every "
                "step. They are clipped to this norm, so every update is tiny.",
                evidence={"norm": known.total, "records": known.run},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if self._clipping.records < self.parameters.least:
            return f"it needs {self.parameters.least} records with parameter gradients"
        return None


def _scales(scene: Scene) -> bool:
    """Whether steps are proportional to gradients."""
    kinds = [str(optimizer.get("class")) for optimizer in scene.optimizers]
    return bool(kinds) and not any(part in kind for kind in kinds for part in _ADAPTIVE)
