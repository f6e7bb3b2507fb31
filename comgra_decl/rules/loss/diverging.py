"""Losses that keep rising, or fall below their lower bound."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    BINARY_LOGITS,
    CLASSIFICATION,
    ELEMENTWISE,
    PROBABILITIES,
    CurveRule,
    Factor,
    Field,
    Finding,
    Int,
    RuleParameters,
    Scene,
    Severity,
    Window,
    has_other_terms,
    lower_rate,
    per_run,
    target_of,
)

_GROWN = 2.0  # factor; if targets grow by more than this, their loss grows as well
_STARTS = 3  # number of losses considered as the start
_LEAST_START = 1e-2  # replaces smaller initial losses as the reference for later losses
# Times the initial loss; share of the losses after an explosion, and how many of them it takes.
_SMALL, _OFTEN, _MANY = 10.0, 0.2, 10


class DivergingParameters(RuleParameters):
    """Options of `loss_diverges`."""

    growth: Factor = 2.0
    """Largest allowed mean loss, as a multiple of the lowest mean so far."""

    least: Annotated[Int, Field(ge=1)] = 20
    """Number of losses required to compare tenths of the run."""

    explosion: Factor = 1000.0
    """Largest allowed loss, as a multiple of the initial loss; applies to any number of losses."""

    least_of_ended: Annotated[Int, Field(ge=10)] = 10
    """Number of losses required if the run has ended."""


class LossDiverges(CurveRule):
    """A loss that keeps rising."""

    name = "loss_diverges"
    severity = "error"
    certainty = 0.65
    definition = (
        "The mean of the last tenth of all losses is above `growth` times the lowest mean of any "
        "earlier tenth, and above the mean of the first tenth by three standard errors. If a run "
        "has ended with fewer than `least` but at least `least_of_ended` losses, `growth` is "
        "squared, because a tenth then consists of a single loss. The rule also reports a loss "
        "that is not finite. In addition, it reports a loss that exceeds `explosion` times the "
        f"smallest of the first {_STARTS} losses (or times {_LEAST_START:g}, if that is larger). "
        "The latter finding is only a warning if the last loss is no higher than the first one, "
        "only a hint if large and small losses alternate (at least "
        f"{_OFTEN:.0%} of {_MANY} or more later losses are as large, and as many at most "
        f"{_SMALL:g} times the initial one, as where steps of an actor and of a critic "
        "alternate), and only a hint if the targets grow (as values do in reinforcement learning) "
        "to more than "
        f"{_GROWN:g} times their initial magnitude. A loss that keeps rising is only a hint in the "
        "same case. It is also only a hint if inputs or targets change after the lowest tenth (as "
        "in a curriculum), if a step has several losses (as in adversarial training), if no known "
        "loss function compares a prediction with a target, or if the loss also depends on tensors "
        "that no such function compares (as in objectives with several terms, whose weights may "
        "change), on integers that choose among predictions, or on outputs of models without "
        "gradients (as in reinforcement learning)."
    )
    source = (
        "TheDeepChecker, which warns at twice the minimum. The comparison with the first tenth "
        "excludes noise in small losses."
    )
    advice = (
        "Lower the learning rate or use a warmup, and clip gradients. If the loss rises steadily "
        "from the first step, check the sign of the loss."
    )
    explained_by = (
        "nonfinite",
        "exploding_gradient",
        "accumulated_gradient",
        "summed_loss",
        "unmasked_target",
        "policy_sign",
        "actor_sign",
        "unusual_momentum",
        "lagging_copy",
        "idle_term",
    )
    explained_by_earlier = ("negative_loss",)
    Parameters = DivergingParameters

    _nonfinite: dict[str, int] = per_run(dict)
    _start: dict[str, list[float]] = per_run(dict)
    _top: dict[str, tuple[int, float]] = per_run(dict)  # first step of an explosion, highest loss
    _later: dict[str, list[int]] = per_run(dict)  # after an explosion: losses, small, large ones
    _last: dict[str, float] = per_run(dict)
    _targets: dict[int, tuple[float, float]] = per_run(
        dict
    )  # first and latest magnitude of the targets, by slot

    @property
    def least(self) -> int:
        """Number of losses required: 1, because an explosion needs no earlier losses."""
        return 1

    def advise(self, scene: Scene) -> str:
        """Return advice adapted to the optimizer settings."""
        further = "If the loss rises steadily from the first step, check the sign of the loss."
        return lower_rate(scene, self.advice, further=further)

    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Store explosions and the first loss that is not finite."""
        self._see_explosion(type_, steps, values)
        wild = steps[~np.isfinite(values)]
        if len(wild):
            self._nonfinite.setdefault(type_, int(wild[0]))

    def look(self, window: Window) -> None:
        """Store the first and the latest magnitude of the targets of element-wise losses."""
        if not window.has("abs_mean"):
            return
        for call in self.scene.calls:
            slot = target_of(self.scene, call)
            if slot is None or call.function not in ELEMENTWISE:
                continue
            sizes = window.read("abs_mean", np.array([slot]))[:, 0]
            known = sizes[np.isfinite(sizes)].tolist()
            if known:
                first, _ = self._targets.get(slot, (known[0], 0.0))
                self._targets[slot] = first, known[-1]

    @property
    def _targets_grow(self) -> bool:
        """Whether the targets grow, as values do in reinforcement learning."""
        return any(new > _GROWN * first for first, new in self._targets.values())

    def _may_rise(self, scene: Scene, best: int) -> bool:
        """Return whether a healthy training run may have a higher loss than at step `best`."""
        if self._targets_grow or self.several:
            return True
        changed = scene.phases.data_changed(best, scene.last_step)
        return changed or not scene.supervised or has_other_terms(scene)

    def _see_explosion(
        self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]
    ) -> None:
        start = self._start.setdefault(type_, [])
        for step, value in zip(steps.tolist(), np.abs(values).tolist(), strict=True):
            if not np.isfinite(value):
                continue
            self._last[type_] = value
            if len(start) < _STARTS:
                start.append(value)
            usual = max(min(start), _LEAST_START)
            if type_ in self._top:
                later = self._later.setdefault(type_, [0, 0, 0])
                later[0] += 1
                later[1] += value <= _SMALL * usual
                later[2] += value > self.parameters.explosion * usual
            if value > self.parameters.explosion * usual:
                first, highest = self._top.get(type_, (step, 0.0))
                self._top[type_] = first, max(highest, value)

    def _exploded(self, scene: Scene, type_: str) -> Finding | None:
        if type_ not in self._top:
            return None
        (step, highest), start = self._top[type_], self._start[type_][0]
        recovered = self._last[type_] <= start
        later, *kinds = self._later.get(type_, [0, 0, 0])
        return self.finding(
            scene,
            first_step=step,
            message=f"The loss explodes: it reaches {highest:.4g} "
            f"({highest / max(start, _LEAST_START):.3g} times the first loss), first at step "
            f"{step}.",
            severity=self._how_bad(
                recovered=recovered, mixed=later >= _MANY and min(kinds) >= _OFTEN * later
            ),
            certainty=0.85,
            evidence={"first": start, "highest": highest},
        )

    def _how_bad(self, *, recovered: bool, mixed: bool) -> Severity:
        if self._targets_grow or mixed:
            return "hint"
        return "warning" if recovered else self.severity

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Compare the end of the curve with its best part and its start."""
        curve = self.curves[type_]
        if type_ in self._nonfinite:
            step = self._nonfinite[type_]
            text = f"The loss is not finite from step {step} on."
            return self.finding(scene, first_step=step, message=text, certainty=0.9)
        exploded = self._exploded(scene, type_)
        usual = self.parameters.least
        least = min(usual, self.parameters.least_of_ended) if scene.ended else usual
        if exploded is not None or self._losses[type_] < least:
            return exploded
        tenths = [curve.mean(i / 10, (i + 1) / 10) for i in range(10)]
        means = np.array([mean for mean, _ in tenths])
        if len(curve.steps) < 10 or not np.isfinite(means).all():
            return None
        best = int(means[:-1].argmin())
        (last, last_error), (first, first_error) = tenths[-1], tenths[0]
        above = last - first > 3 * float(np.hypot(last_error, first_error))
        growth = self.parameters.growth ** (1 if self._losses[type_] >= usual else 2)
        if not above or means[best] <= 0 or last <= growth * means[best]:
            return None
        at = curve.steps[min(len(curve.steps) - 1, (best + 1) * len(curve.steps) // 10)]
        return self.finding(
            scene,
            first_step=at,
            severity="hint" if self._may_rise(scene, at) else self.severity,
            message=f"The loss diverges: from a minimum of {means[best]:.4g} to {last:.4g} in the "
            f"last tenth of {curve.count} steps.",
            evidence={"best": float(means[best]), "last": last},
        )


_NEVER = CLASSIFICATION | BINARY_LOGITS | PROBABILITIES
"""Losses that are never negative for valid predictions and targets."""


class NegativeParameters(RuleParameters):
    """Options of `negative_loss`."""

    growth: Factor = 10.0
    """Largest allowed decrease of a negative loss with numeric targets, as a multiple of its first
    mean.
    """


class NegativeLoss(CurveRule):
    """A loss that is negative although this should be impossible."""

    name = "negative_loss"
    minimizes = True
    severity = "error"
    certainty = 0.85
    definition = (
        "At least a tenth of all losses are below -0.001, although the model is a classifier, "
        "whose loss cannot be negative. The model counts as a classifier if only "
        "`cross_entropy`, `nll_loss` or a binary cross-entropy compares predictions with targets "
        "and, according to the graph, the loss depends on nothing else. "
        "Alternatively, no such function is called, the targets are not integers, nine out of "
        "ten losses are negative, and the loss keeps falling. (Likelihoods with a learned scale, "
        "as in `wrong_log_scale`, may have any sign.) A negative loss keeps falling if "
        "the magnitude of the mean of the last tenth is more than `growth` times that of the "
        "first tenth."
    )
    source = (
        "AutoTrainer, which reports negative losses where they are impossible. The usual cause is "
        "a wrong sign."
    )
    advice = (
        "Check the sign of the loss, and whether nll_loss receives probabilities instead of "
        "log-probabilities."
    )
    Parameters = NegativeParameters

    _negative: dict[str, list[int]] = per_run(dict)  # count and first step

    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Count the negative losses."""
        below = steps[values < -1e-3]
        if len(below):
            known = self._negative.setdefault(type_, [0, int(below[0])])
            known[0] += len(below)

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Return a finding if negative losses are impossible for this type of target."""
        count, first = self._negative.get(type_, [0, 0])
        if any(call.target.is_integer and call.function not in _NEVER for call in scene.calls):
            return None  # actions of a policy, whose loss can have either sign
        if any(min(term["factor"]) < 0 for term in scene.terms("policy")):
            return None  # the same, in a cross-entropy that advantages weight
        if not scene.calls or not all(call.function in _NEVER for call in scene.calls):
            return self._endless(scene, type_, count, first)
        if count < max(3, 0.1 * self._losses[type_]) or has_other_terms(scene):
            return None
        return self.finding(
            scene,
            first_step=first,
            message=f"The loss is negative from step {first} on, which is impossible for a "
            "classifier.",
            evidence={"negative": count},
        )

    def _endless(self, scene: Scene, type_: str, count: int, first: int) -> Finding | None:
        """Return a finding if a negative loss with numeric targets keeps falling."""
        curve = self.curves[type_]
        (start, _), (end, _) = curve.mean(0, 0.1), curve.mean(0.9, 1)
        often = count >= max(20, 0.9 * self._losses[type_])
        if self.several or not often or not end < self.parameters.growth * start < 0:
            return None
        if any(counts.get("against") for counts in (scene.objectives or [[]])[0]):
            return None  # a likelihood with a learned scale, which may have any sign
        return self.finding(
            scene,
            first_step=first,
            message=f"The loss is negative and keeps falling, from {start:.4g} to {end:.4g}: "
            "training keeps increasing the quantity that it measures.",
            evidence={"first": start, "last": end},
            severity="warning",
        )
