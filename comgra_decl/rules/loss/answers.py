"""Predictions that cannot reach their targets, or do not fit what they stand for."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    ELEMENTWISE,
    Count,
    Finding,
    Patient,
    Place,
    Rule,
    RuleParameters,
    Scene,
    Window,
    per_run,
    place_of,
    read_rows,
    target_of,
    target_slots,
    values_of,
)

_RANGES = {"Sigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Softmax": (0.0, 1.0)}
"""Limits of what a function returns, by its name in autograd."""

_FEWEST = 2  # records whose losses were read
_MARGIN = 0.05  # of the range, by which targets may exceed it
_WIDE = 1.9  # times the range of the function; below it, targets may be noisy
_MOST_VALUES = 20  # different classes


class BoundedAnswer(Rule):
    """Predictions whose range does not contain the targets."""

    name = "bounded_answer"
    severity = "error"
    certainty = 0.85
    definition = (
        "An elementwise regression loss compares a target with the result of a sigmoid, a softmax "
        "(0 to 1) or a tanh (-1 to 1). In at least `patience` records, targets are outside this "
        f"range by more than {_MARGIN:.0%} of it. A difference of the two that is squared is "
        f"recognised in autograd's graph; the first {_FEWEST} records decide then. The finding is "
        f"only a warning if the targets span less than {_WIDE} times the range, as they may be "
        "values within it with noise."
    )
    source = "The range of a function bounds what it returns. Our own definition."
    advice = (
        "Remove the function after the last layer, or scale the targets to its range (and the "
        "predictions back)."
    )
    Parameters = Patient

    _ranges: dict[int, list[tuple[int, float, float]]] = per_run(dict)

    def look(self, window: Window) -> None:
        """Store the range of the recorded samples of every target."""
        for row in read_rows(window).tolist():
            for slot in target_slots(window.table).tolist():
                found = values_of(window, row, slot)
                if found is not None and found.size and np.isfinite(found).all():
                    low, high = float(found.min()), float(found.max())
                    self._ranges.setdefault(slot, []).append((int(window.steps[row]), low, high))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first loss whose targets are out of reach."""
        for call in scene.calls:
            limits = _RANGES.get(call.prediction.made_by)
            slot = target_of(scene, call)
            if limits is None or slot is None or call.function not in ELEMENTWISE:
                continue
            low, high = limits
            margin = _MARGIN * (high - low)
            outside = [
                (step, least, most)
                for step, least, most in self._ranges.get(slot, ())
                if least < low - margin or most > high + margin
            ]
            if len(outside) < self.parameters.patience:
                continue
            step, least, most = outside[0]
            made_by, place = call.prediction.made_by, place_of(scene, call)
            return [self._finding(scene, made_by, limits, (least, most), step, place)]
        return self._of_terms(scene)

    def _of_terms(self, scene: Scene) -> list[Finding]:
        """Return a finding about a difference whose target is out of reach in all first records."""
        terms = [term for term in scene.terms("residual") if "range" in term]
        for made_by in {str(term["made by"]): None for term in terms}:
            same = [term for term in terms if term["made by"] == made_by]
            low, high = (float(limit) for limit in same[0]["range"])
            margin = _MARGIN * (high - low)
            targets = [(float(least), float(most)) for least, most in (t["target"] for t in same)]
            if len({term["record"] for term in same}) < _FEWEST or not all(
                least < low - margin or most > high + margin for least, most in targets
            ):
                continue
            return [self._finding(scene, made_by, (low, high), targets[0])]
        return []

    def _finding(
        self,
        scene: Scene,
        made_by: str,
        limits: tuple[float, float],
        target: tuple[float, float],
        step: int = 0,
        place: Place | None = None,
    ) -> Finding:
        (low, high), (least, most) = limits, target
        noisy = most - least < _WIDE * (high - low) and low < (least + most) / 2 < high
        return self.finding(
            scene,
            place=place,
            severity="warning" if noisy else self.severity,
            first_step=step,
            message=f"The prediction is the result of a {made_by.lower()} and lies between {low:g} "
            f"and {high:g}, but its target ranges from {least:.3g} to {most:.3g}: the model cannot "
            "reach these values.",
            evidence={"lowest target": least, "highest target": most},
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if any("range" in term for term in scene.terms("residual")):
            return None
        if not any(call.function in ELEMENTWISE for call in scene.calls):
            return "no elementwise loss compares a prediction with a target"
        return None if self._ranges else "the values of targets are not recorded"


class NumbersParameters(RuleParameters):
    """Options of `classes_as_numbers`."""

    least: Count = 40
    """Number of recorded targets required."""


class ClassesAsNumbers(Rule):
    """Regressions whose targets look like the numbers of classes."""

    name = "classes_as_numbers"
    severity = "hint"
    certainty = 0.6
    definition = (
        "An elementwise regression loss has a target with one value per sample. Over at least "
        f"`least` recorded samples, its values are the integers 0 to n - 1, with n from 3 to "
        f"{_MOST_VALUES}, and none is missing."
    )
    source = (
        "A regression treats class 2 as being between 1 and 3, which classes without an order are "
        "not. Our own definition."
    )
    advice = (
        "If the targets are classes, return one logit per class and use "
        "torch.nn.functional.cross_entropy with integer targets. Ignore this hint for counts and "
        "ratings."
    )
    Parameters = NumbersParameters

    _values: dict[int, dict[float, int]] = per_run(dict)
    _mixed: set[int] = per_run(set)

    def look(self, window: Window) -> None:
        """Count the values of targets."""
        for row in read_rows(window).tolist():
            for slot in target_slots(window.table).tolist():
                found = None if slot in self._mixed else values_of(window, row, slot)
                if found is None or found.size != len(found):
                    continue
                known = self._values.setdefault(slot, {})
                for value, count in zip(*np.unique(found, return_counts=True), strict=True):
                    known[float(value)] = known.get(float(value), 0) + int(count)
                if len(known) > _MOST_VALUES or any(not v.is_integer() or v < 0 for v in known):
                    self._mixed.add(slot)
                    del self._values[slot]

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such regression."""
        for call, seen in scene.calls.items():
            slot = target_of(scene, call)
            known = self._values.get(-1 if slot is None else slot, {})
            whole = {*known} == {float(i) for i in range(len(known))}
            enough = sum(known.values()) >= self.parameters.least
            regression = call.function in ELEMENTWISE and call.prediction.is_floating
            if not regression or len(known) < 3 or not whole or not enough:
                continue
            if scene.bootstraps:
                continue
            return [
                self.finding(
                    scene,
                    place=place_of(scene, call),
                    first_step=seen.first,
                    message=f"{call.function} compares the prediction with the integers 0 to "
                    f"{len(known) - 1}, which look like the numbers of classes.",
                    evidence={"values": len(known)},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if self._values or self._mixed:
            return None
        return "the values of targets with one value per sample are not recorded"
