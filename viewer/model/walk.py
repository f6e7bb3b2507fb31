"""The evidence of a finding as a walk: a few stops, each with a place and two sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from comgra_decl.rules import Finding, Place
from comgra_decl.rules.catalogue import statistic_of
from comgra_decl.viewer.model.findings import RULE, findings_of, jump, link, rule_label
from comgra_decl.viewer.model.fitting import fitting
from comgra_decl.viewer.model.graph import graph_of
from comgra_decl.viewer.model.numbers import count, number
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection, nearest

ADVICE = "What to do"
"""Title of the last stop."""

_MOST_LINKS, _MOST_FEEDING = 6, 2
_NOTABLE = 3.0  # smallest factor between two extremes that a sentence mentions
_LOSS_SECTION = "kpis"


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop of a walk.

    Attributes:
        title: What is shown, such as "out.last".
        sentences: Two sentences that describe what the stop shows.
        send: The message that moves the selection there, see `findings.link`.
        place: The tensor; None if the stop concerns the whole run.
        step: The step.
        sample: The sample that shows it; None for the batch.
        statistic: The statistic that shows the problem; "" for the one that fits the tensor.
    """

    title: str
    sentences: tuple[str, str]
    send: str
    place: Place | None
    step: int
    sample: int | None = None
    statistic: str = ""


def walk_of(view: RunView, finding: Finding) -> tuple[Stop, ...]:
    """Return the stops of a finding.

    They show where and when the problem begins, the tensors from the probable cause to that place
    (or, if the cause is unknown, the tensors that feed it), other tensors with the same problem,
    and what to do.
    """
    stops = [_beginning(view, finding)]
    if finding.chain:
        links = [part for part in finding.chain if part.place != finding.place]
        for i, part in enumerate(links[:_MOST_LINKS]):
            step = finding.first_step if part.first_step < 0 else part.first_step
            role = "This is the probable cause" if i == 0 else "The problem passes through here"
            first = f"{role}: {part.what.replace('_', ' ')} from step {count(step)} on."
            stops.append(_stop(part.place, step, first, _seen(view, part.place, step)))
    elif finding.place is not None:
        stops += _feeding(view, finding.place, _clearest(finding))
    if finding.others:
        stops.append(_others(view, finding))
    stops.append(_advice(finding))
    return tuple(stops)


def walk_place(token: str) -> tuple[int, int]:
    """Return the position of the finding and the stop from the state; -1 and 0 outside a walk."""
    number_, _, stop = token.partition(".")
    return (int(number_), int(stop or 0)) if number_.isdecimal() else (-1, 0)


def moves_to(
    view: RunView, at: Selection, finding: Finding, place: tuple[int, int], stop: Stop
) -> dict[str, Any]:
    """Return the state changes that show a stop.

    Args:
        view: The run.
        at: The current selection.
        finding: The finding; its rule colours the graph.
        place: The finding's position in the list, and the stop's position in the walk.
        stop: The stop.
    """
    moves = jump(view, at, stop.send)
    if finding.place is not None:
        moves["colour"] = f"{RULE}{finding.rule}"
    return {**moves, "walk": f"{place[0]}.{place[1]}"}


def finding_at(view: RunView, number_: int) -> Finding | None:
    """Return the finding with that position in the list; None if there is none."""
    findings = findings_of(view)
    return findings[number_] if 0 <= number_ < len(findings) else None


def _beginning(view: RunView, finding: Finding) -> Stop:
    place, step = finding.place, finding.first_step
    when = f"It occurs at {finding.span}."
    if not finding.is_exact:
        when = f"It began {finding.began} and was last seen at step {count(finding.last_step)}."
    if place is None:
        return _stop(None, step, finding.message, when, title="The loss")
    measured = _measured(view, finding)
    second = f"{when} {_seen(view, place, step, measured)}"
    return _stop(place, step, finding.message, second, sample=finding.sample, statistic=measured)


def _measured(view: RunView, finding: Finding) -> str:
    """Return the statistic measured by a finding's rule; "" unless it is a single one."""
    statistic = statistic_of(finding.rule)
    return statistic if statistic is not None and statistic in view.run.statistics else ""


def _clearest(finding: Finding) -> int:
    """Return the step at which the rule measured the worst number, or else the first step."""
    worst = finding.evidence.get("worst_step")
    return worst if isinstance(worst, int) else finding.first_step


def _feeding(view: RunView, place: Place, step: int) -> list[Stop]:
    """Return the recorded tensors that the tensor at `place` is computed from."""
    at = Selection(step=nearest(view.steps(""), step), node=place.node, role=place.role)
    graph = graph_of(view, at)
    me = graph.name_of(at)
    if place.pass_ == "forward":
        names = [a for a, b, _ in graph.edges if b == me and a not in graph.parameters]
        how = f"feeds {place.node}"
    else:  # gradients flow backwards
        names = [b for a, b, carries in graph.edges if a == me and carries]
        how = f"sends its gradient to {replace(place, pass_='forward')}"
    stops: list[Stop] = []
    for name in names:
        found = _recorded(view, name, place)
        if found is not None and len(stops) < _MOST_FEEDING:
            first = f"{name} {how}. {_seen(view, found, step)}"
            stops.append(_stop(found, step, first, _compared(view, found, place, step)))
    return stops


def _recorded(view: RunView, node: str, like: Place) -> Place | None:
    """Return the tensor of a node in the same pass, in the nearest iteration."""
    for role in view.roles(node):
        known = view.iterations(node, role)
        iteration = nearest(np.array(known), like.iteration)
        if iteration is not None and like.pass_ in view.passes(node, role, iteration):
            return Place(node, role, iteration, like.pass_)
    return None


def _others(view: RunView, finding: Finding) -> Stop:
    named = "; ".join(str(place) for place in finding.others[:3])
    more = finding.also - min(3, len(finding.others))
    first = f"The same problem occurs at {count(finding.also)} other "
    first += f"{'tensor' if finding.also == 1 else 'tensors'}: {named}"
    first += f" and {count(more)} more." if more > 0 else "."
    other, measured = finding.others[0], _measured(view, finding)
    second = _seen(view, other, finding.first_step, measured)
    return _stop(other, finding.first_step, first, second, statistic=measured)


def _advice(finding: Finding) -> Stop:
    evidence = [
        f"{name.replace('_', ' ')} {value if isinstance(value, str) else _written(value)}"
        for name, value in finding.evidence.items()
    ]
    measured = (
        f"Measured: {', '.join(evidence)}." if evidence else "The rule did not measure a value."
    )
    sentences = finding.advice, measured
    send = _send(finding.place, finding.first_step)
    return Stop(ADVICE, sentences, send, finding.place, finding.first_step)


def _written(value: float) -> str:
    """Return a number as text; counts, which rules store as floats, get no decimals."""
    return (
        count(int(value)) if math.isfinite(value) and float(value).is_integer() else number(value)
    )


def _stop(
    place: Place | None, step: int, first: str, second: str, *, title: str = "",
    sample: int | None = None, statistic: str = "",
) -> Stop:  # fmt: skip
    title, send = title or str(place), _send(place, step, sample, statistic)
    return Stop(title, (first, second), send, place, step, sample, statistic)


def _send(place: Place | None, step: int, sample: int | None = None, statistic: str = "") -> str:
    section = _LOSS_SECTION if place is None else "inspect"
    return link(place, step, sample=sample, statistic=statistic, section=section)


def _compared(view: RunView, before: Place, after: Place, step: int) -> str:
    """Return one sentence that compares the extremes of two tensors at a step."""
    at = nearest(view.steps(""), step)
    lines = [_numbers(view, slot_at(view, place), at) for place in (before, after)]
    text = _extremes(lines[1], one=True)
    if not text:
        return _seen(view, after, step)
    changes = []
    for name in ("min", "max"):
        a, b = (abs(line.get(name, math.nan)) for line in lines)
        if a > 0 and b > 0 and max(a / b, b / a) >= _NOTABLE:
            where = "closer to 0" if a > b else "farther from 0"
            changes.append(f"its {name} is {number(max(a / b, b / a), digits=3)} times {where}")
    change = f"; {' and '.join(changes)}" if changes else ""
    return f"There, {after} {text}{change}."


def slot_at(view: RunView, place: Place) -> Slot | None:
    """Return the slot of a place; None if it is not recorded."""
    return view.passes(place.node, place.role, place.iteration).get(place.pass_)


def _numbers(view: RunView, slot: Slot | None, step: int | None) -> dict[str, float]:
    return {} if slot is None or step is None else view.row(step, "", "mean").line(slot.id)


_CALLED = {
    "zero_fraction": "the share of zeros",
    "nonfinite": "the number of NaN or infinite elements",
}
"""Names of statistics in sentences; all others appear under their own names."""


def _seen(view: RunView, place: Place, step: int, statistic: str = "") -> str:
    """Return one sentence with the tensor's numbers at a step.

    Args:
        view: The run.
        place: The tensor.
        step: The step; the nearest recorded one is used.
        statistic: The statistic to name; "" for the range of the values.
    """
    slot, at = slot_at(view, place), nearest(view.steps(""), step)
    if slot is None or at is None:
        return f"{place} is not recorded."
    line = _numbers(view, slot, at)
    value = line.get(statistic, math.nan)
    if math.isfinite(value):
        what = _CALLED.get(statistic, f"the {rule_label(statistic)}")
        each = "" if slot.batch_dim is None else " per sample, on average"
        return f"At step {count(at)}, {what} of {place} is {_written(value)}{each}."
    parts = _extremes(line) or _single(view, slot, line)
    bad = line.get("nonfinite", math.nan)
    if not parts and bad > 0:
        return f"At step {count(at)}, {place} contains NaN or infinite values."
    if not parts:
        return f"{place} is not recorded at step {count(at)}."
    odd = "; others are NaN or infinite" if bad > 0 else ""
    if slot.batch_dim is None:
        return f"At step {count(at)}, values of {place} {parts}{odd}."
    return f"At step {count(at)}, samples of {place} {parts} on average{odd}."


def _extremes(line: dict[str, float], *, one: bool = False) -> str:
    """Return the text after "values of x", or after "x" if `one`; "" if extremes are unknown."""
    low, high = line.get("min", math.nan), line.get("max", math.nan)
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    if low == high:
        return f"{'is' if one else 'are'} {number(low)}"
    return f"{'reaches' if one else 'reach'} from {number(low)} to {number(high)}"


def _single(view: RunView, slot: Slot, line: dict[str, float]) -> str:
    """Return text about the statistic that fits a tensor whose extremes are unknown."""
    statistic = fitting(view, slot).statistic
    value = line.get(statistic, math.nan)
    return "" if math.isnan(value) else f"have a {rule_label(statistic)} of {number(value)}"
