"""Shows findings (problems, where they began, what to do about them) and correlations."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import panel as pn

from comgra_decl.query import Ending
from comgra_decl.rules import Check, Correlation, Diagnosis, Finding, health, unseen
from comgra_decl.rules.finding import consequences_of, roots_of
from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.escaping import html_token as _raw
from comgra_decl.viewer.model.findings import RULE, jump, link, rule_label
from comgra_decl.viewer.model.headline import ending_of
from comgra_decl.viewer.model.numbers import count, many, number
from comgra_decl.viewer.model.tables import findings_csv
from comgra_decl.viewer.model.verdicts import Found, found, look, looked_at
from comgra_decl.viewer.model.walk import finding_at, moves_to, walk_of
from comgra_decl.viewer.panes.base import SAVE, Pane, Shown, hand_table, html_view, save_button

_LOOK, _PAINT, _WALK = "look", "paint", "walk:"
_MOST_OTHERS = 6


class FindingsPane(Pane):
    """The findings, with links to tensors and steps. Runs the rules once on a finished run."""

    reads: ClassVar = frozenset({"run", "revision", "type", "step", "node", "role", "looked"})
    sizing: ClassVar = "stretch_width"

    def build(self) -> Any:
        """Create the HTML view."""
        self.view = html_view()
        self.view.on_message(self._on_message)
        return self.view

    def components(self) -> list[Any]:
        """Return the HTML view, which handles clicks."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Rewrite the content if anything has changed.

        Runs the rules once if the run is not live.
        """
        if shown.view.run.state != "live" and not looked_at(shown.view):
            self._look(shown)
        content = page_of(found(shown.view), shown)
        if content != self.view.html:
            self.view.param.update(html=content, tokens=_tokens(content))

    def _look(self, shown: Shown) -> None:
        """Start a check in the background. The session detects its end by polling."""
        over = look(shown.view)
        if pn.state.curdoc is None:  # a notebook has no polling
            over.wait()

    def _on_message(self, message: Message) -> None:
        sent = message["send"]
        if self._shown is None:
            return
        if sent == SAVE:
            table = findings_csv(self._shown.view)
            hand_table(self.view, self._shown.at, "findings", table)
        elif sent == _LOOK:
            self._look(self._shown)
            self.update(self._shown)
        elif sent == _PAINT:
            self.act(colour="findings")
        elif sent.startswith(RULE):
            self.act(colour=sent)
        elif sent.startswith(_WALK):
            self._walk(self._shown, int(sent.removeprefix(_WALK)))
        else:
            self.act(**jump(self._shown.view, self._shown.at, sent))

    def _walk(self, shown: Shown, number: int) -> None:
        """Start the walk through the evidence of a finding."""
        finding = finding_at(shown.view, number)
        if finding is not None:
            stop = walk_of(shown.view, finding)[0]
            self.act(**moves_to(shown.view, shown.at, finding, (number, 0), stop))


def page_of(known: Found, shown: Shown) -> str:
    """Return the whole section as HTML."""
    diagnosis = known.diagnosis
    parts = [_ended(ending_of(shown.view)), _bar(known)]
    if diagnosis is not None:
        parts.append(_health(health(diagnosis)))
        parts.append(_unseen(diagnosis))
        parts.append(_list(diagnosis.findings, shown) if diagnosis.findings else _NOTHING)
    if known.correlations is not None:
        parts.append(_together(known.correlations))
    if diagnosis is not None:
        parts.append(_unchecked(diagnosis))
    return f'<div class="findings">{"".join(parts)}</div>'


def _ended(ending: Ending | None) -> str:
    """Return why the program ended; its stack and memory are folded."""
    if ending is None:
        return ""
    parts = []
    for title, lines in ending.parts:
        inside = "".join(f"<li>{_e(line)}</li>" for line in lines)
        listed = f"<ul>{inside}</ul>"
        if title.startswith(_FOLDED):
            parts.append(f"<details><summary>{_e(title)}</summary>{listed}</details>")
        else:
            parts.append(f"<h4>{_e(title)}</h4>{listed}")
    return (
        '<article class="finding error-finding ending" aria-label="Post-mortem"><header>'
        f'<span class="severity">error</span> <b>{_e(ending.headline)}</b></header>'
        f"{''.join(parts)}</article>"
    )


_FOLDED = ("Stack", "Memory")


_NOTHING = '<p class="calm">No findings.</p>'


def _bar(known: Found) -> str:
    diagnosis = known.diagnosis
    if known.looking:
        text = "Checking all records \u2026"
    elif known.problem:
        text = f'<span class="bad">The last check failed: {_e(known.problem)}</span>'
    elif diagnosis is None:
        text = "No rules were checked during recording."
    else:
        when = "during recording" if known.source == "recorded" else "just now"
        checked = many(diagnosis.records, "training record")
        text = f"{checked} {'was' if diagnosis.records == 1 else 'were'} checked {when}."
        if not diagnosis.records:
            text = f"Evaluations were checked {when}; there are no training records."
    disabled = " disabled" if known.looking else f' data-send="{_LOOK}"'
    return (
        f'<p class="bar"><span role="status">{text}</span>'
        f'<button type="button"{disabled}>Check again</button>'
        f'<button type="button" data-send="{_PAINT}">Show all in graph</button>'
        + ("" if diagnosis is None else save_button("the findings"))
        + "</p>"
    )


def _health(checks: Iterable[Check]) -> str:
    parts: dict[str, list[str]] = {}
    for check in checks:
        parts.setdefault(check.question.part, []).append(_check(check))
    columns = "".join(
        f"<section><h3>{_e(part)}</h3><ul>{''.join(lines)}</ul></section>"
        for part, lines in parts.items()
    )
    return f'<div class="health" aria-label="Health check">{columns}</div>'


def _check(check: Check) -> str:
    title = f"{check.state}: {check.evidence}"
    said = check.state if check.colour in ("partly", "absent") else ""
    shown = "; ".join(part for part in (said, check.numbers) if part)
    inside = (
        f'<span class="dot {check.colour}" aria-hidden="true"></span>{_e(check.question.text)}'
        f'<span class="unseen"> {_e(check.state)}</span>'
        + (f'<span class="numbers">{_e(shown)}</span>' if shown else "")
    )
    worst = check.findings[0] if check.findings else None
    if worst is None:
        return f'<li class="{check.colour}" title="{_e(title)}">{inside}</li>'
    send = link(worst.place, worst.first_step, sample=worst.sample)
    return (
        f'<li class="{check.colour}" title="{_e(title)}"><div tabindex="0" role="button" '
        f'data-send="{_raw(send)}">{inside}</div></li>'
    )


def _unseen(diagnosis: Diagnosis) -> str:
    """Return the limitations of the checklist, which are always shown with it."""
    lines = "".join(f"<p>{_e(sentence)}</p>" for sentence in unseen(diagnosis))
    return f'<div class="caveats">{lines}</div>'


def _list(findings: Sequence[Finding], shown: Shown) -> str:
    """Return the findings, each followed by its folded consequences."""
    parts = ["<h3>Findings, most important first</h3>"]
    places = {id(finding): number for number, finding in enumerate(findings)}
    for finding in roots_of(findings):
        parts.append(_finding(finding, shown, places[id(finding)]))
        consequences = consequences_of(finding, findings)
        if consequences:
            names = ", ".join(rule_label(f.rule) for f in consequences)
            inside = "".join(_finding(f, shown, places[id(f)]) for f in consequences)
            parts.append(
                f'<details class="consequences"><summary>This explains: {_e(names)}</summary>'
                f"{inside}</details>"
            )
    return "".join(parts)


def _finding(finding: Finding, shown: Shown, number: int) -> str:
    here = finding.place
    chosen = here is not None and (here.node, here.role) == (shown.at.node, shown.at.role)
    go = link(here, finding.first_step, sample=finding.sample)
    name = "whole run" if here is None else str(here)
    inspect = link(here, finding.first_step, sample=finding.sample, section="inspect")
    return (
        f'<article class="finding {finding.severity}-finding{" chosen" if chosen else ""}" '
        f'data-rule="{_e(finding.rule)}"><header><span class="severity">{finding.severity}</span> '
        f"<b>{_e(rule_label(finding.rule))}</b> {_button(go, name)} "
        f'<span class="soft">{_span(finding)}</span>'
        + _button(f"{_WALK}{number}", "Show me", "start", title="Walk through the evidence")
        + ("" if here is None else _button(f"{RULE}{finding.rule}", "Show in graph", "paint"))
        + ("" if here is None else _button(inspect, "Inspect \u2192", "inspect"))
        + f"</header><p>{_e(finding.message)}</p>{_chain(finding)}{_others(finding)}"
        f'<p class="advice">{_e(finding.advice)}</p>{_evidence(finding)}</article>'
    )


def _span(finding: Finding) -> str:
    first, last = count(finding.first_step), count(finding.last_step)
    if finding.after_step is not None and not finding.is_exact:
        return f"between steps {count(finding.after_step + 1)} and {first}, until step {last}"
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _chain(finding: Finding) -> str:
    if not finding.chain:
        return ""
    links = " \u2192 ".join(
        _button(
            link(part.place, part.first_step), str(part.place), title=f"{_since(part.first_step)}"
            f"{part.what.replace('_', ' ')}",
        )
        for part in finding.chain
    )  # fmt: skip
    return f'<p class="chain"><span class="soft">starts at</span> {links}</p>'


def _since(step: int) -> str:
    return f"since step {step}: " if step >= 0 else ""


def _others(finding: Finding) -> str:
    if not finding.also:
        return ""
    links = ", ".join(
        _button(link(place, finding.first_step), str(place))
        for place in finding.others[:_MOST_OTHERS]
    )
    more = "" if finding.also <= _MOST_OTHERS else f" and {finding.also - _MOST_OTHERS} more"
    return f'<p class="chain"><span class="soft">also at</span> {links}{more}</p>'


def _evidence(finding: Finding) -> str:
    parts = [f"{name.replace('_', ' ')} {_value(v)}" for name, v in finding.evidence.items()]
    if finding.because is not None:
        parts.insert(0, f"probable cause: {finding.because.replace('_', ' ')}")
    text = " \u00b7 ".join(parts)
    return f'<p class="note">{_e(text)}</p>' if parts else ""


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return count(value) if isinstance(value, int) else number(value)


def _together(correlations: Iterable[Correlation]) -> str:
    lines = "".join(_pair(correlation) for correlation in correlations)
    if not lines:
        return "<h3>Correlations</h3><p>No correlations beyond chance.</p>"
    return f'<h3>Correlations</h3><ul class="together">{lines}</ul>'


def _pair(correlation: Correlation) -> str:
    places = [side for side in (correlation.first, correlation.second) if side.place is not None]
    links = "".join(
        _button(
            link(side.place, correlation.first_step, statistic=side.statistic, section="inspect"),
            f"Show {side.place}", "evidence",
        )
        for side in places
    )  # fmt: skip
    also = ", ".join(str(side) for side in correlation.also)
    title = f' title="{_e(also)}"' if also else ""
    return f"<li{title}><span>{_e(correlation.sentence)}</span> {links}</li>"


def _unchecked(diagnosis: Diagnosis) -> str:
    if not diagnosis.unchecked:
        return ""
    rows = "".join(
        f"<tr><td>{_e(rule_label(entry.rule))}</td><td>{_e(entry.reason)}</td></tr>"
        for entry in diagnosis.unchecked
    )
    head = f"{len(diagnosis.checked)} rules were checked; these could not be"
    return f'<h3>{head}</h3><table class="unchecked"><tbody>{rows}</tbody></table>'


def _button(send: str, text: str, class_: str = "go", *, title: str = "") -> str:
    tip = f' title="{_e(title)}"' if title else ""
    return (
        f'<button type="button" class="{class_}" data-send="{_raw(send)}"{tip}>{_e(text)}</button>'
    )


def _tokens(content: str) -> list[str]:
    """Return the messages that the page may send: all of its `data-send` values."""
    pieces = content.split('data-send="')[1:]
    return sorted({html.unescape(piece.partition('"')[0]) for piece in pieces})
