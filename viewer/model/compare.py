"""Comparison of two runs, or of two steps or types of execution of one run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from comgra_decl.query import differences
from comgra_decl.viewer.model.comparison_target import Other
from comgra_decl.viewer.model.graph import Graph, Scale
from comgra_decl.viewer.model.labels import pass_label
from comgra_decl.viewer.model.numbers import number, shape
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.series import WIDE, Curve, Window, bounds, curve
from comgra_decl.viewer.model.statistics import is_recorded
from comgra_decl.viewer.palette import GREY, SCALE, signed_colour

DIFFERENCE = "difference"
"""Value of `colour` that paints the graph with differences."""

_SHOWN = 60
_NAN = math.nan


@dataclass(frozen=True, slots=True)
class Pair:
    """One value on both sides. `recorded` states for each side whether a NaN value was recorded."""

    here: float
    there: float
    recorded: tuple[bool, bool] = (True, True)

    @property
    def difference(self) -> float:
        """`here` minus `there`."""
        return self.here - self.there

    @property
    def ratio(self) -> float:
        """`here` divided by `there`; NaN if `there` is 0."""
        return self.here / self.there if self.there else _NAN

    @property
    def relative(self) -> float:
        """Difference divided by the mean of the two magnitudes, from -2 to 2.

        0 if the values are equal, and NaN if either value is NaN.
        """
        total = abs(self.here) + abs(self.there)
        if math.isinf(total):
            return _NAN
        return 2 * self.difference / total if total else 0.0 * total


@dataclass(frozen=True, slots=True)
class Ranked:
    """A tensor on both sides and its statistic. `broken` if either value is NaN or infinite."""

    slot: Slot
    pair: Pair
    broken: bool


@dataclass(frozen=True, slots=True)
class Ranking:
    """Tensors ranked by difference. Non-finite values come first, then the largest differences.

    `compared` counts the tensors recorded at both steps. `only_here` and `only_there` list the
    nodes that exist in only one run. `absent` counts the tensors that exist in both runs but were
    not recorded at both steps.
    """

    rows: tuple[Ranked, ...] = ()
    compared: int = 0
    absent: int = 0
    only_here: tuple[str, ...] = ()
    only_there: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Overlay:
    """The series on both sides. `there` is None if both sides are steps of the same series."""

    here: Curve
    there: Curve | None
    bounds: tuple[float, float]


def counterpart(there: RunView, slot: Slot | None) -> Slot | None:
    """Return the slot with the same name in another run."""
    if slot is None:
        return None
    return there.passes(slot.node, slot.role, slot.iteration).get(slot.pass_)


def statistics_of(
    view: RunView, slot: Slot | None, other: Other, at: Selection
) -> list[tuple[str, Pair]]:
    """Return every statistic of a tensor for both sides, by name."""
    if other.view is None or slot is None:
        return []
    here = _numbers(view, slot, at.step, at)
    there = _numbers(other.view, counterpart(other.view, slot), other.step, there_of(other, at))
    return [(name, _pair(name, here, there)) for name in view.run.statistics]


def _pair(name: str, here: dict[str, float], there: dict[str, float]) -> Pair:
    known = is_recorded(name, here), is_recorded(name, there)
    return Pair(here.get(name, _NAN), there.get(name, _NAN), known)


def ranking_of(
    view: RunView, other: Other, at: Selection, pass_: str, *, most: int = _SHOWN
) -> Ranking:
    """Return up to `most` tensors of a pass that differ most in the selected statistic."""
    if other.view is None:
        return Ranking()
    pairs = _pairs(view, other, at, pass_)
    known = [row for row in pairs if row is not None]
    ranked = sorted(known, key=lambda row: (not row.broken, -abs(row.pair.relative)))
    here, there = view.nodes, other.view.nodes
    return Ranking(
        tuple(ranked[:most]),
        compared=len(known),
        absent=len(pairs) - len(known),
        only_here=tuple(sorted(set(here) - set(there), key=here.index)),
        only_there=tuple(sorted(set(there) - set(here), key=there.index)),
    )


def overlay_of(
    view: RunView,
    slot: Slot | None,
    other: Other,
    at: Selection,
    *,
    relative: bool,
    within: Window | None = None,
) -> Overlay:
    """Return the selected statistic over steps, for both sides.

    Args:
        view: Displayed run.
        slot: Tensor to compare.
        other: Other side of the comparison.
        at: Current selection.
        relative: Whether to divide each series by its first finite, non-zero value.
        within: Visible steps of a zoomed figure.
    """
    here = curve(view, slot, at, points=WIDE, within=within)
    there = None
    if other.view is not None and other.is_apart(view, at):
        match = counterpart(other.view, slot)
        there = curve(other.view, match, there_of(other, at), points=WIDE, within=within)
        if there.missing and match is not None:
            name = other.run or other.type_beside(at.type) or "all training steps"
            there = replace(there, missing=f"{name}: {there.missing}")
        elif there.missing:
            there = replace(there, missing=f"{other.run} does not have this tensor.")
    if relative:
        here, there = started(here), None if there is None else started(there)
    lines = [line.values for line in (here, there) if line is not None]
    return Overlay(here, there, bounds(*lines))


def started(line: Curve) -> Curve:
    """Return a curve divided by its first finite, non-zero value."""
    known = line.values[np.isfinite(line.values) & (line.values != 0)]
    if not len(known):
        return replace(line, missing=line.missing or "All values are 0.")
    return replace(line, values=line.values / known[0], low=line.low[:0], high=line.high[:0])


def settings_of(view: RunView, other: Other) -> list[tuple[str, str, str]]:
    """Return the spec and config settings that differ between the two runs."""
    if other.view is None or other.view is view:
        return []
    table = differences([view.run, other.view.run])
    return [
        (str(key), _setting(here), _setting(there))
        for key, (here, there) in zip(table.index, table.to_numpy(object), strict=True)
    ]


def shape_note(
    view: RunView, slot: Slot | None, match: Slot | None, *, other: Other, at: Selection
) -> str:
    """Return a note if shapes or dtypes differ; "" otherwise."""
    if slot is None or match is None or other.view is None:
        return ""
    here = view.shape_if_recorded(slot, at)
    there = other.view.shape_if_recorded(match, replace(there_of(other, at), step=other.step))
    if here is not None and there is not None and here != there:
        return f"Shapes differ: this {shape(here)}, other {shape(there)}."
    return f"Dtypes: this {slot.dtype}, other {match.dtype}." if slot.dtype != match.dtype else ""


def paint_of(
    view: RunView,
    other: Other | None,
    at: Selection,
    graph: Graph,
    *,
    boxes: Iterable[tuple[str, tuple[str, ...]]],
    pass_: str,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Return the paint of each box and the legend, for relative differences of the statistic.

    A box shows the difference of its own node or, if that is missing, the largest difference inside
    it.
    """
    if other is None or other.view is None:
        return {}, None
    values = _by_node(_pairs(view, other, at, pass_), graph, at)
    sizes = [abs(row.pair.relative) for row in values.values() if not row.broken]
    limit = float(np.quantile(sizes, 0.9)) if sizes else 0.0
    largest = max(sizes, default=0.0)
    limit = limit or largest or 1e-12
    scale = Scale(-limit, limit, diverging=True)
    painted = {box: _paint(members, values, scale) for box, members in boxes}
    return {box: p for box, p in painted.items() if p is not None}, _legend(
        at, pass_, limit, largest
    )


def _pairs(view: RunView, other: Other, at: Selection, pass_: str) -> list[Ranked | None]:
    """Return each tensor of a pass that exists in both runs; None if it is missing at a step."""
    assert other.view is not None
    if at.step is None or other.step is None:
        return []
    at = at.wide
    key = ("pairs", other.view, other.view.revision, other.step, other.type_beside(at.type),
           at.step, at.type, at.over, at.statistic, pass_)  # fmt: skip
    return view.now(key, lambda: _find_pairs(view, other, at, pass_))


def _find_pairs(view: RunView, other: Other, at: Selection, pass_: str) -> list[Ranked | None]:
    assert other.view is not None
    assert at.step is not None
    assert other.step is not None
    if at.statistic not in other.view.run.statistics:
        return []
    row = view.row(at.step, at.type, at.over)
    else_row = other.view.row(other.step, there_of(other, at).type, at.over)
    here, there = row.column(at.statistic), else_row.column(at.statistic)
    bad_here, bad_there = row.column("nonfinite"), else_row.column("nonfinite")
    found: list[Ranked | None] = []
    for slot in view.slots.values():
        match = counterpart(other.view, slot) if slot.pass_ == pass_ else None
        if match is None:
            continue
        bad = bad_here.get(slot.id, _NAN), bad_there.get(match.id, _NAN)
        if any(map(math.isnan, bad)):
            found.append(None)
            continue
        pair = Pair(here.get(slot.id, _NAN), there.get(match.id, _NAN))
        broken = max(bad) > 0 or math.isinf(pair.here) or math.isinf(pair.there)
        if broken or not math.isnan(pair.relative):  # skip statistics that do not apply
            found.append(Ranked(slot, pair, broken))
    return found


def _by_node(rows: list[Ranked | None], graph: Graph, at: Selection) -> dict[str, Ranked]:
    """Return the selected tensor of each drawn node, or else its first tensor."""
    owners = {(node, role): name for name, (node, role) in graph.parameters.items()}
    values: dict[str, Ranked] = {}
    for row in rows:
        if row is not None:
            name = owners.get((row.slot.node, row.slot.role), row.slot.node)
            if name not in values or _rank(row.slot, at) > _rank(values[name].slot, at):
                values[name] = row
    return values


def _rank(slot: Slot, at: Selection) -> tuple[bool, bool, bool]:
    """Sort key for a node's tensors: the selected tensor first, then outputs of this iteration."""
    output, now = slot.role.startswith("output"), slot.iteration == at.iteration
    return (slot.node, slot.role) == (at.node, at.role) and now, output, now


def _paint(
    members: tuple[str, ...], values: Mapping[str, Ranked], scale: Scale
) -> dict[str, Any] | None:
    known = [values[name] for name in members if name in values]
    if not known:
        return None
    row = values.get(members[0]) or max(known, key=lambda r: (r.broken, abs(r.pair.relative)))
    relative = row.pair.relative
    usable = not row.broken and math.isfinite(relative)
    text = percent(relative) if usable else "not finite"
    fill = scale.colour(relative) if usable else GREY
    return {"fill": fill, "text": text, "hatched": any(r.broken for r in known)}


def percent(relative: float) -> str:
    """Return a relative difference in percent with its sign."""
    text = f"{number(100 * relative, digits=3)}%"
    return f"+{text}" if relative > 0 else text


def _legend(at: Selection, pass_: str, limit: float, largest: float) -> dict[str, Any]:
    """Return the legend; above its ends are the tenth of the tensors that differ the most."""
    beyond = (" or less", " or more") if largest > limit else ("", "")
    places = np.linspace(-1, 1, len(SCALE))
    return {
        "title": f"difference \u00b7 {pass_label(pass_)} \u00b7 {at.wide.statistic}",
        "low": percent(-limit) + beyond[0] if largest else "0%",
        "high": percent(limit) + beyond[1] if largest else "0%",
        "colors": [signed_colour(float(place)) for place in places],
        "log": False,
        "help": "Difference divided by the mean of the two magnitudes. Orange: larger in this "
        "run. The scale applies only to this step.",
    }


def _numbers(view: RunView, slot: Slot | None, step: int | None, at: Selection) -> dict[str, float]:
    if slot is None or step is None:
        return {}
    if at.sample is not None and slot.batch_dim is not None:
        return view.sample_row(slot, step, at.type).line(at.sample)
    return view.row(step, at.type, at.over).line(slot.id)


def there_of(other: Other, at: Selection) -> Selection:
    """Return the selection adapted to the other side, which may lack the type and the sample."""
    assert other.view is not None
    sample = at.sample
    known = sample is None or sample < other.view.run.sample_count
    return replace(at, type=other.type_beside(at.type), batch=at.batch if known else "mean")


def _setting(value: Any) -> str:
    return "\u2013" if value is None or value is pd.NA else str(value)
