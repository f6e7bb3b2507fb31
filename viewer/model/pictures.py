"""The samples in a probe, and the pictures of the selected one, as numbers and images to draw."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError, UnknownNameError
from comgra_decl.query.attributions import by_token
from comgra_decl.records import LENS_TOKENS, PICTURE_PREFIX, PROBE_PREFIX
from comgra_decl.viewer.model.clouds import Cloud, Clouds
from comgra_decl.viewer.model.effects import EffectTable, effect_tables
from comgra_decl.viewer.model.landscapes import LANDSCAPES, Landscape, landscape
from comgra_decl.viewer.model.record_pictures import Computed, of_step
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, nearest
from comgra_decl.viewer.model.tokens import joined, labels

_MOST_SAMPLES = 64
_MOST_WORDS = 24
"""Most tokens of a sample in the gallery."""

_OF_STEP = ("likeness", "confusion", "reliability", "linear_probe")
"""Pictures of all nodes or of the model's predictions at a step."""

Image = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tile:
    """A sample from the probe: what went in, and what came out at this step.

    Attributes:
        sample: its number in the record.
        label: its category; "" if it has none.
        prediction: the class with the highest output; None if there are no classes.
        loss: the cross-entropy of the outputs and the label; None if unknown.
        image: the input as the source of an `img`; "" if it is text or cannot be drawn.
        text: the beginning of the input if it consists of tokens; otherwise "".
    """

    sample: int
    label: str
    prediction: int | None
    loss: float | None
    image: str
    text: str = ""


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
    """

    title: str
    image: str = ""
    low: float = 0.0
    high: float = 0.0
    note: str = ""
    missing: str = ""
    words: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Lens:
    """What a language model would predict after each layer, for the selected sample.

    Attributes:
        title: the name of the picture and its method.
        words: the tokens of the input.
        layers: for each layer its node, and for each position the predicted token and the
            probability of the explained token.
        note: additional facts.
    """

    title: str
    words: tuple[str, ...]
    layers: tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
    note: str = ""


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
        exhibits: what the program has shown, at the last step up to the selected one.
    """

    probe: str
    step: int
    sample: int
    tiles: tuple[Tile, ...] = ()
    cards: tuple[Card, ...] = ()
    landscapes: tuple[Landscape, ...] = ()
    cloud: Cloud | Computed | None = None
    computed: tuple[Computed, ...] = ()
    effects: tuple[EffectTable, ...] = ()
    exhibits: tuple[Exhibit, ...] = ()
    lenses: tuple[Lens, ...] = ()


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


def album(view: RunView, at: Selection, clouds: Clouds | None = None) -> Album:
    """Return the pictures at the probe's record nearest to the selected step.

    Args:
        view: the run.
        at: what is selected.
        clouds: the clouds of the session; None for clouds that nothing keeps.
    """
    exhibits = _exhibits(view, at.step)
    types = [t for t in view.run.types if t.startswith(PROBE_PREFIX)]
    type_ = at.type if at.type in types else types[0] if types else ""
    steps = view.steps(type_) if type_ else None
    step = None if steps is None else nearest(steps, at.step if at.step is not None else -1)
    if step is None:
        return Album("", -1, 0, exhibits=exhibits)
    tiles = view.ever(("tiles", type_, step), lambda: _tiles(view, type_, step))
    sample = min(at.sample or 0, max(0, len(tiles) - 1))
    return Album(
        type_.removeprefix(PROBE_PREFIX),
        step,
        sample,
        tiles,
        _cards(view, type_, step, sample),
        _landscapes(view, type_, step),
        (clouds or Clouds()).of(view, type_, step, at.node),
        tuple(of_step(view, name, type_, step) for name in _OF_STEP),
        effect_tables(view, type_.removeprefix(PROBE_PREFIX), step),
        exhibits,
        _lenses(view, type_, step, sample),
    )


# -- samples -----------------------------------------------------------------------------------


def _tiles(view: RunView, type_: str, step: int) -> tuple[Tile, ...]:
    run = view.run
    labels = run.samples(step, type=type_)["label"].tolist()[:_MOST_SAMPLES]
    inputs = _input(view, type_, step)
    scores = _scores(view, type_, step)
    tiles = []
    for number, label in enumerate(labels):
        known = scores is not None and number < len(scores)
        row = scores[number] if known and scores is not None else None
        given = inputs[number] if inputs is not None and number < len(inputs) else None
        is_text = given is not None and given.ndim == 1 and given.dtype.kind in "iu"
        image = "" if given is None or is_text else _photo(view, type_, given)
        tiles.append(
            Tile(
                number,
                "" if label is None else str(label),
                None if row is None else int(row.argmax()),
                None if row is None else _cross_entropy(row, label),
                image,
                _beginning(view, given) if given is not None and is_text else "",
            )
        )
    return tuple(tiles)


def _beginning(view: RunView, ids: NDArray[Any]) -> str:
    """Return the first tokens of a sample as text."""
    more = "\u2026" if len(ids) > _MOST_WORDS else ""
    return joined(labels(view, ids[:_MOST_WORDS]).tolist()) + more


def _input(view: RunView, type_: str, step: int) -> NDArray[Any] | None:
    for slot in view.slots.values():
        if slot.kind == "input" and slot.pass_ == "forward":
            try:
                return view.value(slot, step, type_)
            except UnknownNameError:
                continue
    return None


def _scores(view: RunView, type_: str, step: int) -> NDArray[Any] | None:
    """Return the outputs of the model, [samples, classes]; None if there are none."""
    described = view.run.document("modules") or []
    for node in [entry["node"] for entry in described if entry["path"] == ""]:
        try:
            found = view.run.slot(node).value(step, type=type_)
        except ComgraError:
            continue
        if found.ndim == 2 and found.shape[1] > 1:
            return np.asarray(found, np.float64)
    return None


def _cross_entropy(scores: NDArray[Any], label: Any) -> float | None:
    try:
        place = int(label)
    except (TypeError, ValueError):
        return None
    if not 0 <= place < len(scores):
        return None
    shifted = scores - scores.max()
    return float(np.log(np.exp(shifted).sum()) - shifted[place])


def _photo(view: RunView, type_: str, value: NDArray[Any]) -> str:
    """Return an input as an image: a photo if the spec says how, or else its values in grey."""
    value = np.asarray(value, np.float64)
    probe = view.run.spec.probes.get(type_.removeprefix(PROBE_PREFIX))
    declared = None if probe is None else probe.show.image
    if value.ndim == 3 and value.shape[0] in (1, 3):
        if declared is not None:
            channels = (-1, 1, 1)
            value = value * np.reshape(declared.std, channels) + np.reshape(declared.mean, channels)
        else:
            value = _stretched(value)
        colours = np.repeat(value, 3, 0) if len(value) == 1 else value
        return png(_bytes(colours.transpose(1, 2, 0)))
    flat = _flat(value)
    return png(_bytes(np.repeat(_stretched(flat)[..., None], 3, -1)))


def _stretched(value: NDArray[np.float64]) -> NDArray[np.float64]:
    finite = value[np.isfinite(value)]
    if not finite.size or finite.max() == finite.min():
        return np.full(value.shape, 0.5)
    stretched: NDArray[np.float64] = (value - finite.min()) / (finite.max() - finite.min())
    return stretched


def _bytes(colours: NDArray[np.float64]) -> Image:
    return (np.clip(np.nan_to_num(colours), 0, 1) * 255 + 0.5).astype(np.uint8)


# -- pictures ----------------------------------------------------------------------------------


def _cards(view: RunView, type_: str, step: int, sample: int) -> tuple[Card, ...]:
    cards = []
    extra = view.run.picture_facts(step, type=type_)
    slots = [s for s in view.slots.values() if s.pass_.startswith(PICTURE_PREFIX)]
    for name, fact in extra.items():
        if "refused" in fact:
            cards.append(Card(f"{name} ({fact['method']})", missing=str(fact["refused"])))
    for slot in slots:
        name = slot.pass_.removeprefix(PICTURE_PREFIX)
        if name not in extra or slot.batch_dim is None:
            continue
        fact = extra[name]
        if fact["method"] == "logit_lens":
            continue  # see `_lenses`
        try:
            values = view.value(slot, step, type_)[sample]
        except (ComgraError, IndexError):
            continue
        words = _words(view, type_, step, sample, len(values) if values.ndim else 0)
        of_tokens = bool(words) and "position" in fact and values.ndim < 3
        bound = _bound(view, slot, type_, of_tokens=of_tokens)
        method = str(fact["method"]).rpartition(".")[2]
        title = f"{name}: {method}, {slot.node}"
        note = _note(view, fact, sample)
        if of_tokens:
            shares = tuple((_per_token(values) / (bound or 1.0)).tolist())
            cards.append(Card(title, "", -bound, bound, note, words=words, shares=shares))
            continue
        drawn = png(_signed(_flat(values) / bound if bound else 0 * _flat(values)))
        cards.append(Card(title, drawn, -bound, bound, note))
    return tuple(cards)


def _lenses(view: RunView, type_: str, step: int, sample: int) -> tuple[Lens, ...]:
    found = []
    for name, fact in view.run.picture_facts(step, type=type_).items():
        if fact["method"] != "logit_lens" or "refused" in fact:
            continue
        slots = {
            (slot.node, slot.role): slot
            for slot in view.slots.values()
            if slot.pass_ == PICTURE_PREFIX + name
        }
        layers: list[tuple[str, tuple[tuple[str, float], ...]]] = []
        words: tuple[str, ...] = ()
        for (node, role), slot in slots.items():
            beside = slots.get((node, role + LENS_TOKENS))
            if beside is None:
                continue
            try:
                likely = np.exp(np.asarray(view.value(slot, step, type_)[sample], np.float64))
                tokens = view.value(beside, step, type_)[sample]
            except (ComgraError, IndexError):
                continue
            words = _words(view, type_, step, sample, len(tokens))
            predicted = labels(view, tokens).tolist()
            layers.append((node, tuple(zip(predicted, likely.tolist(), strict=True))))
        target = fact.get("target")
        whole = "the token that the whole model predicts"
        explained = whole if target == "top" else f"token {target}"
        if layers:
            note = (
                "cells: the token that each layer would predict; colour: the probability that the "
                f"layer gives to {explained}"
            )
            found.append(Lens(f"{name}: logit_lens", words, tuple(layers), note))
    return tuple(found)


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
    elif isinstance(target, list) and sample < len(target):
        parts.append(_explained(view, fact, target[sample], sample))
    elif "position" in fact:
        parts.append(f"attention of position {fact['position']}")
    gap = fact.get("gap")
    if isinstance(gap, list) and sample < len(gap):
        parts.append(f"completeness gap {gap[sample]:.2g}")
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


def _per_token(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return one number for each token, [..., positions]: the sum over its embedding."""
    wide = np.asarray(values, np.float64)
    return wide if wide.ndim == 1 else by_token(wide, "sum")


def _words(view: RunView, type_: str, step: int, sample: int, size: int) -> tuple[str, ...]:
    """Return the tokens of a sample, as text if they are declared; () if there are none."""
    for slot in view.slots.values():
        if slot.kind != "input" or slot.pass_ != "forward" or "int" not in slot.dtype:
            continue
        try:
            ids = view.value(slot, step, type_)
        except ComgraError:
            continue
        if ids.ndim == 2 and ids.shape[1] == size and sample < len(ids):
            return tuple(labels(view, ids[sample]).tolist())
    return ()


def _bound(view: RunView, slot: Any, type_: str, *, of_tokens: bool) -> float:
    """Return the largest magnitude of a picture over all samples and steps."""

    def largest(step: int) -> float:
        try:
            values = view.value(slot, step, type_)
        except ComgraError:
            return 0.0
        one = _per_token if of_tokens else _flat
        flat = np.abs(np.stack([one(value) for value in values]))
        return float(flat[np.isfinite(flat)].max(initial=0.0))

    steps = view.steps(type_).tolist()
    key = ("bound", slot.id, type_, of_tokens)
    bounds = [view.ever((*key, s), lambda s=s: largest(s)) for s in steps]  # type: ignore[misc]
    return max(bounds, default=0.0)


def _flat(value: NDArray[Any]) -> NDArray[np.float64]:
    """Return a value of one sample as rows and columns; channels are added up."""
    value = np.asarray(value, np.float64)
    while value.ndim > 2:
        value = value.sum(0)
    return value if value.ndim == 2 else value.reshape(1, -1)


def _signed(place: NDArray[np.float64]) -> Image:
    """Return colours from blue for -1 through white to orange for 1; grey where missing."""
    ends = {-1: np.array([0x24, 0x63, 0xAD]), 1: np.array([0xD1, 0x56, 0x1F])}
    white = np.full(3, 255.0)
    share = np.clip(np.abs(place), 0, 1)[..., None]
    end = np.where((place < 0)[..., None], ends[-1], ends[1])
    colours = white + share * (end - white)
    colours[np.isnan(place)] = 128
    image: Image = (np.nan_to_num(colours) + 0.5).astype(np.uint8)
    return image


def png(image: Image) -> str:
    """Return an image [height, width, 3] as a data URL."""
    height, width, _ = image.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with its filter, 0
    lines[:, 1:] = image.reshape(height, -1)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 6)),
        (b"IEND", b""),
    )
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return "data:image/png;base64," + b64encode(content).decode()
