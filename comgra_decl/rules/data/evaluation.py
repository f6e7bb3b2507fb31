"""Activations that differ between evaluation and training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Bools,
    Count,
    Factor,
    Finding,
    Mask,
    Measured,
    Patient,
    Place,
    Previous,
    Rule,
    RuleParameters,
    Scene,
    SlotInfo,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    computed_from_targets,
    keeps_statistics,
    per_run,
)

_CATCHES_UP = 0.7  # share of the logarithm of the factor that remains by the next evaluation
_EXACT = 1e-5  # largest mean of data that is standardized exactly
_UNIT = 0.02  # of standard deviations: they may be divided by n or by n - 1
_MOST_WAITING = 64  # number of pending evaluations; a run may evaluate only after training


@dataclass(frozen=True)
class _Evaluation:
    """Spreads of slots in an evaluation record, relative to the last training step."""

    step: int
    at: Slots
    there: Bools
    spread: NDArray[np.float64]
    ratio: NDArray[np.float64]


class EvaluationParameters(Patient):
    """Options of `evaluation_gap`."""

    patience: Count = 2
    """Number of consecutive evaluation records that must meet the condition."""

    factor: Factor = 3.0
    """Largest allowed ratio between the two spreads."""


class EvaluationGap(SlotRule):
    """Activations that differ between evaluation and training."""

    name = "evaluation_gap"
    certainty = 0.6
    definition = (
        "For `patience` evaluation records in a row, the standard deviation of a tensor is more "
        "than `factor` times its value in training, or less than 1 / `factor` times that value. "
        "This must hold relative to the recorded training steps both before and after the "
        "evaluation, because a value between the two may simply reflect the progress of training. "
        "Values that are smaller in evaluation count only for inputs and for models with running "
        "statistics (BatchNorm, InstanceNorm), because the noise of dropout, which can be applied "
        "by a function, is missing in evaluation. "
        "An evaluation is ignored if the logarithm of the factor has fallen by "
        f"{1 - _CATCHES_UP:.0%} since the previous one: the running statistics of BatchNorm start "
        "at 0 and 1 and take time to catch up."
    )
    source = (
        "TheDeepChecker, which compares activations in both modes and requires a similarity of "
        "0.75."
    )
    advice = (
        "The usual cause is BatchNorm, whose running statistics lag behind: raise the momentum, "
        "train longer, or recompute them. Otherwise check whether training and evaluation use "
        "different preprocessing."
    )
    explained_by = ("nonfinite", "loss_diverges", "large_update", "repeated_batch")
    Parameters = EvaluationParameters
    of_state = True
    statistics = ("std",)
    evidence = "factor"
    needs = "outputs, and evaluations (`schedule.eval`)"

    _train = per_run(Previous)
    _factor = per_run(Previous)
    _waiting: list[_Evaluation] = per_run(list)
    _judged = 0

    def wants(self, table: SlotTable) -> Mask:
        """Return outputs and inputs."""
        return table.outputs | table.where(lambda i: i.kind == "input" and "float" in i.dtype)

    def look(self, window: Window) -> None:
        """Check the evaluations before these steps, and store the spreads in training."""
        at = self.columns(window.table)
        if not window.has("std") or not len(at):
            return
        spread = window.read("std", at).astype(np.float64)
        after = np.full(len(window.table), np.nan)
        after[at] = spread[0]
        with np.errstate(all="ignore"):
            for evaluation in self._waiting:
                self._judge(evaluation, after[evaluation.at])
        self._waiting.clear()
        self._train.look(at, spread)

    def look_at_evaluation(self, window: Window) -> None:
        """Store evaluations until the next training step."""
        at = self.columns(window.table)
        if not window.has("std") or not len(at):
            return
        with np.errstate(all="ignore"):
            _, ratios = self.measure(window, at)
        spreads, there = window.read("std", at).astype(np.float64), window.present[:, at]
        for row in range(min(len(window), _MOST_WAITING - len(self._waiting))):
            self._waiting.append(
                _Evaluation(int(window.steps[row]), at, there[row], spreads[row], ratios[row])
            )

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the spread divided by its value in the previous training step."""
        ratio = _divided(window.read("std", at).astype(np.float64), self._train.known(at))
        return self._off(ratio, ratio)[0], ratio

    def _judge(self, evaluation: _Evaluation, after: NDArray[np.float64]) -> None:
        later = _divided(evaluation.spread, after)
        hit, factor = self._off(evaluation.ratio, later)
        if (hit & (later < 1)).any():
            hit &= (later > 1) | self._has_no_noise(evaluation.at)
        before = self._factor.look(evaluation.at, factor[None])[0]
        hit &= ~(np.log(factor) < _CATCHES_UP * np.log(before))
        self._judged += 1
        self.streak.look(
            np.array([evaluation.step]),
            evaluation.at,
            hit=hit[None],
            present=evaluation.there[None],
            evidence=factor[None],
        )

    def _has_no_noise(self, at: Slots) -> Bools:
        """Return where a smaller spread in evaluation cannot be explained by dropout."""
        modules = self.scene.documents.get("modules") or []
        if any(map(keeps_statistics, modules)):
            return np.ones(len(at), np.bool_)
        infos = self.scene.table.infos
        return np.array([infos[slot].kind == "input" for slot in at.tolist()], np.bool_)

    def _off(
        self, before: NDArray[np.float64], after: NDArray[np.float64]
    ) -> tuple[Bools, NDArray[np.float64]]:
        """Return where both ratios are too large or too small, and the ratio closer to 1."""
        factor = np.fmax(np.fmin(before, after), 1 / np.fmax(before, after))
        return factor > self.parameters.factor, factor

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out losses."""
        return fired[~np.isin(fired, list(computed_from_targets(scene)))]

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        if self._judged < self.patience:
            return (
                f"it needs {self.patience} evaluation records between training records; the run "
                f"has {self._judged} (see `model.eval()` and `schedule.eval`)"
            )
        return super().missing(scene)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} differs between evaluation and training: its spread "
            f"changes by a factor of {self.streak.worst[slot]:.3g}."
        )


def _divided(spread: NDArray[np.float64], train: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ratio of the spread to its value in training; NaN where either is zero."""
    return np.where((spread > 0) & (train > 0), spread / train, np.nan)


class ShiftParameters(Patient):
    """Options of `evaluation_shift`."""

    patience: Count = 2
    """Number of consecutive evaluation records that must meet the condition."""

    offset: Factor = 1.5
    """Largest allowed difference of means, in standard deviations of the inputs in training."""


class EvaluationShift(Rule):
    """Inputs whose mean differs between evaluation and training."""

    name = "evaluation_shift"
    certainty = 0.7
    definition = (
        "In the last `patience` evaluation records, the mean of a floating-point input of the "
        "model differs from its mean over all training records by more than `offset` times its "
        "standard deviation in training, and by more than five times the standard deviation of "
        "that mean between training records."
    )
    source = "Our own definition; the usual cause is different preprocessing."
    advice = (
        "Apply the same preprocessing, with the mean and standard deviation of the training data, "
        "in training and evaluation."
    )
    Parameters = ShiftParameters

    # of each input by role: numbers of records, sums and squares of means, sum of variances
    _train: dict[str, list[float]] = per_run(dict)
    _evaluated: dict[str, list[tuple[int, float]]] = per_run(dict)

    def look(self, window: Window) -> None:
        """Add up the means and variances of inputs in training."""
        for each in _inputs(window, "forward"):
            known = self._train.setdefault(each.role, [0.0, 0.0, 0.0, 0.0])
            for number, value in enumerate((1.0, each.mean, each.mean**2, each.spread**2)):
                known[number] += value

    def look_at_evaluation(self, window: Window) -> None:
        """Store the means of inputs in evaluation."""
        for each in _inputs(window, "forward"):
            known = self._evaluated.setdefault(each.role, [])
            known.append((each.step, each.mean))
            del known[: -self.parameters.patience]

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first input whose mean differs."""
        for role, records in self._evaluated.items():
            count, total, squares, variances = self._train.get(role, [0.0] * 4)
            if count < 5 or len(records) < self.parameters.patience:
                continue
            mean = total / count
            between = float(np.sqrt(max(0.0, squares / count - mean**2)))
            spread = float(np.sqrt(variances / count))
            limit = max(self.parameters.offset * spread, 5 * between)
            if spread <= 0 or not all(abs(value - mean) > limit for _, value in records):
                continue
            step, value = records[0]
            return [
                self.finding(
                    scene,
                    place=Place("input", role),
                    first_step=step,
                    message=f"The mean of {role} is {value:.3g} in evaluation and {mean:.3g} in "
                    f"training (standard deviation {spread:.3g}): the two are probably "
                    "preprocessed differently.",
                    evidence={"evaluation": value, "training": mean},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        if max(map(len, self._evaluated.values()), default=0) < self.parameters.patience:
            return f"it needs {self.parameters.patience} evaluation records with inputs"
        return None


class OwnStatisticsParameters(RuleParameters):
    """Options of `own_statistics`."""

    samples: Count = 32
    """Smallest number of samples in an evaluation."""


class OwnStatistics(Rule):
    """Evaluation data that is standardized with its own mean and standard deviation."""

    name = "own_statistics"
    severity = "hint"
    certainty = 0.6
    definition = (
        "A floating-point input of the model has a mean of 0 (within "
        f"{_EXACT:g}) and a standard deviation of 1 (within {_UNIT:g}) over all of the at least "
        "`samples` samples of an evaluation record, although its samples have different means. "
        "Data that is scaled with the statistics of other data has such a mean by chance only. "
        "Batches in training do not have it, or have it with another number of samples. All "
        "evaluations have it, since otherwise those that do may be of the training data. If two "
        "evaluations of different sizes have it in turn, the finding is a warning: only one of "
        "them can be the training data."
    )
    source = (
        "scikit-learn's documentation, Common pitfalls, inconsistent preprocessing: the test data "
        "is transformed with statistics of the training data. Our own definition."
    )
    advice = (
        "Compute the mean and the standard deviation once, from the training data, and use them "
        "for all data: scaler.fit(train), then scaler.transform(test), not fit_transform(test)."
    )
    Parameters = OwnStatisticsParameters

    # by role: numbers of samples in training batches that are standardized exactly, or not
    _train: dict[str, tuple[set[int], set[int]]] = per_run(dict)
    # by role: first and last steps by number of samples
    _exact: dict[str, dict[int, tuple[int, int]]] = per_run(dict)
    _others: set[str] = per_run(set)  # inputs with an evaluation that is not standardized exactly
    _evaluations = 0

    def look(self, window: Window) -> None:
        """Store which training batches have a mean of 0 and a deviation of 1."""
        for given, exact in self._judged(window):
            known = self._train.setdefault(given.role, (set(), set()))
            known[not exact].add(given.samples)

    def look_at_evaluation(self, window: Window) -> None:
        """Store which evaluations have a mean of 0 and a deviation of 1."""
        for given, exact in self._judged(window):
            self._evaluations += 1
            if exact:
                known = self._exact.setdefault(given.role, {})
                first, _ = known.get(given.samples, (given.step, 0))
                known[given.samples] = first, given.step
            else:
                self._others.add(given.role)

    def _judged(self, window: Window) -> Iterator[tuple[_Input, bool]]:
        for given in _inputs(window, "forward"):
            if given.samples >= self.parameters.samples:
                exact = abs(given.mean) < _EXACT and abs(given.spread - 1) < _UNIT
                # each sample may be standardized by itself
                yield given, exact and given.between > _UNIT

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first input."""
        for role, sizes in self._exact.items():
            exactly, otherwise = self._train.get(role, (set(), set()))
            sizes = {n: steps for n, steps in sizes.items() if otherwise or n not in exactly}
            if not sizes or role in self._others:  # the others are probably the training data
                continue
            several = _overlap([*sizes.values()]) or bool(exactly)
            unless = "" if several else ", unless these are the training data"
            samples, (step, _) = min(sizes.items(), key=lambda item: item[1])
            return [
                self.finding(
                    scene,
                    place=Place("input", role),
                    first_step=step,
                    message=f"The {samples} samples of {role} in an evaluation have a mean of 0 "
                    "and a standard deviation of 1: they are standardized with their own "
                    f"statistics instead of those of the training data{unless}.",
                    evidence={"samples": samples},
                    **({"severity": "warning", "certainty": 0.75} if several else {}),
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        if not self._evaluations:
            return f"no evaluation with inputs of at least {self.parameters.samples} samples"
        return None


def _overlap(spans: list[tuple[int, int]]) -> bool:
    """Return whether data of several sizes are evaluated in turn, and not fold after fold."""
    ordered = sorted(spans)
    return any(b[0] <= a[1] for a, b in pairwise(ordered))


class _Input(NamedTuple):
    """An input of the model in a record, over all its samples.

    `between` is the standard deviation of the samples' means.
    """

    role: str
    step: int
    samples: int
    mean: float
    spread: float
    between: float


def _inputs(window: Window, pass_: str) -> Iterator[_Input]:
    """Yield the model's first inputs in each record."""
    infos = window.table.infos
    at = np.array(
        [i.id for i in infos if i.kind == "input" and "float" in i.dtype and _is_first(i, pass_)],
        np.int64,
    )
    if not len(at) or not window.has("mean", "std"):
        return
    mean = window.read("mean", at).astype(np.float64)
    between = window.read("mean", at, "std").astype(np.float64)
    within = np.hypot(window.read("std", at), window.read("std", at, "std"))
    samples = window.samples(at)
    for place in zip(*np.nonzero(window.present[:, at] & np.isfinite(mean)), strict=True):
        yield _Input(
            infos[int(at[place[1]])].key.role,
            int(window.steps[place[0]]),
            int(samples[place]),
            float(mean[place]),
            float(np.hypot(within[place], between[place])),
            float(between[place]),
        )


def _is_first(info: SlotInfo, pass_: str) -> bool:
    return info.key.iteration == 0 and info.key.pass_ == pass_ and info.batch_dim is not None
