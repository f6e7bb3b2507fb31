"""Steps skipped by mixed precision because gradients are not finite at any scale."""

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
    """Options of `gradient_scale`."""

    smallest: Positive = 1.0
    """Smallest allowed scale; below 1, the loss is scaled down instead of up."""

    calibration: Annotated[Int, Field(ge=0)] = 50
    """Number of initial steps during which the scale may still adapt."""

    share: Fraction = 0.05
    """Largest allowed share of skipped steps in a window after the calibration."""

    window: Annotated[Int, Field(ge=20)] = 200
    """Number of consecutive steps in a window."""


class GradientScale(Rule):
    """Mixed precision that skips many steps, or whose gradient scale drops to zero."""

    name = "gradient_scale"
    certainty = 0.8
    definition = (
        "`torch.amp.GradScaler` skips a step whose gradients are not finite and halves its "
        "scale. The finding is an error if the scale falls below `smallest`, because the "
        "gradients then overflow for a reason other than the scale. It is a warning if, after "
        "the first `calibration` steps, more than `share` of any `window` consecutive steps are "
        "skipped. Normally, only one step in thousands is skipped, when the scale has been "
        "doubled once too often. The gradients of skipped steps are not passed to the other "
        "rules, because they are never used."
    )
    source = (
        "PyTorch's documentation of GradScaler, which states that steps are skipped in the first "
        "iterations and then once every few hundred or thousand. Megatron-LM stops if the scale "
        "would fall below 1."
    )
    advice = (
        "Find out where the gradients become infinite or NaN, and run that part in float32 "
        "(`torch.autocast(..., enabled=False)`). Alternatively, use bfloat16, which does not "
        "require scaling. Call `scaler.unscale_` before clipping and `scaler.update()` once per "
        "step."
    )
    explained_by = ("nonfinite", "half_overflow")
    Parameters = ScaleParameters

    _skipped = 0
    _last = -1
    _often = -1  # the first step of a window with too many skipped steps
    _scaling = False
    _lowest = float("inf")
    _collapsed = -1  # the first step with a scale that is too small
    _slot = -1  # the first non-finite gradient of a skipped step
    _latest: deque[int]  # latest skipped steps; their number is one above the limit

    def reset(self) -> None:
        """Reset the state of the rule."""
        super().reset()
        allowed = float(self.parameters.share * self.parameters.window)
        self._latest = deque(maxlen=int(allowed) + 1)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Process scales and skipped steps from the next records."""
        if numbers.name == GRAD_SCALE:
            self._scaling = True
            self._lowest = min(self._lowest, float(numbers.values.min()))
            small = numbers.steps[numbers.values < self.parameters.smallest]
            if len(small) and self._collapsed < 0:
                self._collapsed = int(small[0])
        elif numbers.name == SKIPPED_STEP:
            for step in numbers.steps.tolist():
                self._skip(step)

    def _skip(self, step: int) -> None:
        if step == self._last:
            return  # another optimizer in the same step
        self._skipped, self._last = self._skipped + 1, step
        if step < self.parameters.calibration:
            return
        latest = self._latest
        latest.append(step)
        full = len(latest) == latest.maxlen
        if full and self._often < 0 and step - latest[0] < self.parameters.window:
            self._often = latest[0]

    def look_at_skipped(self, window: Window) -> None:
        """Store the first non-finite gradient in backward order, which is nearest to the loss."""
        if self._slot >= 0 or window.skipped is None or not window.skipped.any():
            return
        at = np.flatnonzero(window.table.backward)
        wild = window.read("nonfinite", at, "abs_max")[window.skipped] > 0
        rows = np.flatnonzero(wild.any(1))
        if len(rows):
            slots = at[wild[rows[0]]]
            self._slot = int(slots[window.table.order[slots].argmax()])

    def findings(self, scene: Scene) -> list[Finding]:
        """Return one finding; a collapsed scale takes precedence over skipped steps."""
        if self._collapsed < 0 and self._often < 0:
            return []
        severity, step, text = self._worse()
        place = None if self._slot < 0 else scene.table.place(self._slot)
        where = "" if place is None else f" The first such gradient on record is {place}."
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

    def _worse(self) -> tuple[Severity, int, str]:
        if self._collapsed >= 0:
            text = (
                f"The gradient scale is below {self.parameters.smallest:g} from step "
                f"{self._collapsed} on (smallest: {self._lowest:.3g}). The gradients are not "
                "finite at any scale."
            )
            return "error", self._collapsed, text
        text = (
            f"From step {self._often} on, more than {self.parameters.share:.0%} of the steps are "
            "skipped because a gradient is not finite."
        )
        return "warning", self._often, text

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        return None if self._scaling else "no optimizer uses a torch.amp.GradScaler"
