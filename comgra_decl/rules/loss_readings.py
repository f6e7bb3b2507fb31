"""Checklist values for the losses of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.curve import Curve
from comgra_decl.rules.loss_curve import EVALUATION_TYPES, is_validation
from comgra_decl.rules.window import Numbers

RISE = 0.05
"""Relative increase between the first and last losses that is considered a rise."""

FAR_RISE = 0.5
"""Relative increase that is considered a clear rise."""

GAP = 2.0
"""Maximum ratio of validation loss to training loss at which the two are considered equal."""

_ZEROS = 5
_FEW, _ENOUGH, _MANY = 2, 20, 100
_LEAST_VALIDATIONS = 3


@dataclass(frozen=True, slots=True)
class Ends:
    """Training loss at the start and at the end of a run.

    Attributes:
        first: the first loss.
        early: the mean of the first tenth, or of the first quarter if there are fewer than 100
            losses.
        last: the mean of the last tenth or quarter.
        noise: three standard errors of the difference of these means.
        spread: the standard deviation of the losses averaged in `last`.
        low: the lowest of the losses averaged in `last`.
        count: the number of losses.
    """

    first: float
    early: float
    last: float
    noise: float
    spread: float
    low: float
    count: int


Judged = tuple[str, Literal["fine", "unknown", "poor", "bad"]]


class LossReadings:
    """Collects training and validation losses.

    Args:
        curves: see `Scene.curves`.
    """

    def __init__(self, curves: Mapping[str, Curve]) -> None:
        self._curves = curves
        self._losses: dict[str, int] = {}
        self._wild: dict[str, int] = {}
        self._top: dict[str, tuple[float, int]] = {}
        self._zeros: dict[str, tuple[int, int]] = {}  # consecutive ones, and their first step
        self._validation: dict[str, list[tuple[int, float]]] = {}
        self._several = False

    def look(self, numbers: Numbers) -> None:
        """Process the next values of one metric and type of execution."""
        self._several = self._several or numbers.name.startswith("loss[")
        if is_validation(numbers):
            name = "validation loss" if numbers.name == "loss" else numbers.name
            known = self._validation.setdefault(name, [])
            known += zip(numbers.steps.tolist(), numbers.values.tolist(), strict=True)
        elif numbers.name == "loss" and numbers.type not in EVALUATION_TYPES:
            self._take(numbers.type, numbers.steps, numbers.values)

    def _take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self._losses[type_] = self._losses.get(type_, 0) + len(steps)
        self._wild[type_] = self._wild.get(type_, 0) + int((~np.isfinite(values)).sum())
        row, since = self._zeros.get(type_, (0, -1))
        top = self._top.get(type_, (-np.inf, -1))
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            row, since = (row + 1, step if row == 0 else since) if value == 0 else (0, -1)
            top = (value, step) if value > top[0] else top
        self._zeros[type_], self._top[type_] = (row, since), top

    @property
    def _type(self) -> str | None:
        """Type of execution with the most losses."""
        return max(self._losses, key=lambda name: self._losses[name], default=None)

    @property
    def broken(self) -> str:
        """How many losses are not finite; "" if all are finite."""
        type_ = self._type
        if type_ is None or not self._wild[type_]:
            return ""
        return f"{self._wild[type_]} of {self._losses[type_]} losses are NaN or infinite"

    def ends(self) -> Ends | None:
        """Return the losses at the start and the end; None if no finite loss was logged."""
        type_ = self._type
        if type_ is None or not self._curves[type_].count:
            return None
        curve = self._curves[type_]
        part = 0.1 if curve.count >= _MANY else 0.25
        (early, a), (last, b) = curve.mean(0, part), curve.mean(1 - part, 1)
        spread = b * float(np.sqrt(part * curve.count))
        blocks = curve.table[int((1 - part) * len(curve.steps)) :]
        return Ends(
            curve.first,
            early,
            last,
            noise=3 * float(np.hypot(a, b)),
            spread=spread,
            low=float(blocks[:, 2].min()),
            count=curve.count,
        )

    def falling(self) -> Judged | None:
        """Determine whether the loss falls; use only its first and last values."""
        ends, type_ = self.ends(), self._type
        if type_ is None:
            return None
        if ends is None or self._wild[type_]:
            return self.broken, "bad"
        text = f"loss {ends.first:.3g} \u2192 {ends.last:.3g} in {ends.count} steps"
        row, since = self._zeros[type_]
        if row >= _ZEROS:
            return f"{text}; exactly 0 from step {since} on", "poor"
        if self._several:
            return f"{text}; a step has several losses, which do not all have to fall", "unknown"
        verdict = self._fall(ends)
        if verdict == "poor" and ends.last < ends.first:  # the two numbers alone seem to fall
            text += f", after a mean of {ends.early:.3g} at the start"
        return text, verdict

    def _fall(self, ends: Ends) -> Literal["fine", "unknown", "poor", "bad"]:
        """Compare the end with the first loss (a single value) and with the mean of the start.

        A loss that ends above its first value is never considered fine, even if it was higher in
        between.
        """
        if ends.count < _FEW:
            return "unknown"
        above = ends.last - ends.first
        if ends.count < _ENOUGH:  # too few losses to estimate their noise
            if above > FAR_RISE * abs(ends.first):
                return "poor"
            return "fine" if above < 0 else "unknown"
        if ends.low - ends.first > FAR_RISE * abs(ends.first):
            return "bad"  # all losses rise, regardless of variation
        rise = ends.last - ends.early
        over_first = above > max(2 * ends.spread, RISE * abs(ends.first))
        over_start = rise > max(ends.noise, RISE * abs(ends.early)) and above > -0.5 * ends.first
        if over_first or over_start:
            return "bad" if above > FAR_RISE * abs(ends.first) else "poor"
        fell = -rise > min(ends.noise, 0.02 * abs(ends.early)) or ends.last < 0.5 * ends.first
        return "fine" if above < 0 and fell else "poor"

    def steady(self) -> Judged | None:
        """Rates the highest loss relative to the first, which is the untrained model's."""
        ends, type_ = self.ends(), self._type
        if type_ is None:
            return None
        if ends is None:
            return self.broken, "poor"
        top, step = self._top[type_]
        text = f"first {ends.first:.3g}, highest {top:.3g} at step {step}, last {ends.last:.3g}"
        if self.broken:
            return f"{text}; {self.broken}", "poor"
        jumps = ends.first > 0 and top > 2 * max(ends.first, ends.early)
        return text, "poor" if jumps else "fine"

    def validation(self) -> Judged | None:
        """Rates how the first validation loss develops, compared with the training loss."""
        name = next(iter(self._validation), None)
        if name is None:
            return None
        values = [value for _, value in self._validation[name]]
        text = f"{name} {values[0]:.3g} \u2192 {values[-1]:.3g}, lowest {min(values):.3g}"
        wild = sum(not np.isfinite(value) for value in values)
        if wild:
            return f"{text}; {wild} of {len(values)} are NaN or infinite", "poor"
        ends = self.ends()
        if ends is None or self.broken:
            return text, "unknown"
        worse = 0 < GAP * ends.last < values[-1]
        return f"{text}; training loss {ends.last:.3g}", "poor" if worse else "fine"

    def caveats(self) -> list[str]:
        """Return possible problems with the losses, one sentence each."""
        found = []
        row, since = self._zeros.get(self._type or "", (0, -1))
        if row >= _ZEROS:
            found.append(
                f"The loss is exactly 0 from step {since} on. No rule can determine the reason. "
                "Are targets among the inputs, or is a tensor compared with itself?"
            )
        name = self._as_low()
        if name is not None:
            found.append(
                f"{name} has been as low as the training loss from the start. Possible reasons are "
                "dropout or augmentation in training, and samples that are in both data sets."
            )
        return found

    def _as_low(self) -> str | None:
        """Return a validation loss that has fallen and was never above the training loss."""
        type_ = self._type
        if type_ is None:
            return None
        curve = self._curves[type_]
        steps, means = np.array(curve.steps), curve.means
        for name, known in self._validation.items():
            if len(known) < _LEAST_VALIDATIONS or not known[-1][1] < 0.9 * curve.first:
                continue
            near = max(1, len(means) // 20)
            ends = [int(np.searchsorted(steps, step, "right")) for step, _ in known]
            beside = [
                means[max(0, end - near) : end].mean() if end else curve.first for end in ends
            ]
            if all(value <= 1.02 * mean for (_, value), mean in zip(known, beside, strict=True)):
                return name
        return None
