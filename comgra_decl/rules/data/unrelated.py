"""Targets to which no feature of the inputs is related."""

from __future__ import annotations

from collections.abc import Iterator
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Count,
    Finding,
    Fraction,
    Rows,
    Rule,
    RuleParameters,
    Scene,
    Window,
    input_slots,
    per_run,
    read_rows,
    target_slots,
    values_of,
)

_MARGIN = 1.5  # standard deviations above the largest correlation that chance would give
_MOST_VALUES = 32  # of a column of codes
_MOST_TOKENS = 64
_MOST_CLASSES = 16
_LEAST_OF_A_CLASS = 10
_FEW = 20  # losses

Table = NDArray[np.float64]


class UnrelatedParameters(RuleParameters):
    """Options of `unrelated_targets`."""

    least: Count = 200
    """Number of different recorded samples required."""

    fall: Fraction = 0.1
    """Fall of the loss, from its first to its last tenth, from which the model is learning."""


class UnrelatedTargets(Rule):
    """Targets to which no feature of the inputs is related, while the model learns nothing."""

    name = "unrelated_targets"
    severity = "hint"
    certainty = 0.6
    definition = (
        "The loss has fallen by less than `fall`. Over at least `least` different recorded "
        "samples, the correlation of each feature of the inputs (numbers, indicators of codes, or "
        "counts of tokens) with the target (a number, or indicators of classes) is one that "
        f"chance would give: the largest of k correlations in n samples is below (sqrt(2 ln k) + "
        f"{_MARGIN}) / sqrt(n). A target may also depend on several features only in combination."
    )
    source = (
        "The expected maximum of k standard normal variables is at most sqrt(2 ln k). Our own "
        "definition."
    )
    advice = (
        "Check that inputs and targets are indexed, shuffled and sorted by the same indices, for "
        "example by looking at some pairs with `comgra-decl data`."
    )
    Parameters = UnrelatedParameters

    _rows: dict[tuple[int, int], tuple[Rows, Rows]] = per_run(dict)
    _unknown = False  # whether an input may determine the target whose values are not recorded

    def look(self, window: Window) -> None:
        """Collect inputs and targets of the same samples."""
        table = window.table
        inputs, targets = input_slots(table).tolist(), target_slots(table).tolist()[:1]
        for row in read_rows(window).tolist() if inputs and targets else ():
            y = values_of(window, row, targets[0])
            if y is None or not len(y) or y.size > 8 * len(y):
                continue
            for slot in inputs:
                x = values_of(window, row, slot)
                known = x is not None and len(x) == len(y)
                self._unknown |= not known
                if x is not None and known:
                    mine, other = self._rows.setdefault((slot, targets[0]), (Rows(), Rows()))
                    if not mine.is_full:
                        mine.add(int(window.steps[row]), x)
                        other.add(int(window.steps[row]), y.reshape(len(y), -1))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding if no feature of any input is related to the target."""
        if not self._rows or self._unknown or self._learns(scene) or scene.bootstraps:
            return []
        found = self._related(scene)
        if found is None or found[0] > _MARGIN:
            return []
        _, samples, features = found
        goal = scene.table.place(next(iter(self._rows))[1])
        return [
            self.finding(
                scene,
                place=goal,
                first_step=0,
                message=f"None of the {features} features of the inputs is related to the target "
                f"({goal}) in {samples} recorded samples, and the model learns nothing: inputs and "
                "targets may belong to different samples.",
                evidence={"samples": samples, "features": features},
            )
        ]

    def _learns(self, scene: Scene) -> bool:
        curve = max(scene.curves.values(), key=lambda its: its.count, default=None)
        if curve is None or curve.count < _FEW:
            return True
        first, last = curve.mean(0.0, 0.1)[0], curve.mean(0.9, 1.0)[0]
        return not last > (1 - self.parameters.fall) * first

    def _related(self, scene: Scene) -> tuple[float, int, int] | None:
        """Return by how much the largest correlation exceeds chance, samples, and features.

        None if there are too few samples, or an input of which not all values are known.
        """
        infos = scene.table.infos
        tables = [(infos[a].dtype, x.table, y.table) for (a, _), (x, y) in self._rows.items()]
        goal = infos[next(iter(self._rows))[1]].dtype
        if len({len(x) for _, x, _ in tables} | {len(y) for _, _, y in tables}) > 1:
            return None
        whole = np.concatenate([tables[0][2], *(x for _, x, _ in tables)], 1)
        if not np.isfinite(whole).all():
            return None
        _, kept = np.unique(whole, axis=0, return_index=True)
        given = [
            column for dtype, x, _ in tables for column in _features(x[kept], codes="int" in dtype)
        ]
        wanted = [*_targets(tables[0][2][kept], classes="int" in goal)]
        if len(kept) < self.parameters.least or not given or not wanted:
            return None
        left, right = _standard(np.stack(given, 1)), _standard(np.stack(wanted, 1))
        if not left.size or not right.size:
            return None
        n, pairs = len(kept), left.shape[1] * right.shape[1]
        most = float(np.abs(left.T @ right).max()) / n * sqrt(n)
        return most - sqrt(2 * log(max(pairs, 2))), n, left.shape[1]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if self._rows else "the values of inputs and targets are not recorded"


def _features(x: Table, *, codes: bool) -> Iterator[Table]:
    if not codes:
        yield from x.T
        return
    columns = [np.unique(column) for column in x.T]
    if all(len(values) <= _MOST_VALUES for values in columns):
        for column, values in zip(x.T, columns, strict=True):
            for value in values:
                yield (column == value).astype(np.float64)
        return
    tokens, counts = np.unique(x, return_counts=True)
    for token in tokens[np.argsort(-counts, kind="stable")[:_MOST_TOKENS]]:
        yield (x == token).sum(1).astype(np.float64)


def _targets(y: Table, *, classes: bool) -> Iterator[Table]:
    if not classes:
        yield from y.T
    elif y.shape[1] == 1:
        values, counts = np.unique(y[:, 0], return_counts=True)
        often = values[counts >= _LEAST_OF_A_CLASS]
        for value in often[:_MOST_CLASSES]:
            yield (y[:, 0] == value).astype(np.float64)


def _standard(table: Table) -> Table:
    """Return columns with a mean of 0 and a deviation of 1; leaves out constant ones."""
    spread = table.std(0)
    kept = table[:, spread > 0]
    return np.asarray((kept - kept.mean(0)) / kept.std(0))
