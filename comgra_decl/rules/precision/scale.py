"""Mixed precision that skips steps: gradients are not finite however the loss is scaled."""

from __future__ import annotations

from collections import deque
from typing import Annotated

import numpy as np

from comgra_decl.rules.api import (
    GRAD_SCALE,
    SKIPPED_STEP,
    Field,
    Finding,
    Fraction,
    Int,
    Numbers,
    Positive,
    Rule,
    RuleParameters,
    Scene,
    Severity,
    Window,
)


class ScaleParameters(RuleParameters):
    """What can be said of `gradient_scale`."""

    smallest: Positive = 1.0
    """A scale below this means that the loss is scaled down instead of up."""

    calibration: Annotated[Int, Field(ge=0)] = 50
    """In so many first steps the scale may still be looking for its size."""

    share: Fraction = 0.05
    """Afterwards so large a share of steps may be skipped,"""

    window: Annotated[Int, Field(ge=20)] = 200
    """of so many in a row."""


class GradientScale(Rule):
    """Steps that mixed precision skips, and a gradient scale that goes to zero."""

    name = "gradient_scale"
    certainty = 0.8
    definition = (
        "`torch.amp.GradScaler` skips a step whose gradients are not finite, and halves its scale. "
        "An error: the scale is below `smallest`, so it is not the scaling that makes them "
        "overflow. A warning: after the first `calibration` steps, more than `share` of some "
        "`window` steps in a row are skipped; a doubled scale that is too large costs one in "
        "thousands. Of a skipped step the gradients, which nobody used, are not shown to other "
        "rules."
    )
    source = (
        "PyTorch's documentation of GradScaler: steps are skipped in the first iterations, then "
        "rarely, once every few hundred or thousand. Megatron-LM ends where the scale would be "
        "below 1."
    )
    advice = (
        "Look where the gradients become infinite or NaN, and run that part in float32 "
        "(`torch.autocast(..., enabled=False)`); or use bfloat16, which needs no scaling. See that "
        "`scaler.unscale_` comes before clipping, and `scaler.update()` once per step."
    )
    explained_by = ("nonfinite", "half_overflow")
    Parameters = ScaleParameters

    _skipped = 0
    _last = -1
    _often = -1  # the first step at which too many were skipped
    _heard = False
    _lowest = float("inf")
    _collapsed = -1  # the first step at which the scale was too small
    _slot = -1  # the first gradient of a skipped step that is not finite
    _latest: deque[int]  # the latest skipped steps, one more than may be

    def reset(self) -> None:
        """Forgets the run."""
        super().reset()
        allowed = float(self.parameters.share * self.parameters.window)
        self._latest = deque(maxlen=int(allowed) + 1)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Takes scales, and steps that were skipped."""
        if numbers.name == GRAD_SCALE:
            self._heard = True
            self._lowest = min(self._lowest, float(numbers.values.min()))
            small = numbers.steps[numbers.values < self.parameters.smallest]
            if len(small) and self._collapsed < 0:
                self._collapsed = int(small[0])
        elif numbers.name == SKIPPED_STEP:
            for step in numbers.steps.tolist():
                self._skip(step)

    def _skip(self, step: int) -> None:
        if step == self._last:
            return  # another optimizer of the same step
        self._skipped, self._last = self._skipped + 1, step
        if step < self.parameters.calibration:
            return
        latest = self._latest
        latest.append(step)
        full = len(latest) == latest.maxlen
        if full and self._often < 0 and step - latest[0] < self.parameters.window:
            self._often = latest[0]

    def look_at_skipped(self, window: Window) -> None:
        """Remembers the first gradient that is not finite, the one nearest to the loss."""
        if self._slot >= 0 or window.skipped is None or not window.skipped.any():
            return
        at = np.flatnonzero(window.table.backward)
        wild = window.read("nonfinite", at, "abs_max")[window.skipped] > 0
        rows = np.flatnonzero(wild.any(1))
        if len(rows):
            slots = at[wild[rows[0]]]
            self._slot = int(slots[window.table.order[slots].argmax()])

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns one finding, the worse one."""
        if self._collapsed < 0 and self._often < 0:
            return []
        severity, step, text = self._words()
        place = None if self._slot < 0 else scene.table.place(self._slot)
        where = "" if place is None else f" The first one that was recorded is {place}."
        return [
            self.finding(
                scene,
                place=place,
                severity=severity,
                first_step=step,
                message=text + where,
                evidence={"skipped": self._skipped, "smallest scale": self._lowest},
            )
        ]

    def _words(self) -> tuple[Severity, int, str]:
        if self._collapsed >= 0:
            text = (
                f"The gradient scale is below {self.parameters.smallest:g} from step "
                f"{self._collapsed} on ({self._lowest:.3g} at its smallest): gradients are not "
                "finite however the loss is scaled."
            )
            return "error", self._collapsed, text
        text = (
            f"From step {self._often} on more than {self.parameters.share:.0%} of the steps are "
            "skipped because a gradient is not finite."
        )
        return "warning", self._often, text

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        return None if self._heard else "no torch.amp.GradScaler was seen to step an optimizer"
