"""The samples of a probe: what went into the model, and what came out at a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError, UnknownNameError
from comgra_decl.records import LOSS_CALLS, PROBE_PREFIX
from comgra_decl.spec.images import ImageSpec
from comgra_decl.viewer.model.drawing import original
from comgra_decl.viewer.model.images import Image, as_bytes, flat, png, stretched
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.tokens import has_tokens, joined, labels

_MOST_SAMPLES = 64
_MOST_WORDS = 24
"""Most tokens of a sample in the gallery."""
_MOST_NUMBERS = 4
"""Most outputs of a sample that are written out."""
_SPRITE = 24
"""Most rows and columns of a sprite."""
_COLUMNS = 88
"""Places across a waveform; longer ones are drawn from the lowest to the highest value of each."""
_IGNORED = -100
"""The token that a loss ignores, as in `torch.nn.functional.cross_entropy`."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tile:
    """A sample from the probe: what went in, and what came out at this step.

    Attributes:
        sample: its number in the record.
        label: its category; "" if it has none.
        prediction: the class with the highest output, the token that would follow, or the numbers
            that the model returned; "" if unknown.
        loss: how far the outputs are from the label or the target; None if unknown.
        measure: what `loss` is: "loss" for the cross-entropy of the label.
        image: the input as the source of an `img`; "" if it is drawn otherwise.
        sprite: the same image with at most 24 rows and columns.
        text: the beginning of the input if it consists of tokens; otherwise "".
        waves: for each channel of a waveform the lowest and the highest value at each place, as
            shares from 0 to 1 of the range of the sample, [places, 2]; NaN where not finite.
    """

    sample: int
    label: str = ""
    prediction: str = ""
    loss: float | None = None
    measure: str = "loss"
    image: str = ""
    sprite: str = ""
    text: str = ""
    waves: tuple[Floats, ...] = field(default=(), compare=False)


def gallery(view: RunView, type_: str, step: int) -> tuple[Tile, ...]:
    """Return the samples of a probe at a step."""
    given = view.run.samples(step, type=type_)["label"].tolist()[:_MOST_SAMPLES]
    inputs = _input(view, type_, step)
    judged = _judged(view, type_, step, given)
    tiles = []
    for sample, label in enumerate(given):
        shown: dict[str, Any] = {}
        if inputs is not None and sample < len(inputs):
            shown = drawn_input(view, inputs[sample], declared_image(view, type_))
        prediction, loss, measure = judged[sample] if sample < len(judged) else ("", None, "loss")
        name = "" if label is None else str(label)
        tiles.append(Tile(sample, name, prediction, loss, measure, **shown))
    return tuple(tiles)


# -- what went in ------------------------------------------------------------------------------


def _input(view: RunView, type_: str, step: int) -> NDArray[Any] | None:
    """Return the input that shows the samples: the tokens, or else the first one."""
    slots = [s for s in view.slots.values() if s.kind == "input" and s.pass_ == "forward"]
    for slot in sorted(slots, key=lambda slot: not has_tokens(view, slot)):
        try:
            return view.value(slot, step, type_)
        except UnknownNameError:
            continue
    return None


def declared_image(view: RunView, type_: str) -> ImageSpec | None:
    """Return how a probe's images were normalised: as it says or, if it does not, `nodes`.

    For training, what any probe says counts as well.
    """
    probes = view.spec.probes
    named = probes.get(type_.removeprefix(PROBE_PREFIX))
    chosen = [named] if type_.startswith(PROBE_PREFIX) else [*probes.values()]
    found = [probe.show.image for probe in chosen if probe is not None]
    found += [entry.image for entry in reversed(view.spec.nodes.values())]
    return next((image for image in found if image is not None), None)


def drawn_input(view: RunView, value: NDArray[Any], declared: ImageSpec | None) -> dict[str, Any]:
    """Return the fields of a tile that show an input of one sample."""
    if value.ndim == 1 and value.dtype.kind in "iu":
        return {"text": _beginning(view, value)}
    channels = value[None] if value.ndim == 1 else value
    if channels.ndim == 2 and len(channels) <= 2 < channels.shape[1]:
        return {"waves": waves(np.asarray(channels, np.float64))}
    photo = _photo(value, declared)
    every = -(-max(photo.shape[:2]) // _SPRITE)
    small = np.ascontiguousarray(photo[every // 2 :: every, every // 2 :: every])
    return {"image": png(photo), "sprite": png(small)}


def _beginning(view: RunView, ids: NDArray[Any]) -> str:
    """Return the first tokens of a sample as text."""
    more = "\u2026" if len(ids) > _MOST_WORDS else ""
    return joined(labels(view, ids[:_MOST_WORDS]).tolist()) + more


def waves(channels: Floats) -> tuple[Floats, ...]:
    """Return the outline of each channel of [channels, length]; see `Tile.waves`."""
    known = channels[np.isfinite(channels)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    outlines = []
    for channel in channels:
        places = np.array_split(channel, min(_COLUMNS, len(channel)))
        ends = [(part.min(), part.max()) for part in places]
        share = (
            (np.array(ends) - low) / (high - low) if high > low else np.full((len(ends), 2), 0.5)
        )
        outlines.append(np.where(np.isfinite(ends), share, np.nan))
    return tuple(outlines)


def _photo(value: NDArray[Any], declared: ImageSpec | None) -> Image:
    """Return an input as an image: a photo if the spec says how, or else its values in grey."""
    value = np.asarray(value, np.float64)
    if value.ndim == 3 and value.shape[0] in (1, 3):
        if declared is not None and {len(declared.mean), len(declared.std)} <= {1, len(value)}:
            value = original(value, declared.normalised)
        else:
            value = stretched(value)
        colours = np.repeat(value, 3, 0) if len(value) == 1 else value
        return as_bytes(colours.transpose(1, 2, 0))
    return as_bytes(np.repeat(stretched(flat(value))[..., None], 3, -1))


# -- what came out -----------------------------------------------------------------------------

_Judged = list[tuple[str, float | None, str]]
"""For each sample what is predicted, how far it is off, and in which measure."""


def _judged(view: RunView, type_: str, step: int, given: list[Any]) -> _Judged:
    outputs = _outputs(view, type_, step)
    if outputs is None:
        return []
    wide = np.asarray(outputs, np.float64)
    if wide.ndim == 3:
        return _of_tokens(view, type_, step, wide)
    targets = _targets(view, type_, outputs)
    function = view.ever("loss function", lambda: _loss_function(view))
    of_classes = targets is None or function == "cross_entropy"
    if wide.ndim == 2 and wide.shape[1] > 1 and of_classes:
        return [
            (str(int(row.argmax())), _cross_entropy(row, label), "loss")
            for row, label in zip(wide, given, strict=False)
        ]
    return [] if wide.ndim > 2 else _of_numbers(wide.reshape(len(wide), -1), targets, function)


def _outputs(view: RunView, type_: str, step: int) -> NDArray[Any] | None:
    """Return the first output of the model that consists of real numbers, [samples, ...]."""
    described = view.described
    roots = {entry["node"] for entry in described if entry["path"] == ""}
    for slot in view.slots.values():
        own = slot.node in roots and slot.pass_ == "forward" and slot.role.startswith("output")
        if not own or slot.batch_dim is None or "float" not in slot.dtype:
            continue
        try:
            return view.value(slot, step, type_)
        except ComgraError:
            continue
    return None


def _cross_entropy(scores: Floats, label: Any) -> float | None:
    try:
        place = int(label)
    except (TypeError, ValueError):
        return None
    return _surprise(scores, place) if 0 <= place < len(scores) else None


def _surprise(scores: Floats, place: int) -> float:
    shifted = scores - scores.max()
    return float(np.log(np.exp(shifted).sum()) - shifted[place])


def _of_tokens(view: RunView, type_: str, step: int, scores: Floats) -> _Judged:
    """Return the next tokens of a language model, whose scores are [samples, positions, tokens].

    The loss is the mean cross-entropy of the tokens that follow each position in the input, as for
    interventions. There are none unless the input has tokens at the same positions.
    """
    ids = _tokens(view, type_, step, scores.shape[:2])
    if ids is None:
        return []
    words = labels(view, scores[:, -1].argmax(-1)).tolist()
    judged: _Judged = []
    for sample, row in enumerate(scores):
        following = ids[sample, 1:].tolist()
        known = [(i, t) for i, t in enumerate(following) if t != _IGNORED and t < row.shape[1]]
        each = [_surprise(row[i], t) for i, t in known]
        loss = float(np.mean(each)) if each else None
        judged.append((f"next {words[sample]}", loss, "next-token loss"))
    return judged


def _tokens(
    view: RunView, type_: str, step: int, shape: tuple[int, ...]
) -> NDArray[np.integer] | None:
    """Return the input `labels`, or the first one of integers, if it has this shape."""
    slots = [
        slot
        for slot in view.slots.values()
        if slot.kind == "input" and slot.pass_ == "forward" and "int" in slot.dtype
    ]
    for slot in sorted(slots, key=lambda slot: not slot.role.endswith(".labels")):
        try:
            ids = view.value(slot, step, type_)
        except ComgraError:
            continue
        if ids.shape == shape:
            return ids
    return None


def _of_numbers(outputs: Floats, targets: Floats | None, function: str) -> _Judged:
    """Return the outputs of a regression or of a single score, [samples, numbers]."""
    compare, measure = _MEASURES.get(function, _MEASURES["mse_loss"])
    judged: _Judged = []
    for sample, row in enumerate(outputs):
        with np.errstate(all="ignore"):
            shown = 1 / (1 + np.exp(-row)) if function == _BINARY else row
            loss = None if targets is None else float(compare(row, targets[sample]).mean())
        more = ", \u2026" if len(row) > _MOST_NUMBERS else ""
        text = ", ".join(number(x, digits=3) for x in shown[:_MOST_NUMBERS].tolist()) + more
        judged.append((text, loss, measure))
    return judged


_BINARY = "binary_cross_entropy_with_logits"
_MEASURES: dict[str, tuple[Any, str]] = {
    "mse_loss": (lambda x, y: (x - y) ** 2, "squared error"),
    "l1_loss": (lambda x, y: np.abs(x - y), "absolute error"),
    "binary_cross_entropy": (
        lambda x, y: -(y * np.log(x) + (1 - y) * np.log1p(-x)),
        "binary cross-entropy",
    ),
    _BINARY: (lambda x, y: np.logaddexp(0, x) - x * y, "binary cross-entropy"),
}
"""How a loss compares numbers, by its function; others are compared like `mse_loss`."""


def _loss_function(view: RunView) -> str:
    """Return the function of the run's first loss; "" if unknown."""
    for chunk in view.run.chunks(probes=False):
        calls = [call for facts in chunk.facts for call in facts.get(LOSS_CALLS) or ()]
        return str(calls[0].get("function", "")) if calls else ""
    return ""


def _targets(view: RunView, type_: str, outputs: NDArray[Any]) -> Floats | None:
    """Return what a loss compares the samples with, [samples, numbers]; None if unknown.

    A probe has no loss. Its samples are some of its first step's batch, whose target the record of
    training contains.
    """
    declared = view.spec.probes.get(type_.removeprefix(PROBE_PREFIX))
    if declared is None or declared.batch is not None:
        return None
    size = outputs[0].size if len(outputs) else 0
    first = int(view.steps(type_)[0])
    places = view.run.samples(first, type=type_)["place"].tolist()
    for slot in view.slots.values():
        usable = slot.kind == "target" and "float" in slot.dtype and slot.batch_dim == 0
        found = _of_batch(view, slot, first) if usable else {}
        if found and all(p in found and found[p].size == size for p in places):
            return np.stack([found[p].reshape(-1) for p in places])
    return None


def _of_batch(view: RunView, slot: Slot, step: int) -> dict[int, Floats]:
    """Return the values of samples in the batch of a training step, by their place in it."""
    try:
        preview = view.preview(slot, step, "")
    except ComgraError:
        return {}
    if preview.step != step or any(axis.how != "all" for axis in preview.meanings[1:]):
        return {}
    places: Sequence[int] = range(len(preview.values))
    if preview.whole:  # of the recorded samples only
        places = view.run.samples(step)["place"].tolist()
    wide = np.asarray(preview.values, np.float64)
    return dict(zip(places, wide, strict=False))
