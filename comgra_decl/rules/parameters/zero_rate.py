"""Learning rates of zero, with which nothing is trained."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    OPTIMIZERS,
    Bools,
    Count,
    Finding,
    Fraction,
    Previous,
    Rule,
    RuleParameters,
    Scene,
    Window,
    per_run,
    since,
)


class ZeroRateParameters(RuleParameters):
    """Options of `zero_learning_rate`."""

    least: Count = 10
    """Number of steps for which the learning rate must be 0."""

    share: Fraction = 0.1
    """Share of all steps so far for which the learning rate must be 0."""


class ZeroLearningRate(Rule):
    """A learning rate of 0 for all parameters."""

    name = "zero_learning_rate"
    severity = "error"
    certainty = 0.9
    definition = (
        "The learning rate of every parameter group in every optimizer is 0 and has been 0 for at "
        "least `least` steps, which make up a fraction of at least `share` of all steps so far. "
        "During these steps, the norms of all parameters with at least two dimensions have stayed "
        "the same. The last step of a "
        "schedule, and groups that are frozen while others are trained, are not reported."
    )
    source = "Our own definition; torch.optim accepts a learning rate of 0 without a warning."
    advice = "Set the learning rate (`lr`) of the optimizer, or check its schedule."
    explained_by = ("learning_rate_schedule",)
    Parameters = ZeroRateParameters

    _began = -1  # first record of the current span; -1 if the rate is not 0
    _start: int | None = None
    _moved = False
    _before = per_run(Previous)

    def look(self, window: Window) -> None:
        """Checks whether weights change although all learning rates are 0."""
        at = np.flatnonzero(window.table.weights)
        change: Bools = np.zeros(len(window), np.bool_)
        if len(at) and window.has("l2"):
            norm = window.read("l2", at).astype(np.float64)
            change = np.asarray((np.abs(norm - self._before.look(at, norm)) > 0).any(1))
        for row, (step, facts) in enumerate(zip(window.steps.tolist(), window.facts, strict=False)):
            self._start = step if self._start is None else self._start
            rates = _rates(facts.get(OPTIMIZERS))
            if not rates:
                continue
            if max(rates) > 0:
                self._began, self._moved = -1, False
            elif self._began < 0:
                self._began = step
            else:
                self._moved = self._moved or bool(change[row])

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding if the learning rate has been 0 for long enough."""
        zero = scene.rates.zero
        if zero is None or self._began < 0 or self._moved or self._start is None:
            return []
        step, after = zero
        lasting, steps = scene.last_step - step + 1, scene.last_step - self._start + 1
        if lasting < max(self.parameters.least, self.parameters.share * steps):
            return []
        before = "" if not scene.rates.most else f"; it was {scene.rates.most:.3g} before"
        return [
            self.finding(
                scene,
                first_step=step,
                after_step=after,
                message=f"The learning rate of all parameters is 0 {since(step, after)}{before}: "
                "nothing is trained.",
                evidence={"steps": lasting, "largest": scene.rates.most},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Returns the reason why the run could not be checked, or None."""
        if scene.rates.now is None:
            return "no learning rate is known"
        least = self.parameters.least
        return None if scene.last_step + 1 >= least else f"it needs {least} steps"


def _rates(optimizers: object) -> list[float]:
    """Returns the learning rates of all groups."""
    listed = optimizers if isinstance(optimizers, list) else []
    groups = [group for optimizer in listed for group in optimizer.get("groups") or ()]
    return [float(g["lr"]) for g in groups if isinstance(g.get("lr"), (int, float))]
