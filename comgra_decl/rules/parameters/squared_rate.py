"""Schedules whose factor is itself a learning rate."""

from __future__ import annotations

from typing import Annotated, Any

from comgra_decl.rules.api import (
    OPTIMIZERS,
    Field,
    Finding,
    Fraction,
    Int,
    Rule,
    RuleParameters,
    Scene,
    Window,
)

_LARGEST = 0.1  # largest initial rate whose square is not a usual rate


class SquaredParameters(RuleParameters):
    """Options of `squared_rate`."""

    least: Annotated[Int, Field(ge=10)] = 50
    """Number of steps required."""

    near: Fraction = 0.02
    """Largest relative difference between the largest factor and the learning rate."""


class SquaredRate(Rule):
    """Schedules that multiply the learning rate by itself."""

    name = "squared_rate"
    severity = "error"
    certainty = 0.8
    definition = (
        "For `least` steps, the learning rate never exceeds the square of the rate with which the "
        "optimizer was created (`initial_lr`, below 0.1). Its maximum differs from this square by "
        "at most a fraction `near` and was reached in the first half of the run. The factor of "
        "the schedule is then itself a learning rate."
    )
    source = (
        "PyTorch's documentation of `LambdaLR`: the function returns a factor, by which the "
        "initial learning rate is multiplied. Our own definition."
    )
    advice = (
        "Make the function passed to LambdaLR return a factor (such as 1.0) instead of a learning "
        "rate."
    )
    Parameters = SquaredParameters

    _first: tuple[int, float] | None = None  # step, and the initial rate
    _most: tuple[float, int] = (0.0, 0)  # the largest rate and its first step
    _last = -1

    def look(self, window: Window) -> None:
        """Store the largest learning rate."""
        for optimizers, first, stop in window.spans(OPTIMIZERS):
            known = next(filter(None, map(_rate, optimizers)), None)
            if known is None:
                continue
            rate, initial = known
            step = int(window.steps[first])
            self._first = (step, initial) if self._first is None else self._first
            self._most = (rate, step) if rate > self._most[0] * 1.001 else self._most
            self._last = int(window.steps[stop - 1])

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding if the largest factor is the learning rate."""
        if self._first is None or self._last < self.parameters.least:
            return []
        (step, initial), (most, reached) = self._first, self._most
        if reached > self._last / 2 or not 0 < initial < _LARGEST:
            return []
        if abs(most - initial**2) > self.parameters.near * initial**2:
            return []
        return [
            self.finding(
                scene,
                first_step=step,
                message=f"The learning rate is at most {most:.3g}, the square of the optimizer's "
                f"{initial:.3g}: the schedule multiplies it by a learning rate instead of a "
                "factor.",
                evidence={"rate": most, "initial": initial},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if self._first is None:
            return "no optimizer has a schedule"
        least = self.parameters.least
        return None if self._last >= least else f"it needs {least} steps"


def _rate(optimizer: dict[str, Any]) -> tuple[float, float] | None:
    groups = [g for g in optimizer.get("groups") or () if isinstance(g, dict)]
    for group in groups:
        rate, initial = group.get("lr"), group.get("initial_lr")
        if isinstance(rate, (int, float)) and isinstance(initial, (int, float)):
            return float(rate), float(initial)
    return None
