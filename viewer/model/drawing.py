"""Draws values according to their axes: images, channels, kernels, maps, bars, lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.query import Preview
from comgra_decl.records import SAMPLE, Axis, Normalised
from comgra_decl.viewer.model.numbers import count, shape

PIXELS = 200_000
"""Maximum number of cells. Larger drawings are limited to the first tiles or evenly thinned."""

_SPELLED = 20_000  # tokens

_LABELLED = 36  # tiles; more leave no room for numbers
_SPACE = ("height", "width")
_ALIKE = (_SPACE, ("query", "key"))
_PLURAL = {"key": "keys", "query": "queries", "feature": "features"}

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tile:
    """One of several maps in a drawing: its number, its box, and whether it is entirely zero."""

    number: int
    left: int
    top: int
    width: int
    height: int
    zero: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """Values as a picture.

    `form` is "map" (`image` [rows, columns], row 0 on top, NaN between tiles), "colours" (`rgba`
    uint32 [rows, columns]), "bars" or "line" (`image` [1, n]). `gaps` [rows, columns] are the cells
    between tiles. `down` and `across` are the names of the axes of the image or of each tile,
    `each` those of the axes that number the tiles, `facts` describe what is drawn, and `notes`
    contain remarks. `per` is the number of tiles for each entry of the first of two such axes.
    `words` [rows, columns] are the labels of the cells of a map of tokens. `aspect` is the height
    of a cell relative to its width, which differs from 1 if averages were taken over unlike areas.
    """

    form: str
    image: Floats
    facts: str
    notes: str = ""
    down: str = ""
    across: str = ""
    tiles: tuple[Tile, ...] = ()
    gaps: NDArray[np.bool_] | None = None
    rgba: NDArray[np.uint32] | None = None
    each: tuple[str, ...] = ()
    per: int = 0
    words: NDArray[np.object_] | None = None
    aspect: float = 1.0

    @property
    def to_scale(self) -> bool:
        """Whether cells should have the proportions of `aspect`."""
        return (self.down, self.across) in _ALIKE

    @property
    def marks(self) -> NDArray[np.bool_]:
        """Cells [rows, columns] with NaN or infinity."""
        marks = ~np.isfinite(self.image)
        return marks if self.gaps is None else marks & ~self.gaps


@dataclass(frozen=True, slots=True)
class _Part:
    """The values to draw and their axes; the first axis is the samples if `samples` is set."""

    values: Floats
    axes: tuple[Axis, ...]
    samples: Axis | None = None
    colour: bool = False
    image: Normalised | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)


def draw(preview: Preview, *, sample: int | None = None, picture: bool = False) -> Drawing:
    """Return the drawing that fits the axes of a preview.

    Args:
        preview: values with the meaning of their axes.
        sample: the only sample to draw, which must exist. None draws all samples, or only the
            first if there is no room for more.
        picture: whether three channels are red, green and blue. They are also if the spec says how
            the images were normalised.
    """
    part = _part(preview, sample, picture)
    if part.samples is None:
        return _one(part)
    if not part.axes or part.values[0].size == 1:
        return _row("bars", part, SAMPLE, part.values.reshape(1, -1))
    if len(part.axes) == 1:
        cells = shape(part.values.shape)
        return _map(part, f"sample \u00d7 {part.names[0]}{_of(cells, part.axes)}", SAMPLE)
    if part.colour:
        return _colours(part.values, part)
    if len(part.axes) == 2:
        return _tiles(part.values, part, SAMPLE, len(part.values), part.axes)
    note = "sample 0"
    zero = (part.values == 0).all(axis=(0, 2, 3)) if part.values.ndim == 4 else None
    return _one(_Part(part.values[0], part.axes, notes=(note,)), zero)


def draw_tokens(
    preview: Preview, spell: Callable[[NDArray[Any]], NDArray[np.object_]], sample: int | None
) -> Drawing | None:
    """Return a map of tokens, one row per sample; None if the values are not lists of ids.

    Args:
        preview: ids [samples, positions], [samples] or [positions].
        spell: returns the label for each id.
        sample: the only sample to draw, which must exist; None for all.
    """
    axes = preview.meanings
    if preview.values.ndim > 2 or any(axis.how == "mean" for axis in axes):
        return None
    batched = bool(axes) and axes[0].name == SAMPLE
    ids = preview.values.reshape(len(preview.values) if batched else 1, -1)
    ids = ids if sample is None else ids[[sample]]
    stride = -(-ids.size // _SPELLED)
    kept = ids[:, : max(1, ids.shape[1] // stride)]
    across = axes[-1].name if preview.values.ndim == (2 if batched else 1) else ""
    rows, columns = kept.shape
    of = f" of {count(axes[-1].size)}" if across and columns < axes[-1].size else ""
    facts = f"{count(columns)}{of} tokens" if columns > 1 else "1 token"
    facts = f"{count(rows)} samples \u00b7 {facts}" if rows > 1 else facts
    return Drawing(
        "map", kept.astype(np.float64), facts, "", SAMPLE if batched else "", across,
        words=spell(kept),
    )  # fmt: skip


def numbers(values: NDArray[Any]) -> Floats:
    """Return values as float64; complex ones as magnitudes."""
    return np.abs(values) if np.iscomplexobj(values) else values.astype(np.float64)


def limit_of(values: Floats) -> float:
    """Return the magnitude that only half a percent of the values exceed."""
    finite = np.abs(values[np.isfinite(values)])
    if not len(finite):
        return 1.0
    limit = float(np.quantile(finite, 0.995))
    return limit or float(finite.max()) or 1.0


def _part(preview: Preview, sample: int | None, picture: bool) -> _Part:
    """Select the samples, drop axes of length 1, and move the channels to the front."""
    values, axes = numbers(preview.values), preview.meanings
    samples: Axis | None = None
    notes: tuple[str, ...] = ()
    if axes and axes[0].name == SAMPLE:
        samples, axes = axes[0], axes[1:]
        if sample is not None or (len(values) == 1 and len(axes) > 1):
            notes = () if sample is not None else ("sample 0",)
            values, samples = values[sample or 0], None
    first = 0 if samples is None else 1
    if len(axes) > 1 and all(size == 1 for size in values.shape[first + 1 :]):
        axes = axes[:1]
        values = values.reshape(values.shape[: first + 1])
    names = [axis.name for axis in axes]
    if names == [*_SPACE, "channel"]:
        values = np.moveaxis(values, -1, first)
        axes = (axes[2], *axes[:2])
    image, colour = preview.image, False
    if [axis.name for axis in axes] == ["channel", *_SPACE]:
        channels = axes[0].size if values.shape[first] == axes[0].size else 0
        if image is not None and channels not in (1, 3):
            image = None
        if image is not None and {len(image.mean), len(image.std)} - {1, channels}:
            image = None  # for another number of channels
        colour = image is not None or (picture and channels == 3)
    return _Part(values, tuple(axes), samples, colour, image if colour else None, notes)


def _one(part: _Part, zero: NDArray[np.bool_] | None = None) -> Drawing:
    """Draw a tensor without samples."""
    values, axes = part.values, part.axes
    if values.ndim < 2:
        form = "line" if values.size > 1 else "bars"
        return _row(form, part, part.names[0] if axes else "", values.reshape(1, -1))
    if values.ndim == 2:
        names = " \u00d7 ".join(part.names)
        return _map(part, f"{names}{_of(shape(values.shape), axes)}", part.names[0])
    if part.colour:
        return _colours(values[None], part)
    across = values.shape[1] if values.ndim == 4 and values.shape[1] > 1 else None
    maps = values.reshape(-1, *values.shape[-2:])
    return _tiles(maps, part, part.names[0], axes[0].size, axes[-2:], across=across, zero=zero)


def _row(form: str, part: _Part, name: str, values: Floats) -> Drawing:
    first = part.samples if part.samples is not None else (part.axes or (None,))[0]
    of = f" of {count(first.size)}" if first is not None and first.size > values.size else ""
    each = _PLURAL.get(name, f"{name}s") if values.size > 1 else name
    return Drawing(form, values, f"{count(values.size)}{of} {each}", _notes(part), "", name)


def _map(part: _Part, facts: str, down: str) -> Drawing:
    values = part.values
    stride = -(-values.size // PIXELS)
    if stride > 1:
        values = values[:, ::stride] if values.shape[1] > stride else values[::stride]
        facts += f", every {count(stride)}th"
    return Drawing(
        "map", values, facts, _notes(part), down, part.names[-1],
        aspect=_aspect(part.axes, values.shape) if stride == 1 and part.samples is None else 1.0,
    )  # fmt: skip


def _tiles(
    maps: Floats,
    part: _Part,
    name: str,
    total: int,
    axes: Sequence[Axis],
    *,
    across: int | None = None,
    zero: NDArray[np.bool_] | None = None,
) -> Drawing:
    """Draw maps [n, h, w] side by side, see `boxes_of`."""
    kept = len(maps)
    fits = max(1, PIXELS // maps[0].size)
    maps = maps[:fits]
    zero = (maps == 0).all(axis=(1, 2)) if zero is None else zero[: len(maps)]
    aspect = _aspect(axes, maps.shape)
    boxes = boxes_of(maps.shape, across, aspect)
    gaps, windows = _sheet(boxes)
    image = np.full(gaps.shape, np.nan)
    for where, each in zip(windows, maps, strict=True):
        image[where] = each
    tiles = tuple(replace(box, zero=bool(none)) for box, none in zip(boxes, zero, strict=True))
    if across is not None:
        what = f"{part.names[0]} \u00d7 {part.names[1]} {kept // across}\u00d7{across}"
        whole = part.axes[0].size, part.axes[1].size
        what += f" of {shape(whole)}" if whole != (kept // across, across) else ""
    else:
        of = f" of {count(total)}" if total > len(maps) else ""
        what = f"{count(len(maps))}{of} {name}{'s' if len(maps) > 1 else ''}"
    facts = f"{what}{_of(shape(maps.shape[1:]), axes)}"
    notes = [f"{int(zero.sum())} all zero"] if name == "channel" and zero.any() else []
    down, side = (axis.name for axis in axes)
    each = (name,) if across is None else part.names[:2]
    return Drawing(
        "map", image, facts, _notes(part, *notes), down, side, tiles, gaps, each=each,
        per=across or 0, aspect=aspect,
    )  # fmt: skip


def boxes_of(maps: tuple[int, ...], across: int | None = None, aspect: float = 1.0) -> list[Tile]:
    """Return the places of maps [n, h, w] in reading order, with a cell between them.

    Together, the maps are nearly square; `across` maps stay side by side. `aspect` is the height of
    a cell relative to its width.
    """
    n, h, w = maps
    columns = min(n, max(1, round(sqrt(n * aspect * (h + 1) / (w + 1)))))
    if across is not None:
        columns = across * max(1, round(columns / across))
    return [Tile(i, i % columns * (w + 1), i // columns * (h + 1), w, h) for i in range(n)]


def _sheet(boxes: Sequence[Tile]) -> tuple[NDArray[np.bool_], list[tuple[slice, slice]]]:
    """Return the gaps [rows, columns] between boxes, and the cells of each box."""
    windows = [np.s_[b.top : b.top + b.height, b.left : b.left + b.width] for b in boxes]
    size = max(down.stop for down, _ in windows), max(across.stop for _, across in windows)
    gaps = np.ones(size, bool)
    for where in windows:
        gaps[where] = False
    return gaps, windows


def place_of(drawing: Drawing) -> dict[str, object]:
    """Return what a tooltip needs to name a cell: the axes, and the size and columns of tiles."""
    first = drawing.tiles[0] if drawing.tiles else None
    return {
        "names": [drawing.down, drawing.across],
        "each": list(drawing.each) if len(drawing.tiles) > 1 else [],
        "width": 0 if first is None else first.width,
        "height": 0 if first is None else first.height,
        "columns": sum(tile.top == 0 for tile in drawing.tiles),
        "count": len(drawing.tiles),
        "per": drawing.per,
        "words": [] if drawing.words is None else drawing.words.ravel().tolist(),
        "wide": drawing.image.shape[1],
    }


def fitted(
    columns: int, rows: int, width: int, height: int, *, aspect: float = 1.0
) -> tuple[float, float]:
    """Return how many cells fit across and down a frame of this size in pixels.

    A frame whose size is not known yet shows exactly the existing cells. `aspect` is the height of
    a cell relative to its width.
    """
    if width <= 0 or height <= 0:
        return float(columns), float(rows)
    cell = min(width / columns, height / (rows * aspect))
    return width / cell, height / (cell * aspect)


def labels_of(drawing: Drawing) -> tuple[Tile, ...]:
    """Return the tiles to number; none if there are too many, or only one."""
    return drawing.tiles if 1 < len(drawing.tiles) <= _LABELLED else ()


Ticks = dict[float, str]


def tile_ticks(drawing: Drawing, most: int) -> tuple[Ticks, Ticks]:
    """Return the numbers of tiles by their middle, across and down; none if there is only one.

    Tiles are in reading order. Those across are the numbers of the first row, and those down belong
    to the first tile of each row. At most `most` of them are named along each axis.
    """
    if len(drawing.tiles) < 2:
        return {}, {}
    top = [tile for tile in drawing.tiles if tile.top == 0]
    side = [tile for tile in drawing.tiles if tile.left == 0]
    per = drawing.per or len(drawing.tiles)
    return (
        {t.left + t.width / 2: str(t.number % per) for t in top[:: -(-len(top) // most)]},
        {
            t.top + t.height / 2: str(t.number // per if drawing.per else t.number)
            for t in side[:: -(-len(side) // most)]
        },
    )


def _colours(images: Floats, part: _Part) -> Drawing:
    """Draw images [n, 3 or 1, h, w] in colour.

    They are scaled as the spec says or, if it does not, from 0 to 1, 0 to 255, or lowest to
    highest.
    """
    shown = images if part.image is None else original(images, part.image)
    finite = shown[np.isfinite(shown)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if part.image is not None:
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 1.0 if high <= 1 else 255.0
    aspect = _aspect(part.axes, images.shape)
    boxes = boxes_of((len(images), *images.shape[2:]), None, aspect)
    gaps, windows = _sheet(boxes)
    sheet = np.zeros((*gaps.shape, 4), np.uint8)
    grey = np.full(gaps.shape, np.nan)
    for where, each, pixels in zip(windows, images, shown, strict=True):
        filled = np.nan_to_num(pixels, nan=low, posinf=high, neginf=low)
        scaled = (filled - low) / (high - low or 1.0)
        sheet[where][..., :3] = np.rint(np.clip(scaled, 0, 1) * 255).transpose(1, 2, 0)
        sheet[where][..., 3] = 255
        grey[where] = each.mean(0)
    what = f"{count(len(images))} image{'s' if len(images) > 1 else ''}"
    facts = f"{what}{_of(shape(images.shape[2:]), part.axes[-2:])}"
    rgba = np.ascontiguousarray(sheet).view(np.uint32)[..., 0]
    each = (SAMPLE,) if part.samples is not None else ("image",)
    return Drawing(
        "colours", grey, facts, _notes(part), *_SPACE, tuple(boxes), gaps, rgba, each,
        aspect=aspect,
    )  # fmt: skip


def original(images: Floats, normalised: Normalised) -> Floats:
    """Return images [..., channels, height, width] before their normalisation, from 0 to 1."""
    mean, std = (np.reshape(numbers, (-1, 1, 1)) for numbers in normalised)
    undone: Floats = images * std + mean
    return undone


def _aspect(axes: Sequence[Axis], kept: Sequence[int]) -> float:
    """Return the height of a cell relative to its width: how many entries it is the mean of."""
    per = [
        axis.size / size if axis.how == "mean" else 1.0
        for axis, size in zip(axes[-2:], kept[-2:], strict=True)
    ]
    return per[0] / per[1]


def _of(cells: str, axes: Sequence[Axis]) -> str:
    """States how many cells there are, and from how many entries they were averaged or selected."""
    sizes = shape(tuple(axis.size for axis in axes))
    if any(axis.how == "mean" for axis in axes):
        return f", means of {sizes}"
    first = any(axis.how == "first" for axis in axes)
    return f", first {cells} of {sizes}" if first else f" \u00b7 {cells}"


def _notes(part: _Part, *more: str) -> str:
    return " \u00b7 ".join([*part.notes, *more])
