"""Training that waits for data, and steps that stall."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from comgra_decl.rules.api import (
    AUTOMATIC,
    STALLED,
    Field,
    Finding,
    Int,
    Numbers,
    Positive,
    Rule,
    RuleParameters,
    Scene,
    Share,
    per_run,
)

_DATA, _STEP = f"{AUTOMATIC}time/data", f"{AUTOMATIC}time/step"
_STALLED = AUTOMATIC + STALLED


class InputBoundParameters(RuleParameters):
    """Options of `input_bound`."""

    share: Share = 0.4
    """Largest allowed share of a step's time that passes before the model is called."""

    least_ms: Positive = 2.0
    """Largest allowed time that passes before the model is called, in milliseconds."""

    least: Annotated[Int, Field(ge=3)] = 5
    """Number of timed steps required."""


class InputBound(Rule):
    """Training that spends much of its time waiting for the next batch."""

    name = "input_bound"
    severity = "hint"
    certainty = 0.8
    definition = (
        "The mean of `time/data`, the time from the end of a step to the first model call of the "
        "next step, is above `share` times the mean of `time/step` and above `least_ms`, or this "
        "holds for their medians: a single step, such as one in which a profiler starts, may take "
        "longer than all others together."
    )
    source = "The profilers of PyTorch and Lightning report the same share."
    advice = (
        "Load data in parallel with training: raise `num_workers`, set `persistent_workers=True` "
        "and `pin_memory=True`, and move slow transforms out of the training loop. If the data "
        "fits into memory, load it only once."
    )
    Parameters = InputBoundParameters

    _times: dict[str, list[float]] = per_run(dict)
    _first: int = -1

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Add the times of steps."""
        if numbers.name in (_DATA, _STEP):
            self._times.setdefault(numbers.name, []).extend(numbers.values.tolist())
            if self._first < 0:
                self._first = int(numbers.steps[0])

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the whole run."""
        if self.missing(scene) is not None:
            return []
        shares = []
        for middle in (np.mean, np.median):
            data, step = (float(middle(self._times[name])) for name in (_DATA, _STEP))
            step = max(step, data)  # the two are means over different steps
            shares.append((data / step if step > 0 else 0.0, data, step))
        others = min(shares)
        share, data, step = max(shares)
        if share <= self.parameters.share or 1000 * data <= self.parameters.least_ms:
            return []
        return [
            self.finding(
                scene,
                first_step=self._first,
                message=f"Training waits for data: of the {1000 * step:.3g} ms of a step, "
                f"{1000 * data:.3g} ms ({share:.0%}) pass before the model is called."
                + self._uneven(share == shares[0][0], others),
                evidence={"share": share, "data_ms": 1000 * data, "step_ms": 1000 * step},
            )
        ]

    def _uneven(self, in_the_mean: bool, others: tuple[float, float, float]) -> str:
        """Return a sentence if only the mean or only the median is above the limits."""
        share, data, step = others
        if share > self.parameters.share and 1000 * data > self.parameters.least_ms:
            return ""
        numbers = f"{1000 * data:.3g} of {1000 * step:.3g} ms ({share:.0%})"
        if in_the_mean:
            return f" This is the mean, in which single long waits count; the median is {numbers}."
        return f" This is the median; the mean, in which single long steps count, is {numbers}."

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the times could not be checked, or None."""
        count = min(len(self._times.get(name, ())) for name in (_DATA, _STEP))
        least = self.parameters.least
        return None if count >= least else f"it needs {least} timed steps; the run has {count}"


class StalledStep(Rule):
    """Steps that did not end for a long time."""

    name = "stalled_step"
    severity = "warning"
    certainty = 0.7
    definition = (
        "Outside evaluations, a step has not ended after ten times the median step duration and at "
        "least five seconds. A note in the run then contains the stacks of all threads. At most "
        "eight such steps are reported."
    )
    source = "The watchdogs in distributed training libraries report hanging steps in the same way."
    advice = (
        "The note at this step shows where each thread was. Usual causes are a DataLoader worker "
        "that hangs or is starved, a slow file system, a checkpoint being written, and a rank that "
        "waits for another one."
    )

    _found: dict[int, float] = per_run(dict)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Store the stalled steps."""
        if numbers.name == _STALLED:
            self._found.update(zip(numbers.steps.tolist(), numbers.values.tolist(), strict=True))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about each stalled step."""
        return [
            self.finding(
                scene,
                first_step=step,
                last_step=step,
                message=f"Step {step} had not ended after {seconds:.0f} s, more than ten times the "
                "median. A note at this step shows the stacks of all threads.",
                evidence={"seconds": seconds},
            )
            for step, seconds in self._found.items()
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return None, because every run is checked while it is recorded."""
        return None
