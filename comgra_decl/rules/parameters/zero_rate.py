"""Learning rates of zero, with which nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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


class _Group(NamedTuple):
    """A parameter group of an optimizer; optimizers that look the same are not distinguished."""

    optimizer: str
    sizes: tuple[int, ...]  # number of parameters in each group of the optimizer
    number: int

    def __str__(self) -> str:
        return (
            self.optimizer if len(self.sizes) == 1 else f"group {self.number} of {self.optimizer}"
        )


class ZeroLearningRate(Rule):
    """A learning rate of 0 for all parameters, or for some of them from the start."""

    name = "zero_learning_rate"
    severity = "error"
    certainty = 0.9
    definition = (
        "The learning rate of every parameter group in every optimizer is 0 and has been 0 for at "
        "least `least` steps, which make up at least the fraction `share` of all steps so far. "
        "During these steps, the norms of all parameters with at least two dimensions have stayed "
        "the same. The last step of a schedule is not reported. The finding is only a hint if this "
        "applies to some parameter groups, whose learning rate has always been 0 although no "
        "schedule starts there (`initial_lr`, which schedulers store, is missing or 0), while "
        "others are trained."
    )
    source = "Our own definition; torch.optim accepts a learning rate of 0 without a warning."
    advice = "Set the learning rate (`lr`) of the optimizer, or check its schedule."
    explained_by = ("learning_rate_schedule",)
    Parameters = ZeroRateParameters

    _began = -1  # first record of the current span; -1 if the rate is not 0
    _start: int | None = None
    _moved = False
    _before = per_run(Previous)
    _always: dict[_Group, tuple[int, bool]] = per_run(dict)  # first step, whether it was always 0

    def look(self, window: Window) -> None:
        """Check whether weights change although all learning rates are 0."""
        at = np.flatnonzero(window.table.weights)
        change: Bools = np.zeros(len(window), np.bool_)
        if len(at) and window.has("l2"):
            norm = window.read("l2", at).astype(np.float64)
            change = np.asarray((np.abs(norm - self._before.look(at, norm)) > 0).any(1))
        if len(window.facts) and self._start is None:
            self._start = int(window.steps[0])
        for optimizers, row, stop in window.spans(OPTIMIZERS):
            step, rates = int(window.steps[row]), []
            for group, rate, intended in _groups(optimizers):
                rates.append(rate)
                first, always = self._always.get(group, (step, True))
                self._always[group] = first, always and not rate and not intended
            if not rates:
                continue
            if max(rates) > 0:
                self._began, self._moved = -1, False
                continue
            if self._began < 0:
                self._began, row = step, row + 1
            self._moved = self._moved or bool(change[row:stop].any())

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding if the learning rate has been 0 for long enough."""
        zero = scene.rates.zero
        if zero is None:
            return self._some(scene)
        if self._began < 0 or self._moved or self._start is None:
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

    def _some(self, scene: Scene) -> list[Finding]:
        """Return a hint about groups whose learning rate has always been 0."""
        always = {group: first for group, (first, zero) in self._always.items() if zero}
        first = min(always.values(), default=scene.last_step)
        if scene.last_step - first + 1 < self.parameters.least:
            return []
        parameters = sum(group.sizes[group.number] for group in always)
        return [
            self.finding(
                scene,
                first_step=first,
                severity="hint",
                message=f"The learning rate of {', '.join(map(str, always))} has been 0 from the "
                f"start: {parameters} of {self._parameters} parameter tensors are not trained.",
                advice="Set the learning rate (`lr`). To freeze parameters on purpose, set "
                "`requires_grad_(False)` and leave them out of the optimizer.",
                evidence={"groups": len(always), "tensors": parameters},
            )
        ]

    @property
    def _parameters(self) -> int:
        return sum(group.sizes[group.number] for group in self._always)

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        if scene.rates.now is None:
            return "no learning rate is known"
        least = self.parameters.least
        return None if scene.last_step + 1 >= least else f"it needs {least} steps"


def _groups(optimizers: Any) -> Iterator[tuple[_Group, float, float]]:
    """Yield each group, its learning rate, and the rate with which it was created, or else 0."""
    for optimizer in optimizers if isinstance(optimizers, list) else ():
        groups = optimizer.get("groups") or ()
        sizes = tuple(int(group.get("parameters") or 0) for group in groups)
        for index, group in enumerate(groups):
            rate, intended = group.get("lr"), group.get("initial_lr")
            if isinstance(rate, (int, float)):
                intended = intended if isinstance(intended, (int, float)) else 0.0
                name = _Group(str(optimizer.get("class", "the optimizer")), sizes, index)
                yield name, float(rate), float(intended)
