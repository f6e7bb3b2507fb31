"""Regressions, binary decisions and sequences that are no better than a constant prediction."""

from __future__ import annotations

from math import isfinite, log
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    BINARY_LOGITS,
    CLASSIFICATION,
    PROBABILITIES,
    Count,
    CurveRule,
    Field,
    Finding,
    Fraction,
    Int,
    LossCall,
    Numbers,
    RuleParameters,
    Scene,
    Validations,
    Window,
    is_validation,
    per_run,
    read_rows,
    target_of,
    target_slots,
    values_of,
)


class ConstantParameters(RuleParameters):
    """Options of `no_better_than_constant`."""

    gain: Fraction = 0.03
    """Smallest share by which the loss must be below that of the best constant prediction."""

    learned: Fraction = 0.3
    """Share by which the training loss must be below that of the best constant prediction to count
    as memorization."""

    least: Annotated[Int, Field(ge=20)] = 100
    """Number of losses required."""

    patience: Count = 3
    """Number of validation losses required."""


class NoBetterThanConstant(CurveRule):
    """Models that are no better than a constant prediction."""

    name = "no_better_than_constant"
    certainty = 0.65
    definition = (
        "The only loss is one whose best constant prediction has a known cost. For `mse_loss` "
        "with one value per sample, the cost is the variance of the targets. For a binary "
        "cross-entropy, it is the entropy of the targets' mean. For a cross-entropy that does not "
        "have exactly one target per sample, as with the tokens of a sequence, it is the entropy "
        "of their classes. The mean loss of the last quarter is at most a fraction `gain` below "
        "this cost and at most a tenth above it, and has not fallen by two standard errors since "
        "the previous quarter. The rule also reports memorization: the last tenth of the training "
        "loss is a fraction `learned` below the cost, but the lowest of at least `patience` "
        "validation losses is at most a fraction `gain` below it."
    )
    source = (
        "The coefficient of determination, 1 - loss / variance, is then 0. The entropy of the "
        "labels is the cost of the best constant prediction."
    )
    advice = (
        "Inspect some samples and their targets. Are they shuffled independently, shifted, or "
        "flattened in a different order than the predictions? Does the input contain information "
        "about the target?"
    )
    explained_by = (
        "nonfinite",
        "gradient_scale",
        "detached",
        "untrained_parameter",
        "input_independence",
        "single_class",
        "vanishing_gradient",
        "small_update",
        "dead_units",
        "loss_diverges",
        "sigmoid_twice",
        "shrinking_weight",
        "silent_broadcasting",
        "repeated_batch",
        "target_scale",
        "rectified_answer",
        "batch_as_time",
        "learning_rate_schedule",
        "zero_learning_rate",
        "tiny_clipping",
        "strong_decay",
        "lost_updates",
        "cleared_gradient",
        "bounded_answer",
        "zero_derivative",
        "divergence_weight",
        "clamped_values",
    )
    Parameters = ConstantParameters

    _moments: dict[int, NDArray[np.float64]] = per_run(dict)  # 1, mean, mean square, by slot
    _counts: dict[int, dict[int, int]] = per_run(dict)  # of classes, by slot
    _validations = per_run(Validations)

    def look(self, window: Window) -> None:
        """Accumulates statistics of the targets."""
        table = window.table
        at = target_slots(table)
        numbers = [s for s in at.tolist() if "float" in table.infos[s].dtype]
        if window.has("mean", "l2"):
            for slot in numbers:
                self._add(window, slot)
        tokens = [s for s in at.tolist() if "int" in table.infos[s].dtype]
        for row in read_rows(window).tolist() if tokens else ():
            for slot in tokens:
                values = values_of(window, row, slot)
                if values is not None:
                    known = self._counts.setdefault(slot, {})
                    for value, n in zip(*np.unique(values, return_counts=True), strict=True):
                        known[int(value)] = known.get(int(value), 0) + int(n)

    def _add(self, window: Window, slot: int) -> None:
        info = window.table.infos[slot]
        single = len(info.shape) == 1 or (len(info.shape) == 2 and info.shape[1] == 1)
        if not single or info.batch_dim is None:
            return
        at = np.array([slot])
        mean = window.read("mean", at)[:, 0].astype(np.float64)
        spread = window.read("mean", at, "std")[:, 0].astype(np.float64)
        for m, s in zip(mean.tolist(), spread.tolist(), strict=True):
            if isfinite(m) and isfinite(s):
                sums = self._moments.setdefault(slot, np.zeros(3))
                sums += (1, m, m * m + s * s)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Add training and validation losses."""
        if is_validation(numbers):
            self._validations.look(numbers)
        else:
            super().look_at_numbers(numbers)

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Compare both losses with that of the best constant prediction."""
        known = self._cost(scene)
        if known is None or self.several:
            return None
        cost, what = known
        curve = self.curves[type_]
        (before, spread), (last, error) = curve.mean(0.5, 0.75), curve.mean(0.75, 1)
        falls = before - last > 2 * float(np.hypot(spread, error))
        if not falls and (1 - self.parameters.gain) * cost < last < 1.1 * cost:
            return self.finding(
                scene,
                first_step=curve.steps[0],
                message=f"The loss remains at {last:.4g}, that of a constant prediction "
                f"({what}: {cost:.4g}). The model learns nothing about the target from the input.",
                evidence={"loss": last, "constant": cost},
            )
        end, _ = curve.mean(0.9, 1)
        if not end < (1 - self.parameters.learned) * cost:
            return None
        above = self._validations.always_above(
            (1 - self.parameters.gain) * cost, least=self.parameters.patience
        )
        if above is None:
            return None
        name, step, best = above
        return self.finding(
            scene,
            first_step=step,
            message=f"{name} never falls below {best:.4g} (a constant prediction "
            f"costs {cost:.4g}), while the training loss falls to {end:.4g}: the model "
            "memorizes its training data.",
            evidence={"validation": best, "constant": cost, "train": end},
        )

    def _cost(self, scene: Scene) -> tuple[float, str] | None:
        """Return the loss of the best constant prediction and its name, if it is known."""
        if len({(c.function, c.arguments, c.target.slot) for c in scene.calls}) != 1:
            return None
        call = next(iter(scene.calls))
        slot = target_of(scene, call)
        if slot is None or not _is_mean(call):
            return None
        if call.function in CLASSIFICATION and call.target.is_integer:
            return self._of_tokens(scene, slot, call)
        count, total, squares = self._moments.get(slot, np.zeros(3)).tolist()
        if count < 10 or call.prediction.elements != call.target.elements:
            return None
        mean = total / count
        variance = squares / count - mean**2
        if call.function == "mse_loss" and variance > 0:
            return variance, "the variance of the targets"
        binary = call.function in BINARY_LOGITS | PROBABILITIES and 0 < mean < 1
        if binary and abs(variance - mean * (1 - mean)) < 1e-3:
            cost = -mean * log(mean) - (1 - mean) * log(1 - mean)
            return cost, "the entropy of the targets"
        return None

    def _of_tokens(self, scene: Scene, slot: int, call: LossCall) -> tuple[float, str] | None:
        ignored = call.argument("ignore_index", -100)
        known = {c: n for c, n in self._counts.get(slot, {}).items() if c not in (ignored, -100)}
        total = sum(known.values())
        by_sample = len(scene.table.infos[slot].shape) == 1 and (
            scene.table.infos[slot].batch_dim is not None
        )
        if by_sample or len(known) < 2 or total < 50 * len(known):
            return None  # `no_better_than_guessing` handles one class per sample
        shares = np.array([*known.values()]) / total
        return float(-(shares * np.log(shares)).sum()), "the entropy of the classes"


def _is_mean(call: LossCall) -> bool:
    """Whether a loss is the plain mean over its targets."""
    options = dict(call.arguments)
    plain = options.get("reduction", "mean") == "mean" and not options.get("label_smoothing")
    return plain and options.get("weight") is None and options.get("pos_weight") is None
