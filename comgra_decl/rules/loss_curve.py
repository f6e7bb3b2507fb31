"""The loss over a whole run, and the base classes of rules about it."""

from __future__ import annotations

from abc import abstractmethod
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.base import Rule, Scene, per_run
from comgra_decl.rules.finding import Finding
from comgra_decl.rules.window import Numbers

BLOCKS = 128
"""Number of blocks after a merge; twice as many blocks are merged in pairs."""

EVALUATION_TYPES = ("eval", "val", "valid", "validation", "test")
"""Types of execution whose losses are validation losses."""

_NAMES = ("*val*loss*", "*valid*loss*", "*eval*loss*", "*test*loss*", "*dev*loss*")


class Curve:
    """Mean, deviation and extremes of a metric, in blocks with equal numbers of values.

    Requires constant memory. The blocks depend only on the values, not on how they are divided.
    """

    def __init__(self) -> None:
        self.size = 1
        """Number of values in a block."""
        self.count = 0
        """Number of finite values so far."""
        self.first = float("nan")
        """The first value."""
        self.steps: list[int] = []
        """The first step of each complete block."""
        self._sums: list[tuple[float, float, float, float]] = []  # sum, sum of squares, min, max
        self._open: list[tuple[int, float]] = []

    def add(self, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Adds the next values; ignores non-finite ones."""
        finite = np.isfinite(values)
        if not self.count and finite.any():
            self.first = float(values[finite][0])
        self.count += int(finite.sum())
        self._open += zip(steps[finite].tolist(), values[finite].tolist(), strict=True)
        while len(self._open) >= self.size:
            self._close()

    def _close(self) -> None:
        part, self._open = self._open[: self.size], self._open[self.size :]
        values = np.array([value for _, value in part])
        self.steps.append(part[0][0])
        sums = values.sum(), (values**2).sum(), values.min(), values.max()
        self._sums.append((float(sums[0]), float(sums[1]), float(sums[2]), float(sums[3])))
        if len(self._sums) == 2 * BLOCKS:
            self._sums = [_joined(a, b) for a, b in zip(*[iter(self._sums)] * 2, strict=True)]
            self.steps = self.steps[::2]
            self.size *= 2

    @property
    def table(self) -> NDArray[np.float64]:
        """Sum, sum of squares, minimum and maximum of each complete block, of shape [blocks, 4]."""
        return np.array(self._sums).reshape(-1, 4)

    @property
    def means(self) -> NDArray[np.float64]:
        """Mean of each complete block."""
        return self.table[:, 0] / self.size

    def mean(self, start: float, stop: float) -> tuple[float, float]:
        """Returns the mean and standard error of a part of the curve, given as two fractions."""
        blocks = len(self._sums)
        first, last = int(start * blocks), max(int(start * blocks) + 1, int(stop * blocks))
        part = self.table[first:last]
        if not len(part):
            return float("nan"), float("nan")
        number = len(part) * self.size
        mean = part[:, 0].sum() / number
        variance = max(0.0, part[:, 1].sum() / number - mean**2)
        return float(mean), float(np.sqrt(variance / number))


def _joined(
    a: tuple[float, float, float, float], b: tuple[float, float, float, float]
) -> tuple[float, float, float, float]:
    return a[0] + b[0], a[1] + b[1], min(a[2], b[2]), max(a[3], b[3])


class LossRule(Rule):
    """A rule about the training loss: the metric `loss` of its most frequent type of execution."""

    _losses: dict[str, int] = per_run(dict)
    several = False
    """Whether steps have more than one loss, as in adversarial training."""

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Processes the next losses."""
        self.several = self.several or numbers.name.startswith("loss[")
        if numbers.name == "loss":
            self._losses[numbers.type] = self._losses.get(numbers.type, 0) + len(numbers.steps)
            self.take(numbers.type, numbers.steps, numbers.values)

    @abstractmethod
    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Processes the next losses of a type of execution."""

    @abstractmethod
    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Returns a finding about the loss of a type of execution, if there is a problem."""

    @property
    def least(self) -> int:
        """Number of losses required before `judge` is called."""
        return int(getattr(self.parameters, "least", 1))

    @property
    def least_of_ended(self) -> int:
        """Number of losses required once the run has ended; `judge` must then use wider limits."""
        return min(self.least, int(getattr(self.parameters, "least_of_ended", self.least)))

    def needed(self, scene: Scene) -> int:
        """Returns the number of losses currently required."""
        return self.least_of_ended if scene.ended else self.least

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding about the type of execution with the most losses."""
        if not self._losses:
            return []
        type_ = max(self._losses, key=lambda name: self._losses[name])
        enough = self._losses[type_] >= self.needed(scene)
        found = self.judge(scene, type_) if enough else None
        return [] if found is None else [found]

    def missing(self, scene: Scene) -> str | None:
        """Returns the reason why the run could not be checked, or None."""
        count = max(self._losses.values(), default=0)
        if not count:
            return "no loss is logged; set `kpis: {loss: true}`, or call comgra.kpi('loss', value)"
        least = self.needed(scene)
        return None if count >= least else f"it needs {least} losses; the run has {count}"


class CurveRule(LossRule):
    """A rule about the whole loss curve."""

    curves: dict[str, Curve] = per_run(dict)
    """The curve of each type of execution."""

    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Adds the next losses to the curve."""
        self.curves.setdefault(type_, Curve()).add(steps, values)


def is_validation(numbers: Numbers) -> bool:
    """Returns whether the values are validation losses, by metric name or type of execution."""
    name = numbers.name.lower()
    if numbers.type in EVALUATION_TYPES and "loss" in name:
        return True
    return any(fnmatchcase(name, pattern) for pattern in _NAMES)
