"""The card with what each layer of a language model predicts."""

from __future__ import annotations

from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.escaping import html_token as _raw
from comgra_decl.viewer.model.lenses import Lens
from comgra_decl.viewer.model.numbers import MISSING, count, number
from comgra_decl.viewer.panes.effects import shaded


def lens_card(lens: Lens) -> str:
    """Return a card with a row for each layer and a column for each position.

    Below, the ranks of one position's token: a row for each layer and a column for each step. A
    click on the heading of a column selects its position.
    """
    heads = "".join(_position(lens, i, word) for i, word in enumerate(lens.words))
    rows = []
    for node, cells in lens.layers:
        inner = "".join(
            f'<td style="{_shade(p)}" title="{_probability(p)}">{_e(word)}</td>'
            for word, p in cells
        )
        rows.append(f"<tr><th>{_e(node)}</th>{inner}</tr>")
    return (
        f'<div class="card"><h3>{_e(lens.title)}</h3><div class="wide"><table class="lens">'
        f"<thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f"<p>{_e(lens.note)}</p>{_ranks(lens)}</div>"
    )


def _position(lens: Lens, position: int, word: str) -> str:
    if lens.ranks is None:
        return f"<th>{_e(word)}</th>"
    pressed = str(position == lens.ranks.position).lower()
    return (
        f'<th><button type="button" data-send="lens:{_raw(lens.name)}:{position}" '
        f'aria-pressed="{pressed}" title="ranks at position {position}">{_e(word)}</button></th>'
    )


def _probability(value: float) -> str:
    return "no token" if value != value else f"probability {number(value, digits=3)}"


def _shade(share: float) -> str:
    return "" if share != share else shaded(share)


def _ranks(lens: Lens) -> str:
    """Return the table of ranks; "" if they were not recorded."""
    ranks = lens.ranks
    if ranks is None:
        return ""
    heads = "".join(f"<th>{count(step)}</th>" for step in ranks.steps)
    rows = []
    for node, places in ranks.layers:
        cells = "".join(
            f'<td style="{shaded(1 / place)}">{count(place)}</td>'
            if place
            else f"<td>{MISSING}</td>"
            for place in places
        )
        rows.append(f"<tr><th>{_e(node)}</th>{cells}</tr>")
    at = ranks.position
    word = f" ({_e(lens.words[at])})" if at < len(lens.words) else ""
    return (
        f'<div class="wide"><table class="lens ranks"><thead><tr><th>step</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f"<p>cells: the rank that each layer gives to {_e(lens.explained)}, at position {at}{word}"
        "; 1 is the highest</p>"
    )
