"""Heat map of one statistic, with one line per tensor and one column per recorded step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from comgra_decl.viewer.model.columns import columns, strongest, taken
from comgra_decl.viewer.model.graph import Scale
from comgra_decl.viewer.model.graph import scale as scale_of_all
from comgra_decl.viewer.model.runview import RunView, Slot, Steps
from comgra_decl.viewer.model.selection import Selection, nearest
from comgra_decl.viewer.model.series import Floats, Window
from comgra_decl.viewer.model.stretches import candidates

_LONGEST = 30  # maximum characters of a label


@dataclass(frozen=True, slots=True)
class Overview:
    """Heat map [lines, columns]; line 0 is the first tensor.

    A column shows its recorded value of largest magnitude, or repeats the previous column if it has
    none. `places` are positions on `scale` from 0 to 1 (about 0.5 for 0 on a diverging scale), NaN
    for missing and non-finite values; `values` are the recorded values, and `steps` those of the
    records that the cells show. `broken` is 1 where the
    tensor contained NaN or infinity, and NaN elsewhere. `x0` to `x1` is the range of steps, `all_`
    the range of the run.

    The forward pass and the selected gradient have the same lines, so that they can be compared
    side by side: `slots` contains each tensor's forward slot, or else its gradient's slot;
    `recorded` contains the slots of this pass, with None where a tensor has none.
    """

    slots: tuple[Slot, ...]
    recorded: tuple[Slot | None, ...]
    values: Floats
    steps: Steps
    places: Floats
    broken: Floats
    scale: Scale
    x0: float
    x1: float
    all_: Window

    def step_at(self, line: int, x: float) -> int:
        """Return the step of the record that the cell at `x` shows."""
        columns_ = self.steps.shape[1]
        column = int((x - self.x0) / (self.x1 - self.x0) * columns_)
        return int(self.steps[line, min(max(column, 0), columns_ - 1)])

    @property
    def labels(self) -> list[str]:
        """Labels of the lines."""
        return [label_of(slot) for slot in self.slots]

    def line_of(self, at: Selection) -> int | None:
        """Return the selected tensor's line, or None if it is not shown."""
        for line, slot in enumerate(self.slots):
            if (slot.node, slot.role) == (at.node, at.role):
                return line
        return None


def overview(
    view: RunView, at: Selection, pass_: str, *, within: Window | None = None
) -> Overview | None:
    """Return the selected statistic of all tensors of a pass, or None if there are none.

    Covers all steps, or only a window.
    """
    at = at.wide
    lines = _lines(view, at.iteration, ("forward", at.gradient))
    recorded = [line.get(pass_) for line in lines]
    steps = view.steps(at.type)
    if not any(recorded) or not len(steps):
        return None
    x0, x1, chosen = columns(steps, within)
    ids = [-1 if slot is None else slot.id for slot in recorded]
    visible = None if within is None else (x0, x1)
    of_statistic = candidates(view, pass_, ids, (at.statistic, at.over, at.type), visible)
    of_counts = candidates(view, pass_, ids, ("nonfinite", "abs_max", at.type), visible)
    (values, value_steps), (odd, odd_steps) = (
        _shown(*cells, x0, x1, len(chosen)) for cells in (of_statistic, of_counts)
    )
    broken = odd > 0
    scale = scale_of_all(view, at, pass_)
    return Overview(
        slots=tuple(next(iter(line.values())) for line in lines),
        recorded=tuple(recorded),
        values=values,
        steps=np.where(broken, odd_steps, value_steps),
        places=np.where(np.isfinite(values), places_of(scale, values), np.nan),
        broken=np.where(broken, 1.0, np.nan),
        scale=scale,
        x0=x0,
        x1=x1,
        all_=columns(steps)[:2],
    )


def _shown(
    steps: Steps, numbers: Floats, places: Steps, x0: float, x1: float, count: int
) -> tuple[Floats, Steps]:
    """Return the value of each cell and the step at which it was recorded, [lines, count]."""
    records = strongest(numbers, steps, x0, x1, count)
    at: Steps = np.take_along_axis(places, np.maximum(records, 0), axis=1)
    return taken(numbers, records), at


def places_of(scale: Scale, values: Floats) -> Floats:
    """Return the positions of values on a scale from 0 to 1, as in `Scale.colour`."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if scale.diverging:
            places = 0.5 + 0.5 * values / (scale.high or 1.0)
        elif scale.logarithmic:
            span = np.log(scale.high / scale.low) or 1.0
            places = np.log(np.maximum(values, 0.0) / scale.low) / span
        else:
            places = (values - scale.low) / ((scale.high - scale.low) or 1.0)
    clipped: Floats = np.clip(places, 0.0, 1.0)
    return clipped


def label_of(slot: Slot) -> str:
    """Return node and role, shortened at the start, because the end is more specific.

    The node of the inputs is called "input", like their role, and is named once.
    """
    name = slot.node if slot.role == "output" else f"{slot.node}.{slot.role}"
    if slot.role == slot.node or slot.role.startswith(f"{slot.node}."):
        name = slot.role
    return name if len(name) <= _LONGEST else f"\u2026{name[-_LONGEST + 1 :]}"


def _lines(view: RunView, iteration: int, passes: tuple[str, ...]) -> list[dict[str, Slot]]:
    """Return the slots of each tensor by pass, in the order of `passes`.

    Tensors are in execution order; parameters and buffers come last.
    """
    found: list[tuple[bool, int, dict[str, Slot]]] = []
    for node in view.nodes:
        for role in view.roles(node):
            slots: dict[str, Slot] = {}
            for pass_ in passes:
                every = view.iterations(node, role)
                known = [i for i in every if pass_ in view.passes(node, role, i)]
                at = nearest(np.array(known), iteration)
                if at is not None:
                    slots[pass_] = view.passes(node, role, at)[pass_]
            if slots:
                kind = next(iter(slots.values())).kind
                # ids follow the order of capture; parameters are read first
                order = view.first_slot(node, role).id
                found.append((kind in ("parameter", "buffer"), order, slots))
    return [slots for *_, slots in sorted(found, key=lambda line: line[:2])]
