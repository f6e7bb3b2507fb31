"""Learning rates that a schedule keeps too small, or raises too far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comgra_decl.rules.api import (
    OPTIMIZERS,
    Count,
    Factor,
    Finding,
    Fraction,
    Rule,
    RuleParameters,
    Scene,
    Window,
    began,
    per_run,
    since,
)


class ScheduleParameters(RuleParameters):
    """Options of `learning_rate_schedule`."""

    least: Count = 20
    """Number of steps required."""

    tiny: Fraction = 1e-3
    """A learning rate has no effect if it is below this share of its largest value."""

    warm: Fraction = 0.2
    """Share of the optimizer's learning rate that a warm-up must reach by the end of the run."""

    jump: Factor = 4.0
    """Largest allowed rise between two records, as a multiple of the largest rate so far."""


class LearningRateSchedule(Rule):
    """Schedules that keep the learning rate too small, or raise it too far."""

    name = "learning_rate_schedule"
    certainty = 0.75
    definition = (
        "The largest learning rate of all parameter groups does one of three things. (1) It falls "
        "below `tiny` times its largest value and stays there for at least `least` steps, and for "
        "longer than it was above. (2) The run has ended after at least `least` steps, and the "
        "rate has only risen without ever reaching `warm` times the rate that the optimizer was "
        "created with (`initial_lr`, which schedulers store): the warm-up "
        "never ends. If the rate never changes, a quarter of this limit applies. (3) After "
        "at least `least` steps without a rise, it rises between two records to more than `jump` "
        "times its largest value so far. After a change to another class of optimizer, the rule "
        "starts over."
    )
    source = (
        "Our own definition. A schedule meant for epochs but stepped once per batch decays almost "
        "at once. One meant for batches but stepped once per epoch hardly leaves its warm-up."
    )
    advice = (
        "Check that `scheduler.step()` is called once per unit of the schedule (epoch or step). "
        "Also check `gamma` (below 1 to decay), the milestones and the number of warm-up steps."
    )
    explained_by = ("nonfinite",)
    Parameters = ScheduleParameters

    _held: set[str] = per_run(set)  # the classes and parameters of the last record's optimizers
    _first: tuple[int, float] | None = None
    _most = 0.0
    _before: tuple[int, float] | None = None
    _intended: float | None = None
    _grew = -1  # the last record in which it rose
    _falls = False
    _low: tuple[int, int, float] | None = None  # since, after, rate before
    _jump: tuple[int, int, float, float] | None = None

    def look(self, window: Window) -> None:
        """Follow the learning rates."""
        for optimizers, first, stop in window.spans(OPTIMIZERS):
            rates, intended = _rates(optimizers)
            if not rates:
                continue
            held = {_held(optimizer) for optimizer in optimizers}
            if held != self._held:  # another optimizer has rates of its own
                self._held, self._before, self._intended = held, None, None
            rate = max(rates)
            if intended:
                self._intended = max(intended)
            self._take(int(window.steps[first]), rate)
            self._before = int(window.steps[stop - 1]), rate

    def _take(self, step: int, rate: float) -> None:
        if self._before is None:
            self._first = self._before = step, rate
            self._most, self._grew = rate, step
            self._falls, self._low = False, None
            return
        at, before = self._before
        flat = at - self._grew >= self.parameters.least
        if self._jump is None and flat and rate > self.parameters.jump * self._most > 0:
            self._jump = step, at, before, rate
        if rate > before:
            self._grew = step
        self._falls = self._falls or rate < before
        self._most = max(self._most, rate)
        if rate >= self.parameters.tiny * self._most:
            self._low = None
        elif self._low is None:
            self._low = step, at, rate
        self._before = step, rate

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first of these cases that applies."""
        if self._first is None or self._before is None:
            return []
        found = self._jumps(scene) or self._vanishes(scene) or self._warms(scene)
        return [] if found is None else [found]

    def _jumps(self, scene: Scene) -> Finding | None:
        if self._jump is None:
            return None
        step, after, before, rate = self._jump
        return self.finding(
            scene,
            first_step=step,
            after_step=after,
            message=f"The learning rate jumps from {before:.3g} to {rate:.3g} "
            f"{began(step, after).replace('step ', 'at step ')}.",
            evidence={"rate": rate, "before": before},
        )

    def _vanishes(self, scene: Scene) -> Finding | None:
        if self._low is None or self._first is None:
            return None
        step, after, rate = self._low
        below, above = scene.last_step - step, after - self._first[0]
        if below < max(self.parameters.least, above):
            return None
        return self.finding(
            scene,
            first_step=step,
            after_step=after,
            message=f"The learning rate falls from {self._most:.3g} to {rate:.3g} "
            f"{since(step, after)} and remains this small for {below} steps: the schedule ends "
            f"after {100 * (above + 1) / (scene.last_step + 1):.0f}% of the training.",
            evidence={"rate": rate, "largest": self._most, "steps": below},
        )

    def _warms(self, scene: Scene) -> Finding | None:
        if self._before is None or self._first is None or self._intended is None:
            return None
        enough = scene.ended and scene.last_step >= self.parameters.least
        rises = self._before[1] > self._first[1]
        limit = self.parameters.warm * self._intended / (1 if rises else 4)
        if not enough or self._falls or self._most >= limit:
            return None
        return self.finding(
            scene,
            first_step=self._first[0],
            message=f"The learning rate never leaves its warm-up: after {scene.last_step + 1} "
            f"steps, it is {self._before[1]:.3g}, "
            f"{100 * self._before[1] / self._intended:.2g}% of the optimizer's "
            f"{self._intended:.3g}.",
            evidence={"rate": self._before[1], "intended": self._intended},
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if self._first is None:
            return "no learning rate is known"
        least = self.parameters.least
        return None if scene.last_step >= least else f"it needs {least} steps"


def _held(optimizer: Mapping[str, Any]) -> str:
    """Return the class of an optimizer and the numbers of parameters in its groups."""
    sizes = [group.get("parameters") for group in optimizer.get("groups") or ()]
    return f"{optimizer.get('class')} {sizes}"


def _rates(optimizers: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Return the learning rates of all groups, and those with which they were created."""
    groups = [group for optimizer in optimizers for group in optimizer.get("groups") or ()]
    return [
        [float(g[name]) for g in groups if isinstance(g.get(name), (int, float))]
        for name in ("lr", "initial_lr")
    ]
