"""Comparisons as tables."""

from __future__ import annotations

import math

from comgra_decl.query import sentences
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.escaping import html_token as _raw
from comgra_decl.viewer.model.compare import Pair, Ranked, Ranking, percent
from comgra_decl.viewer.model.comparison_target import Other
from comgra_decl.viewer.model.labels import pass_label
from comgra_decl.viewer.model.numbers import MISSING, count, number, signed
from comgra_decl.viewer.model.partings import Search
from comgra_decl.viewer.model.runview import Slot
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.panes.base import SAVE, save_button

PART = "search"
"""Message of the button that searches for the first difference."""

_LISTED = 8  # maximum number of differing tensors
_NAMED = 12  # maximum number of nodes listed by name
_LONG = 120  # maximum characters of a setting


def statistics_html(
    rows: list[tuple[str, Pair]], at: Selection, other: Other, *, slot: Slot | None, note: str
) -> tuple[str, list[str]]:
    """Return the table of both sides as HTML, and its messages."""
    chips = [] if slot is None else [slot.role, pass_label(slot.pass_)]
    parts = "".join(f'<span class="chip">{_e(chip)}</span>' for chip in chips)
    where = other.run.rpartition("/")[2] if other.run else "this run"
    where += "" if other.step is None else f", step {other.step}"
    here, beside = at.type, other.type_beside(at.type)
    types = [f"{t or 'all training steps'}, " if here != beside else "" for t in (here, beside)]
    sides = f"this: {types[0]}step {at.step} \u00b7 other: {types[1]}{where}"
    lines = "".join(_statistic_line(name, pair, at) for name, pair in rows)
    body = (
        f'<div class="node-title" data-step="{at.step}" data-other="{other.step}">'
        f"<h2>{_e(at.node)}</h2>{parts}{save_button('these statistics')}</div>"
        f'<p class="note">{_e(sides)}</p>'
        + (f'<p class="note warn">{_e(note)}</p>' if note else "")
    )
    if rows:
        body += (
            '<table class="stats"><thead><tr><th>statistic</th>'
            '<th class="here">this</th><th class="there">other</th>'
            '<th>difference</th><th title="this divided by other">ratio</th></tr></thead>'
            f"<tbody>{lines}</tbody></table>"
        )
    return body, [SAVE, *(f"statistic:{name}" for name, _ in rows)]


def parting_html(search: Search | None) -> str:
    """Return where the runs diverge, or a button that searches for it."""
    title = "<h2>Where do the runs diverge?</h2>"
    button = f'<button type="button" class="act" data-send="{PART}">'
    if search is None:
        text = "The first step and tensor, in execution order, that differ by more than rounding."
        return f'{title}<p class="note">{text}</p><p>{button}Search</button></p>'
    if not search.over:
        return f'{title}<p class="note" role="status">Searching \u2026</p>'
    if search.found is None:
        return f'{title}<p class="note warn">{_e(search.problem)}</p><p>{button}Search</button></p>'
    lines = "".join(f"<p>{_e(line)}</p>" for line in sentences(search.found))
    rows = "".join(
        f'<tr tabindex="0" data-send="part:{number}"><td>{_e(one.name)}</td><td>{_e(one.numbers)}'
        "</td></tr>"
        for number, one in enumerate(search.found.differences[:_LISTED])
    )
    if rows:
        step = search.found.differences[0].step
        rows = (
            f'<table class="parting"><thead><tr><th>different at step {count(step)}</th>'
            f"<th>this and other</th></tr></thead><tbody>{rows}</tbody></table>"
        )
        rest = len(search.found.differences) - _LISTED
        if rest > 0:
            rows += f'<p class="note">and {count(rest)} later in execution order</p>'
    return f'{title}<div class="parting" role="status">{lines}</div>{rows}'


def parting_tokens(search: Search | None) -> list[str]:
    """Return the messages that `parting_html` may send."""
    if search is None or search.found is None:
        return []
    return [f"part:{number}" for number in range(len(search.found.differences[:_LISTED]))]


def ranking_html(ranking: Ranking, at: Selection) -> tuple[str, list[str]]:
    """Return the tensors that differ most and the unmatched nodes as HTML, and its messages."""
    lines = "".join(_ranked_line(row, at) for row in ranking.rows)
    content = (
        f"<h2>Largest differences in {_e(at.wide.statistic)} {save_button('all differences')}</h2>"
        '<p class="note" title="difference divided by the mean of the magnitudes; at most 200%">'
        f"{_compared(ranking)}</p>"
    )
    if lines:
        content += (
            '<table class="ranking"><thead><tr><th>tensor</th><th>relative</th>'
            '<th class="here">this</th><th class="there">other</th></tr></thead>'
            f"<tbody>{lines}</tbody></table>"
        )
    content += _alone("Only in this run", ranking.only_here)
    content += _alone("Only in the other run", ranking.only_there)
    return content, [SAVE, *(f"slot:{row.slot.id}" for row in ranking.rows)]


def _compared(ranking: Ranking) -> str:
    """Return a sentence with the numbers of compared and omitted tensors."""
    both, shown = ranking.compared, len(ranking.rows)
    text = f"{count(both) if both else 'No'} {_tensors(both)} recorded at both steps"
    text += f"; showing the {shown} largest differences." if shown < both else "."
    if ranking.absent:
        text += f" {count(ranking.absent)} more cannot be compared, because no value was recorded "
        text += "at one or both of the steps."
    return text


def _tensors(number: int) -> str:
    return "tensor" if number == 1 else "tensors"


def settings_html(settings: list[tuple[str, str, str]], *, same: bool) -> str:
    """Return the settings that differ between the two runs, as HTML."""
    if same:
        return ""
    if not settings:
        return "<h3>Settings</h3><p class='note'>Spec and config are identical.</p>"
    lines = "".join(
        f"<tr><td>{_e(key)}</td>{_value(here)}{_value(there)}</tr>" for key, here, there in settings
    )
    return (
        '<h3>Settings that differ</h3><table class="settings"><thead><tr><th>setting</th>'
        f'<th class="here">this</th><th class="there">other</th></tr></thead><tbody>{lines}</tbody>'
        "</table>"
    )


def _statistic_line(name: str, pair: Pair, at: Selection) -> str:
    mark = ' class="chosen" aria-selected="true"' if name == at.statistic else ""
    there = math.isfinite(pair.difference)
    return (
        f'<tr{mark} tabindex="0" data-send="statistic:{_raw(name)}"><td>{_e(name)}</td>'
        f"{_number(pair.here, known=pair.recorded[0])}{_number(pair.there, known=pair.recorded[1])}"
        f"<td>{signed(pair.difference) if there else MISSING}</td>"
        f"<td>{number(pair.ratio, digits=3) if math.isfinite(pair.ratio) else MISSING}</td></tr>"
    )


def _ranked_line(row: Ranked, at: Selection) -> str:
    slot, pair = row.slot, row.pair
    chosen = (slot.node, slot.role, slot.iteration) == (at.node, at.role, at.iteration)
    mark = ' class="chosen" aria-selected="true"' if chosen else ""
    iteration = f" [{slot.iteration}]" if slot.iteration else ""
    relative = (
        '<td class="broken">not finite</td>' if row.broken else f"<td>{percent(pair.relative)}</td>"
    )
    return (
        f'<tr{mark} tabindex="0" data-send="slot:{slot.id}">'
        f'<td>{_e(slot.node)} <span class="soft">{_e(slot.role + iteration)}</span></td>'
        f"{relative}{_number(pair.here, digits=3)}{_number(pair.there, digits=3)}</tr>"
    )


def _number(value: float, *, digits: int = 4, known: bool = True) -> str:
    if not known:
        return f'<td class="missing">{MISSING}</td>'
    kind = "" if math.isfinite(value) else ' class="broken"'
    return f"<td{kind}>{number(value, digits=digits)}</td>"


def _alone(title: str, nodes: tuple[str, ...]) -> str:
    if not nodes:
        return ""
    rest = len(nodes) - _NAMED
    named = ", ".join(nodes[:_NAMED]) + (f" and {count(rest)} more" if rest > 0 else "")
    return f'<h3>{title}: {count(len(nodes))}</h3><p class="note">{_e(named)}</p>'


def _value(text: str) -> str:
    short = text if len(text) <= _LONG else f"{text[:_LONG]}\u2026"
    return f'<td title="{_e(text)}">{_e(short)}</td>'
