"""The samples of a probe, and pictures of the selected one at the selected step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar

from comgra_decl.records import INTERVENTION_PREFIX, PROBE_PREFIX
from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.components.parts import Part, PartsView
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.brushing import Brush
from comgra_decl.viewer.model.cache import Cache
from comgra_decl.viewer.model.circuits import STRONGEST, Drawing, circuit_drawing
from comgra_decl.viewer.model.clouds import Clouds, laid_out, layouts_here
from comgra_decl.viewer.model.compare import DIFFERENCE, Ranked, ranking_of
from comgra_decl.viewer.model.comparison_target import Other
from comgra_decl.viewer.model.effects import EffectTable, PlaceEffects, place_effects
from comgra_decl.viewer.model.numbers import MISSING, count, number
from comgra_decl.viewer.model.pictures import (
    Album,
    Card,
    Exhibit,
    album,
    parts_of,
)
from comgra_decl.viewer.model.table_cards import TableCard
from comgra_decl.viewer.panes.base import Pane, Shown
from comgra_decl.viewer.panes.clouds import FIT_AGAIN, LASSO, cloud_card
from comgra_decl.viewer.panes.effects import CSS as EFFECTS
from comgra_decl.viewer.panes.effects import (
    cell_of,
    circuit_card,
    effects_card,
    grids,
    place_card,
    shaded,
    tokens,
)
from comgra_decl.viewer.panes.gallery import CSS as GALLERY
from comgra_decl.viewer.panes.gallery import gallery
from comgra_decl.viewer.panes.landscapes import landscape_card
from comgra_decl.viewer.panes.lenses import lens_card
from comgra_decl.viewer.panes.record_cards import CSS as RECORD_CARDS
from comgra_decl.viewer.panes.record_cards import missing_card, record_card
from comgra_decl.viewer.style import CSS

_CSS = """
.cards { align-items: flex-start; display: flex; flex-wrap: wrap; gap: 12px; margin: 8px 0 14px; }
.card img { display: block; image-rendering: pixelated; object-fit: contain; }
.card .lens th { white-space: nowrap; }
.card .lens td { text-align: center; white-space: pre; }
.card .lens th button { background: none; border: 1px solid transparent; color: inherit;
  cursor: pointer; font: inherit; padding: 0 2px; white-space: pre; }
.card .lens th button[aria-pressed="true"] { border-color: #3f6fd8; border-radius: 4px; }
.card .lens tbody th { position: sticky; left: 0; background: var(--panel-surface-color, #fff); }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 8px 10px; }
.card h3 { font-size: 13px; letter-spacing: 0; margin: 0 0 6px; overflow-wrap: anywhere;
  text-transform: none; }
.card img { background: var(--faint); height: 190px; width: 190px; }
.card .over { position: relative; width: fit-content; }
.card .over .veil { background: none; height: 100%; inset: 0; object-fit: fill; position: absolute;
  width: 100%; }
.card .over img { height: auto; max-height: 190px; min-height: 40px; }
.choice { margin: 0 0 8px; }
.card p { margin: 6px 0 0; max-width: 260px; overflow-wrap: anywhere; }
.card table td, .card table th { font-size: 11px; padding: 2px 5px; text-align: right; }
.card { box-sizing: border-box; max-width: 100%; }
.card .wide { max-height: 420px; max-width: 760px; overflow: auto; }
.card button[aria-pressed], .choice button { background: none; border: 1px solid var(--line);
  border-radius: 6px; color: inherit; cursor: pointer; font: inherit; padding: 2px 8px; }
button[aria-pressed="true"]:not(.tile) { border-color: #3f6fd8; color: #3f6fd8; }
.card pre { margin: 6px 0 0; max-width: 420px; white-space: pre-wrap; }
.card .curve { display: block; }
.curve path { fill: none; stroke: #3f6fd8; stroke-width: 1.8; }
.curve line { stroke: currentColor; stroke-dasharray: 3 3; stroke-opacity: 0.5; }
.curve text { fill: currentColor; font-size: 10px; }
.curve rect { fill: #3f6fd8; fill-opacity: 0.75; }
.curve circle { cursor: pointer; fill: #3f6fd8; }
.bars { border-bottom: 1px solid currentColor; border-left: 1px solid currentColor; }
.way polyline { fill: none; stroke: #d1561f; stroke-width: 0.8; }
.way circle { fill: #d1561f; }
.points .lasso { fill: none; stroke: currentColor; stroke-dasharray: 3 3; pointer-events: none; }
.points.some g:not(.brushed) { opacity: 0.3; }
.heights { background: linear-gradient(to right, #f4f7fc, #1d4c91); display: inline-block;
  height: 8px; margin: 0 6px; width: 70px; }
.words { display: flex; flex-wrap: wrap; gap: 2px; max-width: 420px; }
.words span { border-radius: 3px; padding: 1px 4px; white-space: pre; }
.ramp { background: linear-gradient(to right, #2463ad, #fff, #d1561f); display: inline-block;
  height: 8px; margin: 0 6px; width: 70px; }
.ramp.up { background: linear-gradient(to right, #fff, #d1561f); }
"""

_NO_PROBE = """
<div class="notice"><h2>No samples to follow</h2>
<p>A probe passes the same samples through a copy of the model at recorded steps. Declare a probe,
and the pictures to compute from its samples:</p> <pre>probes:
  eyes: {samples: {count: 8}}
pictures:
  cam: {method: grad_cam, of: eyes, select: {class: Conv2d}, target: label}</pre></div>
"""

_NO_PICTURE = """
<div class="card empty"><h3>No picture is declared</h3><pre>pictures:
  cam:  {{method: grad_cam, of: {probe}, select: {{class: Conv2d}}, target: label}}
  maps: {{method: integrated_gradients, of: {probe}, target: top}}</pre></div>
"""


_NO_INTERVENTION = """
<div class="card empty"><h3>No intervention is declared</h3><pre>interventions:
  no_mlp: {{of: {probe}, select: "**.mlp", do: zero}}
  units:  {{of: {probe}, select: {{class: Linear}}, do: zero, sweep: [node, feature]}}</pre></div>
"""


_NOT_MADE = """
<div class="card empty"><h3>There is no intervention {name}</h3><p>{why}</p></div>
"""


_OVER = "over"
"""What the button sends that lays the maps over the image of the sample."""


_PAGES = 8 << 20
"""Bytes of the pages of steps that a session keeps."""


@dataclass(frozen=True, slots=True)
class _Page:
    """What the section shows for a selection; see `PartsView`. `tables` are its effects."""

    parts: tuple[Part, ...]
    tokens: list[str]
    grids: dict[str, tuple[int, int]]
    picks: dict[str, int]
    tables: dict[str, EffectTable]


def _step(shown: Shown) -> int:
    return -1 if shown.at.step is None else shown.at.step


class PicturesPane(Pane):
    """A gallery of the probe's samples. A click selects a sample for all sections."""

    reads: ClassVar = frozenset(
        {"run", "revision", "type", "step", "node", "batch", "looked", "brush"}
    )
    sizing: ClassVar = "stretch_width"

    def build(self) -> Any:
        """Create the HTML view."""
        self._clouds = Clouds()
        self._over = False
        self._positions: dict[str, int] = {}
        self._place, self._strongest = "", STRONGEST[0]
        self._tables: dict[str, EffectTable] = {}
        self._pages = Cache(_PAGES)
        css = CSS + _CSS + GALLERY + EFFECTS + RECORD_CARDS
        self.view = PartsView(css=css, sizing_mode="stretch_width", margin=0)
        self.view.on_message(self._on_message)
        return self.view

    def components(self) -> list[Any]:
        """Return the HTML view, which handles clicks."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Show the gallery and the cards, of which only changed ones are sent."""
        page = self._page_of(shown)
        self._tables = page.tables
        self.view.show_page(
            page.parts, frame=self._frame(shown), step=_step(shown), tokens=page.tokens,
            grids=page.grids, picks=page.picks,
        )  # fmt: skip

    def ahead(self, shown: Shown) -> Iterator[Callable[[], object]]:
        """Yield the work for the page of another step, which is then sent to the browser."""
        if (self._frame(shown), _step(shown)) not in self._pages:
            yield from parts_of(shown.view, shown.at)
        elif self.view.has(self._page_of(shown).parts):
            return
        yield partial(self._send_ahead, shown)

    def _send_ahead(self, shown: Shown) -> None:
        page = self._page_of(shown)
        self.view.send_ahead(page.parts, frame=self._frame(shown), step=_step(shown))

    def _frame(self, shown: Shown) -> str:
        """Return a text that is the same for selections of which only the step differs."""
        view, brushed = shown.view, shown.brush.samples
        own = self._over, self._positions, self._place, self._strongest, self._clouds.state
        at = shown.at.type, shown.at.node, shown.at.sample
        of_run = str(view.run.path), view.number, view.revision, laid_out(view)
        return blake2b(repr((of_run, at, brushed, own)).encode(), digest_size=9).hexdigest()

    def _page_of(self, shown: Shown) -> _Page:
        """Return the page of a selection, which is kept."""
        key = self._frame(shown), _step(shown)
        return self._pages.get(key, lambda: self._make(shown))

    def _make(self, shown: Shown) -> _Page:
        found = album(shown.view, shown.at, self._clouds, positions=self._positions)
        drawings = [circuit_drawing(shown.view, t, self._strongest) for t in found.effects]
        circuits = [drawing for drawing in drawings if drawing is not None]
        sent = [f"sample:{tile.sample}" for tile in found.tiles]
        sent += [f"node:{node}" for node in _nodes(found, circuits)]
        sent += [f"lens:{lens.name}:{i}" for lens in found.lenses for i in range(len(lens.words))]
        sent += tokens()
        sent += [f"cloud:{method}" for method in layouts_here()] + [FIT_AGAIN, _OVER]
        place = self._opened(shown, found)
        cards = []
        for table in found.effects:
            cards.append(effects_card(table, self._place))
            if place is not None and cell_of(self._place)[0] == table.name:
                cards.append(place_card(place, self._place))
        cards += [circuit_card(drawing) for drawing in circuits]
        brushed = tuple(i for i in shown.brush.samples if i < len(found.tiles))
        return _Page(
            _parts(found, shown.at.node, cards, over=self._over, brushed=brushed),
            sent,
            grids(found.effects),
            {LASSO: len(found.tiles)},
            {table.name: table for table in found.effects},
        )

    def _opened(self, shown: Shown, found: Album) -> PlaceEffects | None:
        """Return the effects in the place of the chosen cell; None if there is none."""
        if not self._place:
            return None
        name, row, column = cell_of(self._place)
        table = next((table for table in found.effects if table.name == name), None)
        if table is None or table.values is None:
            return None
        return place_effects(shown.view, table, row, column)

    def _on_message(self, message: Message) -> None:
        sent = message["send"]
        kind, _, rest = sent.partition(":")
        if kind == "sample":
            self.act(batch=rest)
            return
        if kind == "node":
            self.act(node=rest)
            return
        if kind == LASSO:
            assert self._shown is not None
            was = self._shown.brush
            numbers = rest.split(",") if rest else ()
            self.act(brush=Brush.of(samples=map(int, numbers), steps=was.steps, runs=was.runs))
            return
        if kind == "cloud":
            self._clouds.method = rest
        elif kind == FIT_AGAIN:
            self._clouds.fit_again()
        elif kind == _OVER:
            self._over = not self._over
        elif kind == "lens":
            name, _, position = rest.rpartition(":")
            self._positions[name] = int(position)
        elif kind == "strongest":
            self._strongest = int(rest)
        elif kind == "place":
            self._open(sent)
            return
        self.again()

    def _open(self, token: str) -> None:
        """Open the place of a cell; if all tensors are recorded, also compare them."""
        table = self._tables[cell_of(token)[0]]
        if table.swept:
            self._place = "" if token == self._place else token
            self.again()
        else:
            self._place = token
            self._compare(table)

    def _compare(self, table: EffectTable) -> None:
        """Show the record of an intervention beside that of the probe, also on the graph.

        If no value differs, the gradients are compared. If the selected node is in neither record,
        the one that differs most is selected.
        """
        shown = self._shown
        assert shown is not None
        type_, probe = INTERVENTION_PREFIX + table.name, PROBE_PREFIX + table.probe
        other = Other("", shown.view, table.step, type=probe)
        at = replace(shown.at, type=type_, step=table.step)
        passes = ("forward", *shown.view.gradient_passes())
        rankings = {p: ranking_of(shown.view, other, at, p, most=sys.maxsize).rows for p in passes}
        differ = (p for p, rows in rankings.items() if rows and _differs(rows[0]))
        pass_ = next(differ, "forward")
        nodes = [row.slot.node for row in rankings[pass_]]
        node = {} if at.node in nodes or not nodes else {"node": nodes[0]}
        self.act(
            type=type_, step=table.step, follow=False, other="", other_type=probe,
            other_step=None, section="compare", colour=DIFFERENCE, pass_=pass_, **node,
        )  # fmt: skip


def _differs(row: Ranked) -> bool:
    return row.broken or bool(row.pair.relative)


def _nodes(found: Album, circuits: Sequence[Drawing]) -> list[str]:
    pictures = [each.picture for each in found.computed if each.picture is not None]
    compared = [
        node
        for picture in pictures
        for node in picture.facts.get("nodes", picture.labels.get("node", []))
    ]
    affected = [node for table in found.effects for node in table.nodes if node]
    inside = [spot.node for drawing in circuits for spot in drawing.spots.values()]
    return [*dict.fromkeys([*compared, *affected, *inside])]


def _parts(
    found: Album, node: str, effects: Sequence[str], *, over: bool, brushed: tuple[int, ...] = ()
) -> tuple[Part, ...]:
    """Return the page in parts, from the top."""
    shown = [Part("shown", _exhibits(found.exhibits))] if found.exhibits else []
    computed = [record_card(each) for each in found.computed if each.picture is not None]
    empty = [record_card(each) for each in found.computed if each.picture is None]
    if not found.probe:
        return (*shown, Part("no probe", _NO_PROBE), *_boxed([*computed, *empty]))
    image = next((tile.image for tile in found.tiles if tile.sample == found.sample), "")
    pictures = [_card(card, image if over else "") for card in found.cards]
    pictures += [*map(lens_card, found.lenses), *map(landscape_card, found.landscapes)]
    if not pictures:
        empty.insert(0, _NO_PICTURE.format(probe=_e(found.probe)))
    empty += [_NOT_MADE.format(name=_e(name), why=_e(why)) for name, why in found.unmade]
    if not effects and not found.unmade:
        empty.append(_NO_INTERVENTION.format(probe=_e(found.probe)))
    assert found.cloud is not None  # a probe has one
    sprites = [tile.sprite for tile in found.tiles]
    cloud = cloud_card(found.cloud, node, found.sample, sprites, brushed)
    tables = [_table(table, len(found.tiles)) for table in found.tables]
    cards = [*pictures, *effects, cloud, *computed, *tables, *empty]
    title = f'<h2 data-step="{found.step}">Probe {_e(found.probe)} at step {count(found.step)}</h2>'
    top = [Part("title", title), Part("gallery", gallery(found, brushed))]
    if brushed:
        top.append(Part("brushed", _brushed(brushed)))
    if image and any(card.over for card in found.cards):
        top.append(Part("over", _veil_button(over)))
    return (*top, *_boxed(cards), *shown)


def _boxed(cards: Sequence[str]) -> list[Part]:
    return [Part(f"card {i}", html, boxed=True) for i, html in enumerate(cards)]


def _brushed(samples: tuple[int, ...]) -> str:
    """Return which samples are brushed, and the button that ends it."""
    return (
        f'<p class="choice">Brushed samples: {", ".join(map(str, samples))} '
        f'<button type="button" data-send="{LASSO}:">none</button></p>'
    )


def _veil_button(over: bool) -> str:
    pressed = str(over).lower()
    return (
        f'<p class="choice"><button type="button" data-send="{_OVER}" aria-pressed="{pressed}">'
        "maps over the image</button></p>"
    )


def _exhibits(found: Sequence[Exhibit]) -> str:
    """Return the section with what the program has shown."""
    cards = []
    for each in found:
        title = f"{_e(each.name)} <small>step {count(each.step)}</small>"
        alt = _e(each.name)
        inner = (
            f'<img src="{each.image}" alt="{alt}">' if each.image else f"<pre>{_e(each.text)}</pre>"
        )
        cards.append(f'<div class="card"><h3>{title}</h3>{inner}</div>')
    return f'<h2>Shown by the program</h2><div class="cards">{"".join(cards)}</div>'


def _card(card: Card, veiled: str) -> str:
    """Return a card with a picture, as a veil over the image `veiled` if there is one."""
    if card.missing:
        return missing_card(card.title, card.missing)
    kind = "ramp" if card.low < 0 else "ramp up"
    ramp = f'{number(card.low, digits=3)}<span class="{kind}"></span>{number(card.high, digits=3)}'
    note = f"<p>{_e(card.note)}</p>" if card.note else ""
    if card.rows:
        return (
            f'<div class="card"><h3>{_e(card.title)}</h3><div class="wide">{_explained(card)}</div>'
            f"<p>{ramp}</p>{note}</div>"
        )
    if card.words:
        text = "".join(
            _word(word, share, share * card.high)
            for word, share in zip(card.words, card.shares, strict=True)
        )
        return (
            f'<div class="card"><h3>{_e(card.title)}</h3><div class="words">{text}</div>'
            f"<p>{ramp}</p>{note}</div>"
        )
    drawn = f'<img src="{card.image}" alt="{_e(card.title)}">'
    if veiled and card.over:
        drawn = (
            f'<div class="over"><img src="{veiled}" alt="">'
            f'<img class="veil" src="{card.over}" alt="{_e(card.title)}"></div>'
        )
    return f'<div class="card"><h3>{_e(card.title)}</h3>{drawn}<p>{ramp}</p>{note}</div>'


def _explained(card: Card) -> str:
    """Return a table with a row for each explained position and a column for each token."""
    head = "".join(f"<th>{_e(word)}</th>" for word in card.words)
    lines = []
    for name, shares in card.rows:
        cells = "".join(_shade(share, share * card.high) for share in shares)
        lines.append(f"<tr><th>{_e(name)}</th>{cells}</tr>")
    return (
        f'<table class="lens explained"><thead><tr><th></th>{head}</tr></thead><tbody>'
        f"{''.join(lines)}</tbody></table>"
    )


def _shade(share: float, value: float) -> str:
    if share != share:  # NaN
        return f'<td title="not defined">{MISSING}</td>'
    return f'<td style="{shaded(share)}">{value:.2g}</td>'


def _word(word: str, share: float, value: float) -> str:
    """Return a token, shaded by its number."""
    if share != share:  # NaN
        return f'<span title="not defined">{_e(word)}</span> '
    return f'<span style="{shaded(share)}" title="{number(value, digits=3)}">{_e(word)}</span> '


def _table(table: TableCard, tiles: int) -> str:
    """Return a card with a table; rows that belong to a sample in the gallery select it."""
    head = "".join(f"<th>{_e(column)}</th>" for column in table.columns)
    rows = []
    for i, row in enumerate(table.rows):
        leads = bool(table.samples) and table.samples[i] < tiles
        send = f' tabindex="0" data-send="sample:{table.samples[i]}"' if leads else ""
        first, *others = map(_e, row)
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        rows.append(f"<tr><th{send}>{first}</th>{cells}</tr>")
    body = f"<tbody>{''.join(rows)}</tbody>"
    return (
        f'<div class="card"><h3>{_e(table.title)}</h3><table><thead><tr>{head}</tr></thead>'
        f"{body}</table><p>{_e(table.note)}</p></div>"
    )
