"""Losses that jump up and down from step to step."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Field,
    Finding,
    Int,
    LossRule,
    Number,
    Positive,
    RuleParameters,
    Scene,
    per_run,
    trained_models,
)


class OscillatingParameters(RuleParameters):
    """Options of `loss_oscillates`."""

    correlation: Annotated[Number, Field(gt=-1, lt=0)] = -0.5
    """Smallest allowed correlation between consecutive losses; 0 for independent losses."""

    size: Positive = 0.2
    """Largest allowed standard deviation, relative to the mean."""

    window: Annotated[Int, Field(ge=20, le=10_000)] = 50
    """Number of consecutive losses to examine."""


class LossOscillates(LossRule):
    """A loss that jumps up and down from step to step."""

    name = "loss_oscillates"
    certainty = 0.55
    definition = (
        "Once the linear trend is subtracted from `window` consecutive losses, neighbouring losses "
        "have a correlation below `correlation`, and their standard deviation is above `size` "
        "times their mean. Every step then overshoots the minimum. Pure "
        "noise between batches has a correlation of 0. The rule applies only if a single model "
        "is trained with a single loss."
    )
    source = "TheDeepChecker counts changes of direction, but these also occur in noise."
    advice = "Lower the learning rate or the momentum."
    explained_by = (
        "nonfinite",
        "large_update",
        "loss_diverges",
        "exploding_gradient",
        "summed_loss",
        "unusual_momentum",
    )
    Parameters = OscillatingParameters

    _open: dict[str, list[tuple[int, float]]] = per_run(dict)
    _found: dict[str, tuple[int, int, float, float]] = per_run(dict)

    @property
    def least(self) -> int:
        """Number of losses in a window."""
        return int(self.parameters.window)

    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Check each complete window."""
        waiting = self._open.setdefault(type_, [])
        waiting += zip(steps.tolist(), values.tolist(), strict=True)
        size = self.parameters.window
        while len(waiting) >= size:
            self._look(type_, waiting[:size])
            del waiting[:size]

    def _look(self, type_: str, part: list[tuple[int, float]]) -> None:
        values = np.array([value for _, value in part])
        if not np.isfinite(values).all():
            return
        time = np.arange(len(values))
        rest = values - np.polyval(np.polyfit(time, values, 1), time)
        spread = float(rest.std())
        size = spread / max(abs(float(values.mean())), 1e-12)
        if size < self.parameters.size:
            return
        correlation = float((rest[1:] * rest[:-1]).mean() / spread**2)
        if correlation < self.parameters.correlation:
            first, _, worst, largest = self._found.get(type_, (part[0][0], 0, 0.0, 0.0))
            last = part[-1][0]
            self._found[type_] = first, last, min(worst, correlation), max(largest, size)

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Return a finding that starts at the first window that meets the condition."""
        kinds = {(call.function, call.prediction.shape[1:]) for call in scene.calls}
        if type_ not in self._found or len(trained_models(scene)) > 1 or len(kinds) > 1:
            return None  # alternating models or tasks share the `loss` metric
        first, last, correlation, size = self._found[type_]
        return self.finding(
            scene,
            first_step=first,
            last_step=last,
            message="The loss jumps up and down: consecutive losses have a correlation of "
            f"{correlation:.2f}, and their standard deviation is {size:.0%} of their mean.",
            evidence={"correlation": correlation, "size": size},
        )
