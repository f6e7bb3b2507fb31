"""Base classes for rules about the loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.base import Rule, Scene, per_run
from comgra_decl.rules.curve import Curve
from comgra_decl.rules.finding import Finding
from comgra_decl.rules.window import Numbers

EVALUATION_TYPES = ("eval", "val", "valid", "validation", "test")
"""Types of execution whose losses are validation losses."""

_NAMES = ("*val*loss*", "*valid*loss*", "*eval*loss*", "*test*loss*", "*dev*loss*")


class LossRule(Rule):
    """A rule about the training loss: the `loss` metric of its most frequent type of execution."""

    _losses: dict[str, int] = per_run(dict)
    several = False
    """Whether steps have more than one loss, as in adversarial training."""

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Process the next losses."""
        self.several = self.several or numbers.name.startswith("loss[")
        if numbers.name == "loss":
            self._losses[numbers.type] = self._losses.get(numbers.type, 0) + len(numbers.steps)
            self.take(numbers.type, numbers.steps, numbers.values)

    @abstractmethod
    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Process the next losses of a type of execution."""

    @abstractmethod
    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Return a finding about the loss of a type of execution, if there is a problem."""

    @property
    def least(self) -> int:
        """Number of losses required before `judge` is called."""
        return int(getattr(self.parameters, "least", 1))

    @property
    def least_of_ended(self) -> int:
        """Number of losses required once the run has ended; `judge` must then use wider limits."""
        return min(self.least, int(getattr(self.parameters, "least_of_ended", self.least)))

    def needed(self, scene: Scene) -> int:
        """Return the number of losses currently required."""
        return self.least_of_ended if scene.ended else self.least

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the type of execution with the most losses."""
        if not self._losses:
            return []
        type_ = max(self._losses, key=lambda name: self._losses[name])
        enough = self._losses[type_] >= self.needed(scene)
        found = self.judge(scene, type_) if enough else None
        return [] if found is None else [found]

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        count = max(self._losses.values(), default=0)
        if not count:
            return "no loss is logged; set `kpis: {loss: true}`, or call comgra.kpi('loss', value)"
        least = self.needed(scene)
        return None if count >= least else f"it needs {least} losses; the run has {count}"


class CurveRule(LossRule):
    """A rule about the whole loss curve."""

    @property
    def curves(self) -> Mapping[str, Curve]:
        """The curve of each type of execution, shared by all rules."""
        return self.scene.curves

    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Do nothing, because the engine adds the losses to the curves."""


class Validations:
    """Lowest value of each validation loss."""

    def __init__(self) -> None:
        self._best: dict[str, tuple[int, int, float]] = {}  # count, step and value of the lowest

    def look(self, numbers: Numbers) -> None:
        """Process the next values of a validation loss."""
        name = f"{numbers.name} ({numbers.type})"
        for step, value in zip(numbers.steps.tolist(), numbers.values.tolist(), strict=True):
            count, at, best = self._best.get(name, (0, step, float("inf")))
            self._best[name] = (count + 1, *((step, value) if value < best else (at, best)))

    def always_above(self, limit: float, *, least: int) -> tuple[str, int, float] | None:
        """Return the first loss with at least `least` values, none of them below a limit.

        Returns:
            Its name, and the step and value of its minimum; None if there is no such loss.
        """
        for name, (count, step, best) in self._best.items():
            if count >= least and best > limit:
                return name, step, best
        return None


def is_validation(numbers: Numbers) -> bool:
    """Return whether the values are validation losses, by metric name or type of execution."""
    name = numbers.name.lower()
    if numbers.type in EVALUATION_TYPES and "loss" in name:
        return True
    return any(fnmatchcase(name, pattern) for pattern in _NAMES)
