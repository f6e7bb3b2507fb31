"""Steps that take longer from some step on."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    AUTOMATIC,
    Curve,
    Factor,
    Field,
    Finding,
    Int,
    Numbers,
    Positive,
    Rule,
    RuleParameters,
    Scene,
    per_run,
)

_TIME = f"{AUTOMATIC}time/"
_STEP = "step"
_MOST = 16  # readings on each side of a jump that are compared
_ONES = {
    "data": "preparing data",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer step",
}


class StepTimeJumpParameters(RuleParameters):
    """Options of `step_time_jump`."""

    factor: Factor = 1.5
    """Largest allowed ratio of the time after the jump to the time before it."""

    least_ms: Positive = 2.0
    """Largest allowed increase, in milliseconds."""

    least: Annotated[Int, Field(ge=4)] = 6
    """Number of readings required on each side of the jump."""


class StepTimeJump(Rule):
    """Steps that take much longer from some step on."""

    name = "step_time_jump"
    severity = "hint"
    certainty = 0.6
    definition = (
        f"Before some step, there are at least `least` readings of `time/step`. Of up to {_MOST} "
        "readings from that step on, and at least `least`, nine of ten exceed `factor` times the "
        f"90th percentile of up to {_MOST} readings before it, and their median is larger by more "
        "than `least_ms`."
    )
    source = "Our own definition; the percentiles tolerate single slow steps."
    advice = (
        "Find out what changes at this step: larger inputs, another phase of training, a list that "
        "is searched in every step, logging, another program on the machine, or a device that "
        "lowers its clock rate. Profile steps on both sides: `profile: {steps: [first, last]}`."
    )
    explained_by = ("growing_memory",)
    Parameters = StepTimeJumpParameters

    _curves: dict[str, Curve] = per_run(dict)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Add the times of steps and of their phases."""
        if numbers.name.startswith(_TIME):
            curve = self._curves.setdefault(numbers.name.removeprefix(_TIME), Curve())
            curve.add(numbers.steps, numbers.values)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first jump."""
        curve = self._curves.get(_STEP)
        if curve is None or self.missing(scene) is not None:
            return []
        at = self._jump(curve.means)
        if at is None:
            return []
        step, (before, after) = curve.steps[at], _around(curve.means, at)
        low, high = 1000 * float(np.median(before)), 1000 * float(np.median(after))
        phase = self._phase(step)
        text = f"From step {step} on, a step takes {high:.3g} ms instead of {low:.3g} ms."
        return [
            self.finding(
                scene,
                first_step=step,
                message=text + (f" Most of the increase is in {_ONES[phase]}." if phase else ""),
                evidence={"from_ms": low, "to_ms": high},
            )
        ]

    def _jump(self, means: NDArray[np.float64]) -> int | None:
        """Return the place of the first jump: of neighbouring candidates, the clearest."""
        limits, best = self.parameters, None
        contrast = 0.0
        for at in range(limits.least, len(means) - limits.least + 1):
            before, after = _around(means, at)
            high, low = np.quantile(before, 0.9), np.quantile(after, 0.1)
            gain = 1000 * float(np.median(after) - np.median(before))
            if low <= limits.factor * high or gain <= limits.least_ms:
                if best is not None:
                    break
            elif (after.mean() - before.mean()) > contrast:
                best, contrast = at, float(after.mean() - before.mean())
        return best

    def _phase(self, step: int) -> str | None:
        """Return the phase whose time increases the most at a step."""
        gains = {}
        for phase in _ONES:
            curve = self._curves.get(phase)
            at = 0 if curve is None else int(np.searchsorted(curve.steps, step))
            if curve is not None and 0 < at < len(curve.steps):
                before, after = _around(curve.means, at)
                gains[phase] = float(np.median(after) - np.median(before))
        return max(gains, key=lambda phase: gains[phase], default=None)

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the times could not be checked, or None."""
        curve = self._curves.get(_STEP)
        count, least = 0 if curve is None else len(curve.means), 2 * self.parameters.least
        return None if count >= least else f"it needs {least} timed steps; the run has {count}"


def _around(means: NDArray[np.float64], at: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return means[max(at - _MOST, 0) : at], means[at : at + _MOST]
