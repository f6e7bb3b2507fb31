"""Findings for display: initial selections, link targets, flags on the step bar, node colours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from comgra_decl.rules import Diagnosis, Finding, Place
from comgra_decl.viewer.model.graph import Graph
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, nearest
from comgra_decl.viewer.model.verdicts import found
from comgra_decl.viewer.palette import AMBER, BLUE, RED

COLOURS = {"error": RED, "warning": AMBER, "hint": BLUE}
"""Colours by severity for the step bar, heat maps and the graph."""

RULE = "rule:"
"""Prefix of a rule name in `colour` if a single rule colours the graph."""

_CALM = "#dde4ea"
_RANK = {"hint": 0, "warning": 1, "error": 2}


@dataclass(frozen=True, slots=True)
class FindingMark:
    """A step at which findings begin, with its position and the worst severity."""

    index: int
    title: str
    severity: str

    @property
    def colour(self) -> str:
        """Colour of the severity."""
        return COLOURS[self.severity]


def findings_of(view: RunView) -> tuple[Finding, ...]:
    """Return the known findings, most important first."""
    diagnosis: Diagnosis | None = found(view).diagnosis
    return () if diagnosis is None else tuple(diagnosis.findings)


def rules_of(view: RunView) -> tuple[str, ...]:
    """Return the rules with findings about a tensor, worst first."""
    return tuple(dict.fromkeys(f.rule for f in findings_of(view) if f.place is not None))


def painted_rule(view: RunView, colour: str) -> str | None:
    """Return the rule that colours the graph; "" for all rules, None for none.

    Returns None for a rule without findings.
    """
    if colour == "findings":
        return ""
    rule = colour.removeprefix(RULE)
    diagnosis = found(view).diagnosis
    if rule == colour or diagnosis is None:
        return None
    return rule if rule in diagnosis.checked or rule in rules_of(view) else None


def finding_marks(view: RunView, type_: str) -> tuple[FindingMark, ...]:
    """Return a flag for each step at which findings begin. The title lists them, worst first."""
    steps = view.steps(type_)
    marks: dict[int, FindingMark] = {}
    for finding in findings_of(view):
        step = nearest(steps, finding.first_step)
        if step is None:
            continue
        index = int(np.searchsorted(steps, step))
        line = f"{finding.severity}: {finding.rule} from {finding.began}"
        before = marks.get(index)
        if before is None:
            marks[index] = FindingMark(index, line, finding.severity)
        else:
            worst = max(before.severity, finding.severity, key=_RANK.__getitem__)
            marks[index] = FindingMark(index, f"{before.title}\n{line}", worst)
    return tuple(marks[index] for index in sorted(marks))


def placed(view: RunView, pass_: str) -> Iterator[tuple[Place, int, Finding]]:
    """Yield place, first step and finding for each finding about a tensor of a pass."""
    for finding in findings_of(view):
        if finding.place is not None and finding.place.pass_ == pass_:
            yield finding.place, finding.first_step, finding


def severities(
    view: RunView, at: Selection, rule: str = ""
) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the worst (severity, rule) at the selected step, by (node, role).

    Considers only one rule if it is given.
    """
    worst: dict[tuple[str, str], tuple[str, str]] = {}
    for finding in reversed(findings_of(view)):  # the first finding overwrites all others
        if at.step is None or not finding.first_step <= at.step <= finding.last_step:
            continue
        if rule and finding.rule != rule:
            continue
        for place in (*finding.others, *([finding.place] if finding.place else [])):
            key = place.node, place.role
            known = worst.get(key)
            if known is None or _RANK[known[0]] <= _RANK[finding.severity]:
                worst[key] = finding.severity, finding.rule
    return worst


def paint_of(
    view: RunView, at: Selection, graph: Graph, *,
    boxes: Iterator[tuple[str, tuple[str, ...]]], rule: str = "",
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:  # fmt: skip
    """Return the colour of every box (id, names of its nodes), and the legend.

    Combines all rules, or uses the given one.
    """
    worst: dict[str, tuple[str, str]] = {}
    owned = set(graph.parameters)
    for (node, role), found_ in severities(view, at, rule).items():
        name = f"{node}.{role}" if f"{node}.{role}" in owned else node
        if name not in worst or _RANK[worst[name][0]] < _RANK[found_[0]]:
            worst[name] = found_
    paint = {box: _paint([worst[m] for m in members if m in worst]) for box, members in boxes}
    legend = {
        "title": rule_label(rule) if rule else "findings",
        "low": "hint",
        "high": "error",
        "colors": [BLUE, BLUE, AMBER, AMBER, RED, RED],
        "help": f"Worst finding {f'of {rule_label(rule)} ' * bool(rule)}per tensor at this step",
    }
    return paint, legend


def rule_label(rule: str) -> str:
    """Return a rule's name for display."""
    return rule.replace("_", " ")


def _paint(inside: list[tuple[str, str]]) -> dict[str, Any]:
    if not inside:
        return {"fill": _CALM, "text": "", "hatched": False}
    severity, _ = max(inside, key=lambda found_: _RANK[found_[0]])
    return {"fill": COLOURS[severity], "text": severity, "hatched": False}


def opening(view: RunView, *, step: int | None = None) -> dict[str, Any]:
    """Return the initial selection of a page whose URL has none, by parameter of `ViewState`.

    This is the tensor and first step of the most important finding about a tensor. In a run without
    such findings, the page shows the loss at the last step; without a loss, the result is empty.

    Args:
        view: The run.
        step: The step, if it is already chosen; None uses that of the finding.
    """
    for finding in findings_of(view):
        place = finding.place
        if place is not None and place.role in view.roles(place.node):
            begin = nearest(view.steps(""), finding.first_step)
            at = {"node": place.node, "role": place.role, "iteration": place.iteration}
            return {**at, "step": begin if step is None else step}
    for slot in view.slots.values():
        if slot.kind == "loss" and slot.pass_ == "forward":
            return {"node": slot.node, "role": slot.role, "iteration": slot.iteration}
    return {}


def link(
    place: Place | None, step: int, *, sample: int | None = None, statistic: str = "",
    section: str = "",
) -> str:  # fmt: skip
    """Return the message that selects a tensor and step; see `jump`."""
    where = None if place is None else [place.node, place.role, place.iteration, place.pass_]
    return "go:" + json.dumps([where, step, sample, statistic, section], separators=(",", ":"))


def jump(view: RunView, at: Selection, message: str) -> dict[str, Any]:
    """Return the state changes that a `link` message requests."""
    where, step, sample, statistic, section = json.loads(message.removeprefix("go:"))
    wanted: dict[str, Any] = {"follow": False}
    type_ = at.type if step in view.steps(at.type) else ""
    wanted["step"] = nearest(view.steps(type_), step)
    if type_ != at.type:
        wanted["type"] = type_
    if where is not None:
        wanted |= dict(zip(("node", "role", "iteration"), where[:3], strict=True))
        if where[3] != "forward":
            wanted["gradient"] = where[3]
    if sample is not None:
        wanted["batch"] = str(sample)
    if statistic:
        wanted["statistic"] = statistic
    if section:
        wanted["section"] = section
    return wanted
