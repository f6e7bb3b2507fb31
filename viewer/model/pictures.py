"""The samples in a probe, and the pictures of the selected one, as numbers and images to draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.query.attributions import by_token
from comgra_decl.records import MAXIMISED, PICTURE_PREFIX, PROBE_PREFIX
from comgra_decl.viewer.model.clouds import Cloud, Clouds, NoCloud
from comgra_decl.viewer.model.effects import EffectTable, effect_tables, probe_type_of, unmade
from comgra_decl.viewer.model.gallery import Tile, gallery
from comgra_decl.viewer.model.images import flat, largest_magnitude, png, signed, veil
from comgra_decl.viewer.model.landscapes import LANDSCAPES, Landscape, landscape
from comgra_decl.viewer.model.lenses import Lens, lenses
from comgra_decl.viewer.model.record_pictures import (
    Computed,
    of_heads,
    of_node,
    of_step,
    of_training,
)
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection, nearest
from comgra_decl.viewer.model.table_cards import TableCard, table_cards
from comgra_decl.viewer.model.tokens import labels, words_of

_MOST_EXPLAINED = 128
"""Most explained positions of a table; more are an image."""

_OF_STEP = ("likeness", "confusion", "reliability", "linear_probe")
"""Pictures of all nodes or of the model's predictions at a step."""


@dataclass(frozen=True, slots=True)
class Card:
    """One picture of the selected sample, or the reason why there is none.

    Attributes:
        title: the name of the picture and what it shows.
        image: the source of an `img`; "" if there is none.
        low: the value of the first colour, the same at all steps.
        high: the value of the last colour.
        note: additional facts. missing: why there is no picture.
        words: the tokens of the sample, if the picture has numbers for tokens; "" without values.
        shares: the number of each token, as a share of the largest magnitude at any step.
        rows: if several positions are explained, the token of each, and its shares.
        over: the picture as a veil over the sample's image; "" if it has none.
        name: the name of the picture.
        node: the node that it shows.
    """

    title: str
    image: str = ""
    low: float = 0.0
    high: float = 0.0
    note: str = ""
    missing: str = ""
    words: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    rows: tuple[tuple[str, tuple[float, ...]], ...] = ()
    over: str = ""
    name: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """An image or text that the program has shown.

    Attributes:
        name: its name.
        step: the step at which it was shown.
        image: a data URL; "" for a text.
        text: the text; "" for an image.
    """

    name: str
    step: int
    image: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Album:
    """Everything that the Pictures section shows.

    Attributes:
        probe: the name of the probe; "" if the run has no record of one.
        step: the step of the probe's record, the nearest one to the selected step.
        sample: the selected sample.
        tiles: the samples.
        cards: the pictures of the selected sample.
        landscapes: the pictures of the whole model.
        lenses: the logit lenses of the selected sample.
        cloud: the selected node's cloud, or why there is none.
        computed: the pictures that the records suffice for.
        effects: the effects of the interventions on the probe.
        unmade: the declared interventions on the probe that have no record, and why.
        tables: what is computed from the records of the step, for the samples and the node.
        exhibits: what the program has shown, at the last step up to the selected one.
    """

    probe: str
    step: int
    sample: int
    tiles: tuple[Tile, ...] = ()
    cards: tuple[Card, ...] = ()
    landscapes: tuple[Landscape, ...] = ()
    cloud: Cloud | NoCloud | None = None
    computed: tuple[Computed, ...] = ()
    effects: tuple[EffectTable, ...] = ()
    exhibits: tuple[Exhibit, ...] = ()
    lenses: tuple[Lens, ...] = ()
    tables: tuple[TableCard, ...] = ()
    unmade: tuple[tuple[str, str], ...] = ()


def _exhibits(view: RunView, step: int | None) -> tuple[Exhibit, ...]:
    """Return what the program showed last, up to a step; later things if there are none."""
    table = view.now("shown", lambda: view.run.shown)
    found = []
    for name, rows in table.groupby("name", sort=False):
        steps = rows["step"].to_numpy()
        earlier = steps if step is None else steps[steps <= step]
        at = int(earlier.max() if len(earlier) else steps.min())
        try:
            value = view.now(("shown", name, at), lambda n=name, s=at: view.run.shown_value(n, s))  # type: ignore[misc]
        except ComgraError as error:
            value = str(error)
        if isinstance(value, str):
            found.append(Exhibit(str(name), at, text=value))
        else:
            colours = value[..., :3] if value.shape[-1] >= 3 else np.repeat(value[..., :1], 3, -1)
            found.append(Exhibit(str(name), at, image=png(np.ascontiguousarray(colours))))
    return tuple(found)


def album(
    view: RunView,
    at: Selection,
    clouds: Clouds | None = None,
    *,
    positions: Mapping[str, int] | None = None,
) -> Album:
    """Return the pictures at the probe's record nearest to the selected step.

    Args:
        view: the run.
        at: what is selected.
        clouds: the clouds of the session; None for clouds that nothing keeps.
        positions: the position whose ranks are shown, by the name of a logit lens.
    """
    exhibits = _exhibits(view, at.step)
    type_, step = _record_of(view, at)
    if step is None:
        computed = (*of_heads(view, at.step), *of_training(view, at.step, at.node))
        return Album("", -1, 0, computed=computed, exhibits=exhibits)
    tiles = _tiles(view, type_, step)
    sample = min(at.sample or 0, max(0, len(tiles) - 1))
    return Album(
        type_.removeprefix(PROBE_PREFIX),
        step,
        sample,
        tiles,
        cards_of(view, type_, step, sample),
        _landscapes(view, type_, step),
        (clouds or Clouds()).of(view, type_, step, at.node),
        (
            *of_heads(view, at.step),
            *of_node(view, type_, step, at.node, sample),
            *(of_step(view, name, type_, step) for name in _OF_STEP),
            *of_training(view, at.step, at.node),
        ),
        effect_tables(view, type_.removeprefix(PROBE_PREFIX), step),
        exhibits,
        lenses(view, type_, step, sample, positions or {}),
        table_cards(view, type_, step, at.node),
        unmade(view, type_.removeprefix(PROBE_PREFIX)),
    )


def parts_of(view: RunView, at: Selection) -> Iterator[Callable[[], object]]:
    """Yield reads that keep the parts of an album which take longest, for when it is shown."""
    yield partial(of_training, view, at.step, at.node)
    type_, step = _record_of(view, at)
    if step is None:
        return
    yield partial(_tiles, view, type_, step)
    for name in _OF_STEP:
        yield partial(of_step, view, name, type_, step)
    sample = max(0, at.sample or 0)
    yield partial(of_node, view, type_, step, at.node, sample)
    yield partial(table_cards, view, type_, step, at.node)
    yield partial(cards_of, view, type_, step, sample)


def _record_of(view: RunView, at: Selection) -> tuple[str, int | None]:
    """Return the probe to show and the step of its record that is nearest to the selected one."""
    types = [t for t in view.run.types if t.startswith(PROBE_PREFIX)]
    wanted = probe_type_of(view, at.type)
    type_ = wanted if wanted in types else types[0] if types else ""
    if not type_:
        return "", None
    return type_, nearest(view.steps(type_), at.step if at.step is not None else -1)


def _tiles(view: RunView, type_: str, step: int) -> tuple[Tile, ...]:
    return view.ever(("tiles", type_, step), lambda: gallery(view, type_, step))


# -- pictures ----------------------------------------------------------------------------------


_MAGNITUDES = ("saliency", "attention_rollout")
"""Methods whose pictures have no negative numbers."""


def cards_of(view: RunView, type_: str, step: int, sample: int) -> tuple[Card, ...]:
    """Return the declared pictures of a sample in a probe's record, or why there is none."""
    cards = []
    extra = view.run.picture_facts(step, type=type_)
    slots = [s for s in view.slots.values() if s.pass_.startswith(PICTURE_PREFIX)]
    for name, fact in extra.items():
        if "refused" in fact:
            cards.append(Card(f"{name} ({fact['method']})", missing=str(fact["refused"])))
    for slot in slots:
        name = slot.pass_.removeprefix(PICTURE_PREFIX)
        if slot.role == MAXIMISED and name in extra:
            cards.append(_maximised(view, slot, extra[name], type_, step))
        if name not in extra or slot.batch_dim is None:
            continue
        fact = extra[name]
        if fact["method"] == "logit_lens":
            continue  # see `lenses`
        try:
            values = view.value(slot, step, type_)[sample]
        except (ComgraError, IndexError):
            continue
        positions = fact.get("positions", ())
        axis = 1 if positions else 0
        words = words_of(view, type_, step, sample, values.shape[axis] if values.ndim > axis else 0)
        of_tokens = bool(words) and bool("position" in fact or positions)
        of_tokens = of_tokens and values.ndim < 3 + axis
        bound = _bound(view, slot, type_, of_tokens=of_tokens, of_rows=bool(positions))
        method = str(fact["method"]).rpartition(".")[2]
        low = 0.0 if method in _MAGNITUDES else -bound
        title = f"{name}: {method}, {slot.node}"
        note = _note(view, fact, sample)
        card = partial(Card, title, low=low, high=bound, note=note, name=name, node=slot.node)
        if of_tokens and positions and len(positions) <= _MOST_EXPLAINED:
            table = _per_token(values, of_rows=True) / (bound or 1.0)
            named = _rows_of(view, fact, words, sample)
            rows = tuple(zip(named, map(tuple, table.tolist()), strict=True))
            cards.append(card(words=words, rows=rows))
            continue
        if of_tokens and not positions:
            shares = tuple((_per_token(values) / (bound or 1.0)).tolist())
            cards.append(card(words=words, shares=shares))
            continue
        place = _per_token(values, of_rows=True) if of_tokens else flat(values)
        place = place / (bound or 1.0)
        over = png(veil(place)) if values.ndim > 1 and not of_tokens else ""
        cards.append(card(png(signed(place)), over=over))
    return tuple(cards)


def _maximised(view: RunView, slot: Slot, fact: dict[str, Any], type_: str, step: int) -> Card:
    """Return the inputs that maximise units of a layer, side by side; channels are added up."""
    title = f"{slot.pass_.removeprefix(PICTURE_PREFIX)}: maximise, {slot.node}"
    try:
        maps = np.stack([flat(value) for value in view.value(slot, step, type_)[0]])
    except ComgraError as error:
        return Card(title, missing=str(error))
    bound = largest_magnitude(maps)
    across = int(np.ceil(np.sqrt(len(maps))))
    down = -(-len(maps) // across)
    sheet = np.full((down * across, maps.shape[1] + 1, maps.shape[2] + 1), np.nan)
    sheet[: len(maps), :-1, :-1] = maps / (bound or 1.0)
    rows = sheet.reshape(down, across, *sheet.shape[1:]).transpose(0, 2, 1, 3)
    drawn = png(signed(rows.reshape(down * sheet.shape[1], -1)[:-1, :-1]))
    units = fact["units"] or range(len(maps))
    note = f"inputs that maximise the units {', '.join(map(str, units))}"
    return Card(title, drawn, -bound, bound, note)


def _landscapes(view: RunView, type_: str, step: int) -> tuple[Landscape, ...]:
    declared = view.run.picture_facts(step, type=type_)
    names = [name for name, fact in declared.items() if fact.get("method") in LANDSCAPES]
    found = (landscape(view, name, type_, step) for name in names)
    return tuple(each for each in found if each is not None)


def _note(view: RunView, fact: dict[str, Any], sample: int) -> str:
    parts = []
    target = fact.get("target")
    if target == "loss":
        parts.append("explains the loss")
    elif "positions" in fact:
        count = len(fact["positions"])
        parts.append(f"rows: {count} explained positions; columns: the tokens of the input")
    elif isinstance(target, list) and sample < len(target):
        parts.append(_explained(view, fact, target[sample], sample))
    elif "position" in fact:
        parts.append(f"attention of position {fact['position']}")
    gap = fact.get("gap")
    if isinstance(gap, list) and sample < len(gap):
        largest = np.ravel(gap[sample])[np.abs(np.ravel(gap[sample])).argmax()]
        parts.append(f"{'largest ' if np.ndim(gap[sample]) else ''}completeness gap {largest:.2g}")
    return ", ".join(parts)


def _explained(view: RunView, fact: dict[str, Any], target: Any, sample: int) -> str:
    """Return what a picture explains: a class, or a token."""
    if "score" not in fact:
        return f"explains class {target}"
    other = fact.get("rather_than")
    ids = [target, *([other[sample]] if other else [])]
    target, *others = labels(view, np.array(ids)).tolist()
    rather = f" rather than {others[0]}" if others else ""
    at = f" at position {fact['position']}" if "position" in fact else ""
    return f"explains token {target}{rather}{at}"


def _rows_of(view: RunView, fact: dict[str, Any], words: tuple[str, ...], sample: int) -> list[str]:
    """Return what each explained position is: its token and, if known, the one that it predicts."""
    names = [f"{position} {words[position]}" for position in fact["positions"]]
    target = fact.get("target")
    if isinstance(target, list) and sample < len(target):
        predicted = labels(view, np.array(target[sample])).tolist()
        names = [f"{name} \u2192 {token}" for name, token in zip(names, predicted, strict=True)]
    return names


def _per_token(values: NDArray[Any], *, of_rows: bool = False) -> NDArray[np.float64]:
    """Return one number for each token, [..., positions]: the sum over its embedding.

    Args:
        values: [positions] or [positions, width]; with `of_rows`, an axis of explained positions
            comes first.
        of_rows: whether several positions are explained.
    """
    wide = np.asarray(values, np.float64)
    return wide if wide.ndim == 1 + of_rows else by_token(wide, "sum")


def _bound(
    view: RunView, slot: Any, type_: str, *, of_tokens: bool, of_rows: bool = False
) -> float:
    """Return the largest magnitude of a picture over all samples and steps."""

    def largest(step: int) -> float:
        try:
            values = view.value(slot, step, type_)
        except ComgraError:
            return 0.0
        one = partial(_per_token, of_rows=of_rows) if of_tokens else flat
        return largest_magnitude(np.stack([one(value) for value in values]))

    key = ("bound", slot.id, type_, of_tokens)

    def largest_of_all() -> float:
        steps = view.steps(type_).tolist()
        bounds = [view.ever((*key, s), lambda s=s: largest(s)) for s in steps]  # type: ignore[misc]
        return max(bounds, default=0.0)

    return view.now(key, largest_of_all)
