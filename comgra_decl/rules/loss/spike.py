"""Sudden jumps in the loss."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Factor,
    Field,
    Finding,
    Int,
    LossRule,
    Positive,
    RuleParameters,
    Scene,
    per_run,
)

_PART = 0.25  # share of the first losses by which a spike must exceed the mean
_RECOVERED = 1.5  # a loss below this multiple of the level before the spike has recovered
_LEFT = 0.25  # the same limit, as a share of the rise
_MOST = 63  # maximum number of spikes to remember, not counting the latest
_AFTER = 32  # number of steps for which a rise in the learning rate may cause a spike


class SpikeParameters(RuleParameters):
    """Options of `loss_spike`."""

    sigmas: Positive = 8.0
    """Largest allowed loss, in standard deviations above the mean of the window."""

    times: Factor = 3.0
    """Largest allowed loss, as a multiple of that mean; a spike exceeds both limits."""

    window: Annotated[Int, Field(ge=20, le=10_000)] = 64
    """Number of previous losses to compare with; at least half of them are required."""


@dataclass(frozen=True)
class _Jump:
    """A loss that jumped, and the limit for the loss after it."""

    step: int
    value: float
    limit: float
    counted: bool
    level: float  # mean of the preceding losses

    @property
    def recovered(self) -> float:
        """Mean loss at which training has recovered."""
        return max(_RECOVERED * self.level, self.level + _LEFT * (self.value - self.level))


class _Past:
    """Latest losses, first losses, and spikes so far."""

    def __init__(self, window: int) -> None:
        self.values: deque[float] = deque(maxlen=window)
        self.first: list[float] = []
        self.jump: _Jump | None = None  # the previous loss, if it jumped
        self.spikes = 0
        self.lasting: list[_Jump] = []  # spikes after which the next loss exceeded the limit
        self.after = 0  # number of losses since the last of them
        self.first_spike = -1
        self.last_spike = -1
        self.worst = 0.0
        self.worst_step = -1

    def count(self, step: int, value: float) -> None:
        """Count a spike."""
        self.spikes += 1
        self.first_spike = step if self.first_spike < 0 else self.first_spike
        self.last_spike = step
        if value > self.worst:
            self.worst, self.worst_step = value, step


class LossSpike(LossRule):
    """Sudden jumps in the loss."""

    name = "loss_spike"
    certainty = 0.5
    definition = (
        "A loss exceeds the mean of the previous `window` losses by `sigmas` standard deviations, "
        "and is more than `times` that mean. It must also exceed the mean by a quarter of the "
        "median of the first ten losses. If the next loss is less than half as many standard "
        "deviations above the mean, it must also exceed the mean by a quarter of the first loss. "
        "These conditions exclude single unusual batches late in training, when losses are very "
        "small. The finding is a warning if a spike impairs training, and otherwise a hint. A "
        "spike does not impair training in four cases. (1) The next loss is less than half as many "
        "standard deviations above the mean, so the spike was caused by a single batch, for "
        "example a small last batch. (2) Training has recovered: the mean of a quarter of `window` "
        f"losses has since fallen to {_RECOVERED} times the mean before the spike, or by "
        f"{1 - _LEFT:.0%} of the rise. (3) The magnitude or shape of inputs or targets changes at "
        f"the spike, as in a curriculum. (4) The learning rate has risen in the {_AFTER} steps "
        "before it, as in warm restarts. Spikes in steps with several losses (as in adversarial "
        "training) and in losses that depend on actions or on outputs of models without gradients "
        "(as in reinforcement learning) are never more than a hint."
    )
    source = (
        "OLMo-core's SkipStepOptimizer (6 standard deviations over 128 steps) and Lightning's "
        "SpikeDetection (twice the running mean). The limits here are stricter, so that only "
        "relevant jumps are reported."
    )
    advice = (
        "Inspect the batch used in that step, clip gradients, or lower the learning rate or Adam's "
        "beta2. With `keep: {when: [loss_spike]}`, the steps before the next spike are recorded in "
        "full."
    )
    explained_by = (
        "nonfinite",
        "exploding_gradient",
        "large_update",
        "loss_diverges",
        "unusual_momentum",
    )
    Parameters = SpikeParameters

    _past: dict[str, _Past] = per_run(dict)

    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Compare each loss with the previous ones."""
        past = self._past.setdefault(type_, _Past(self.parameters.window))
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            if np.isfinite(value):
                self._compare(past, step, value)

    def _compare(self, past: _Past, step: int, value: float) -> None:
        known = past.values
        jump, past.jump = past.jump, None
        past.after += 1
        if jump is not None and value > jump.limit:
            past.lasting, past.after = [*past.lasting[-_MOST:], jump], 0
            if not jump.counted:
                past.count(jump.step, jump.value)
        if len(known) >= self.parameters.window // 2 and value > 1.5 * known[-1]:
            latest = np.array(known)
            mean, deviation = latest.mean(), latest.std(ddof=1)
            rise = value - mean
            enough = rise > self.parameters.sigmas * deviation and value > mean * self._times
            usual = abs(float(np.median(past.first)))
            if enough and rise > _PART * usual:
                counted = bool(rise > _PART * max(usual, abs(past.first[0])))
                if counted:
                    past.count(step, value)
                limit = float(mean + 0.5 * self.parameters.sigmas * deviation)
                past.jump = _Jump(step, value, limit, counted, float(mean))
        if len(past.first) < 10:
            past.first.append(value)
        known.append(value)
        if past.lasting and past.after >= self._last:
            low = float(np.mean([*known][-self._last :]))
            past.lasting = [jump for jump in past.lasting if low > jump.recovered]

    @property
    def _last(self) -> int:
        """Number of losses whose mean shows whether training has recovered."""
        return int(self.parameters.window) // 4

    @property
    def least(self) -> int:
        """Return how many losses precede the first possible spike, and that loss itself."""
        return int(self.parameters.window) // 2 + 1

    @property
    def _times(self) -> float:
        return float(self.parameters.times)

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Return a finding about the first spike, with the total number."""
        past = self._past.get(type_)
        if past is None or not past.spikes:
            return None
        more = f" and {past.spikes - 1} more times" if past.spikes > 1 else ""
        return self.finding(
            scene,
            first_step=past.first_spike,
            last_step=past.last_spike,
            message=f"The loss jumps at step {past.first_spike}{more}; its maximum is "
            f"{past.worst:.4g} at step {past.worst_step}.",
            evidence={"spikes": past.spikes, "highest": past.worst},
            severity=self.severity if self._impairs(scene, past) else "hint",
        )

    def _impairs(self, scene: Scene, past: _Past) -> bool:
        """Return whether training has not recovered from a spike that nothing else explains."""
        waiting = past.after < self._last and not scene.ended
        return (
            not self.several
            and not waiting
            and any(
                not scene.phases.data_changed(jump.step - 1, jump.step)
                and not scene.phases.rate_rose(jump.step - _AFTER, jump.step)
                for jump in past.lasting
            )
            and not scene.bootstraps
        )
