"""Single columns of inputs and targets: placeholders, and columns on a different scale."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Count,
    Factor,
    Finding,
    Rows,
    Rule,
    RuleParameters,
    Scene,
    SlotInfo,
    Window,
    input_slots,
    per_run,
    read_rows,
    target_slots,
    values_of,
)

_WIDEST = 256  # columns; wider inputs are images and the like
_SAMPLES = 40  # of a table whose rows are compared
_VARIED = 10  # different values; fewer are categories
_SHARE = (0.002, 0.4)  # of the samples that may contain a placeholder


class Columns:
    """Different samples of the floating-point inputs and targets of shape [batch, columns]."""

    def __init__(self) -> None:
        self.by_slot: dict[int, Rows] = {}
        self._seen: set[int] = set()

    def look(self, window: Window, *, of_targets: bool) -> None:
        """Add the samples of the next records, except those seen in an earlier epoch."""
        table = window.table
        every = [*input_slots(table).tolist(), *target_slots(table).tolist()]
        wanted = [s for s in every if _is_table(table.infos[s])]
        wanted = [s for s in wanted if of_targets or table.infos[s].kind == "input"]
        full = all(s in self.by_slot and self.by_slot[s].is_full for s in wanted)
        for row in read_rows(window).tolist() if not full else ():
            given = {slot: values_of(window, row, slot) for slot in every}
            known = {s: v for s, v in given.items() if v is not None and np.isfinite(v).all()}
            size = max((len(v) for s, v in known.items() if s in wanted), default=0)
            new = self._new([v for v in known.values() if len(v) == size], size)
            for slot in wanted:
                values = known.get(slot)
                if values is None or len(values) != size or not new.any():
                    continue
                if values.size <= _WIDEST * size:
                    rows = self.by_slot.setdefault(slot, Rows())
                    rows.add(int(window.steps[row]), values[new])

    def _new(self, values: list[NDArray[np.float64]], size: int) -> NDArray[np.bool_]:
        found = np.zeros(size, np.bool_)
        for sample in range(size):
            number = hash(tuple(v[sample].tobytes() for v in values))
            found[sample] = number not in self._seen
            self._seen.add(number)
        return found


def _is_table(info: SlotInfo) -> bool:
    narrow = len(info.shape) <= 2 and prod(info.shape[1:]) <= _WIDEST
    return "float" in info.dtype and info.batch_dim == 0 and narrow


class PlaceholderParameters(RuleParameters):
    """Options of `placeholder_values`."""

    least: Count = 60
    """Number of recorded samples required."""

    far: Factor = 6.0
    """Smallest distance of a placeholder from the mean of other values, in standard deviations."""


class PlaceholderValues(Rule):
    """Codes for missing values that are used as numbers."""

    name = "placeholder_values"
    certainty = 0.75
    definition = (
        f"The rule checks floating-point inputs and targets with at most {_WIDEST} columns, once "
        "at least `least` samples are recorded. Samples that recur in later epochs count once. In "
        "one "
        f"column, exactly the same value occurs at least three times, in at most {_SHARE[1]:.0%} "
        "of the samples. This value is more than `far` standard deviations away from the mean of "
        "the other values, and no other value is within half that distance of it. The column must "
        f"contain at least {_VARIED} other values, which excludes categorical and binary columns."
    )
    source = "Our own definition. Common codes for missing values are -999, -1 and 1e9."
    advice = (
        "Exclude these samples, mask them in the loss, or replace the values with the mean and "
        "mark them in an additional column."
    )
    explained_by = ("nonfinite",)
    Parameters = PlaceholderParameters

    _columns = per_run(Columns)

    def look(self, window: Window) -> None:
        """Gathers samples of inputs and targets."""
        self._columns.look(window, of_targets=True)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first column with placeholders."""
        for slot, rows in self._columns.by_slot.items():
            if rows.count < self.parameters.least:
                continue
            for number, column in enumerate(rows.table.T):
                found = self._placeholder(column)
                if found is not None:
                    value, share, mean, std = found
                    place = scene.table.place(slot)
                    where = f"column {number} of {place}" if rows.table.shape[1] > 1 else str(place)
                    first = next(
                        s
                        for s, p in zip(rows.steps, rows.parts, strict=True)
                        if (p[:, number] == value).any()
                    )
                    return [
                        self.finding(
                            scene,
                            place=place,
                            first_step=first,
                            message=f"{share:.2g}% of the samples have exactly {value:.6g} in "
                            f"{where}, {abs(value - mean) / std:.0f} standard deviations from the "
                            f"others ({mean:.3g} ± {std:.2g}): a code for missing values is used "
                            "as a number.",
                            evidence={"value": value, "percent": share, "mean": mean, "std": std},
                        )
                    ]
        return []

    def _placeholder(self, column: NDArray[np.float64]) -> tuple[float, float, float, float] | None:
        low, high = float(column.min()), float(column.max())
        for value in (low, high):
            is_it = column == value
            others = column[~is_it]
            share = float(is_it.mean())
            if is_it.sum() < 3 or not _SHARE[0] <= share <= _SHARE[1]:
                continue
            if len(np.unique(others)) < _VARIED:
                continue
            mean, std = float(others.mean()), float(others.std())
            gap = float(np.abs(others - value).min())
            if abs(value - mean) > self.parameters.far * std > 0 and gap > 0.5 * abs(value - mean):
                return value, 100 * share, mean, std
        return None

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return _missing(self._columns.by_slot, self.parameters.least)


class ColumnParameters(RuleParameters):
    """Options of `uneven_columns`."""

    least: Count = 60
    """Number of recorded samples required."""

    ratio: Factor = 100.0
    """Largest allowed size of a column, relative to the median column."""


class UnevenColumns(Rule):
    """Input columns of very different sizes."""

    name = "uneven_columns"
    certainty = 0.7
    definition = (
        f"Among at least `least` recorded samples of a floating-point input with 2 to {_WIDEST} "
        "columns, the root mean square of a column is above `ratio` and above `ratio` times that "
        "of the median column. Inputs of a normalization layer are excluded."
    )
    source = "LeCun et al., Efficient BackProp (1998): scale all inputs to a similar variance."
    advice = (
        "Subtract each column's mean and divide by its standard deviation over the training "
        "data, or use the logarithm of the column."
    )
    explained_by = ("nonfinite", "placeholder_values")
    Parameters = ColumnParameters

    _columns = per_run(Columns)

    def look(self, window: Window) -> None:
        """Gathers samples of inputs."""
        self._columns.look(window, of_targets=False)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first input with a dominant column."""
        for slot, rows in self._columns.by_slot.items():
            table = rows.table
            if rows.count < self.parameters.least or table.shape[1] < 2 or _normed(scene, slot):
                continue
            size = np.sqrt((table**2).mean(0))
            most, usual = int(size.argmax()), float(np.median(size))
            limit = self.parameters.ratio
            if not size[most] > limit * max(usual, 1.0):
                continue
            large = int((size > limit * max(usual, 1.0)).sum())
            more = f" The same applies to {large - 1} more." if large > 1 else ""
            place = scene.table.place(slot)
            mean, std = float(table[:, most].mean()), float(table[:, most].std())
            return [
                self.finding(
                    scene,
                    place=place,
                    first_step=rows.steps[0],
                    message=f"Column {most} of {place} is not normalized: {mean:.3g} ± {std:.2g}, "
                    f"while the median column has an RMS of {usual:.3g}. It dominates "
                    f"the others.{more}",
                    evidence={"column": most, "size": float(size[most]), "median": usual},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return _missing(self._columns.by_slot, self.parameters.least)


def _normed(scene: Scene, slot: int) -> bool:
    """Whether an input is passed to a normalization layer."""
    table, key = scene.table, scene.table.infos[slot].key
    for structure in scene.structures.values():
        for a, b, _ in structure.edges:
            sink = table.by_key.get(structure.keys[b])
            known = structure.keys[a] == key and sink is not None
            if known and "Norm" in table.infos[sink or 0].module_class:
                return True
    return False


def _missing(rows: dict[int, Rows], least: int) -> str | None:
    most = max((known.count for known in rows.values()), default=0)
    if not rows:
        return "the values of floating-point inputs [batch, columns] are not recorded"
    return None if most >= least else f"it needs {least} recorded samples; the run has {most}"


class StandardizedRows(Rule):
    """Tables that are standardized by row instead of by column."""

    name = "standardized_rows"
    severity = "hint"
    certainty = 0.7
    definition = (
        f"In a floating-point input of shape [batch, columns] with 4 to {_WIDEST} columns, each of "
        f"at least {_SAMPLES} recorded samples has a mean below 0.001 in magnitude and a standard "
        "deviation within 1% of a common value, whereas the columns have different means or "
        "standard deviations."
    )
    source = (
        "scikit-learn's StandardScaler, which standardizes columns (axis 0). Our own definition."
    )
    advice = "Compute the mean and the standard deviation along the samples: x.mean(0), x.std(0)."

    _columns = per_run(Columns)

    def look(self, window: Window) -> None:
        """Gather samples of inputs."""
        self._columns.look(window, of_targets=False)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such input."""
        for slot, rows in self._columns.by_slot.items():
            table = rows.table
            if len(table) < _SAMPLES or not 4 <= table.shape[1] <= _WIDEST:
                continue
            spread = table.std(1)
            alike = spread.min() > 0 and spread.max() <= 1.01 * spread.min()
            columns = table.std(0)
            uneven = columns.max() > 1.2 * columns.min() or np.abs(table.mean(0)).max() > 0.2
            if not alike or not uneven or np.abs(table.mean(1)).max() > 1e-3:
                continue
            place = scene.table.place(slot)
            return [
                self.finding(
                    scene,
                    place=place,
                    first_step=rows.steps[0],
                    message=f"Each sample of {place} has mean 0 and standard deviation "
                    f"{spread.mean():.3g} over its {table.shape[1]} columns: the table is "
                    "standardized by row instead of by column, which mixes columns and removes "
                    "differences between samples.",
                    evidence={"samples": len(table)},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if self._columns.by_slot else "no table of numbers is recorded as an input"
