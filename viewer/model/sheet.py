"""Recorded values of one tensor as a sheet: table window, image and sorted list."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.model.drawing import limit_of, numbers
from comgra_decl.viewer.model.numbers import count, shape
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.slicing import COLOUR, Slicing, slicing_for, taken
from comgra_decl.viewer.model.unrecorded import Unrecorded, why_unrecorded

ROWS, COLUMNS = 60, 14
"""Maximum rows and columns of the table window."""

LISTED = 100
"""Values per page of the list."""

PIXELS = 10_000
"""Maximum image size. Larger slices show the largest magnitude in each block of cells."""

PHOTO = 65_536
"""Maximum size of a colour image. Larger images are subsampled."""

TEXT = 4000
"""Maximum number of characters of a text."""

Cells = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of the recorded values. The first dim of a batched tensor contains the samples."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """All recorded values of a tensor at a step, or the reason why they are missing.

    `values` [*dims] have the recorded dtype. `fixed` is the selected sample, if any.
    """

    values: Cells = field(default_factory=lambda: np.zeros(()))
    dims: tuple[Dim, ...] = ()
    fixed: int | None = None
    picture: bool = False
    slot: Slot | None = None
    missing: Unrecorded | None = None

    def slicing(self, text: str) -> Slicing:
        """Return the slicing that URL text describes for this tensor."""
        return slicing_for(text, self.values.shape, fixed=self.fixed, picture=self.picture)

    @property
    def chosen(self) -> Cells:
        """Values of the selected sample [...], or of all samples."""
        return self.values if self.fixed is None else self.values[self.fixed]


@dataclass(frozen=True, slots=True)
class Window:
    """Part of a slice: `cells` [rows, columns], which start at `row` and `column` of `total`."""

    cells: Cells
    row: int
    column: int
    total: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Listing:
    """Page of the sorted values, starting at `first`: `indices` [k, dims] and `values` [k]."""

    indices: NDArray[np.int64]
    values: Cells
    first: int
    total: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Image of a slice with `block` cells per pixel. `marks` are non-finite cells.

    If one dim contains colour channels, `rgba` contains the colours (uint32) instead.
    """

    image: Floats
    marks: NDArray[np.bool_]
    limit: float
    block: tuple[int, int] = (1, 1)
    rgba: NDArray[np.uint32] | None = None


def tensor_of(view: RunView, at: Selection, pass_: str) -> Tensor:
    """Return the recorded values of one pass of the selected tensor.

    Falls back to forward values if that pass was not recorded.
    """
    slot = slot_of(view, at, pass_)
    if slot is None or at.step is None:
        return Tensor(missing=why_unrecorded(view, slot, at))
    try:
        values = np.asarray(view.value(slot, at.step, at.type))
    except ComgraError:
        return Tensor(slot=slot, missing=why_unrecorded(view, slot, at))
    names = [f"dim {i}" for i in range(len(view.shape(slot, at))) if i != slot.batch_dim]
    fixed = None
    if slot.batch_dim is None:
        values = values[0]  # stored as a single sample
    else:
        names.insert(0, "sample")
        if at.sample is not None and at.sample >= len(values):
            return Tensor(slot=slot, missing=Unrecorded(f"Sample {at.sample} was not recorded."))
        fixed = at.sample
    if values.size == 0:
        return Tensor(slot=slot, missing=Unrecorded("The tensor is empty at this step."))
    dims = tuple(Dim(name, size) for name, size in zip(names, values.shape, strict=True))
    return Tensor(values, dims, fixed, slot.kind == "input", slot)


def slot_of(view: RunView, at: Selection, pass_: str) -> Slot | None:
    """Return the selected tensor's slot for one pass, or for its first pass if that is missing."""
    passes = view.passes(at.node, at.role, at.iteration)
    return passes.get(pass_) or passes.get("forward") or next(iter(passes.values()), None)


def facts_of(tensor: Tensor) -> str:
    """Return the values' shape, dtype, size and number of non-finite values as text."""
    values = tensor.chosen
    bad = int((~np.isfinite(numbers(values))).sum())
    parts = [shape(values.shape), str(values.dtype), f"{count(values.size)} values"]
    return " \u00b7 ".join([*parts, *([f"{count(bad)} not finite"] if bad else [])])


def window_of(tensor: Tensor, slicing: Slicing, wanted: str) -> Window:
    """Return the cells of the table window; for colours, only the first channel."""
    cells = taken(tensor.values, slicing)
    cells = cells[..., 0] if cells.ndim == 3 else cells
    total = cells.shape[0], cells.shape[1]
    row, column = (
        max(min(want, size - length), 0)
        for want, size, length in zip(corner(wanted), total, (ROWS, COLUMNS), strict=True)
    )
    return Window(cells[row : row + ROWS, column : column + COLUMNS], row, column, total)


def listing_of(tensor: Tensor, order: str, wanted: str, *, whole: bool = False) -> Listing:
    """Return one page (or all) of the sorted values. NaN and infinite values come first.

    Args:
        tensor: Values to list.
        order: Which values come first: "high", "low", "largest" or "smallest" (by magnitude). Ties
            are sorted by position.
        wanted: First line of the page, as in the URL.
        whole: Whether to list all values.
    """
    values = tensor.chosen
    flat = numbers(values).ravel()
    places = _ordered(flat, order)
    first = max(min(corner(wanted)[0], len(flat) - LISTED), 0)
    page = places if whole else places[first : first + LISTED]
    indices = np.stack(np.unravel_index(page, values.shape), 1) if values.ndim else page[:, None]
    if tensor.fixed is not None:
        indices = np.insert(indices, 0, tensor.fixed, 1)
    return Listing(indices.astype(np.int64), values.ravel()[page], first, len(flat))


def picture_of(tensor: Tensor, slicing: Slicing) -> Picture:
    """Return the slice as an image small enough for a browser."""
    if COLOUR in slicing.places:
        return _photo(numbers(taken(tensor.values, slicing)))
    cells = numbers(taken(tensor.values, slicing))
    block = _block(cells.shape)
    marks = ~np.isfinite(cells)
    limit = limit_of(cells)
    image = _blocks(np.where(marks, 0.0, cells), block)
    return Picture(image, _blocks(marks, block), limit, block)


def text_of(tensor: Tensor) -> str:
    """Return the text encoded by a sample of bytes; "" if it is not text."""
    values = tensor.chosen
    if values.dtype != np.uint8 or values.ndim > 1:
        return ""
    try:
        text = values.tobytes().rstrip(b"\0").decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return text[:TEXT] if all(letter.isprintable() or letter in "\n\t" for letter in text) else ""


def corner(text: str) -> tuple[int, int]:
    """Parse the first row and column of the table window from untrusted URL text."""
    parts = [
        int(p) if p.isascii() and p.isdecimal() and len(p) < 12 else 0 for p in text.split(",")
    ]
    return parts[0], parts[1] if len(parts) > 1 else 0


def _ordered(flat: Floats, order: str) -> NDArray[np.int64]:
    finite = np.isfinite(flat)
    key = np.abs(flat) if order in ("largest", "smallest") else flat.copy()
    key[~finite] = 0.0
    key = key if order in ("low", "smallest") else -key
    return np.lexsort((key, finite)).astype(np.int64)


def _block(dims: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns per pixel; shrink the longer side first."""
    rows, columns = 1, 1
    while -(-dims[0] // rows) * -(-dims[1] // columns) > PIXELS:
        if dims[0] / rows >= dims[1] / columns:
            rows += 1
        else:
            columns += 1
    return rows, columns


def _blocks(cells: NDArray[Any], block: tuple[int, int]) -> NDArray[Any]:
    """Return the cell of largest magnitude in each block, or for marks, whether any is set."""
    if block == (1, 1):
        return cells
    (rows, columns), (h, w) = cells.shape, block
    down, across = -(-rows // h), -(-columns // w)
    padded = np.zeros((down * h, across * w), cells.dtype)
    padded[:rows, :columns] = cells
    parts = padded.reshape(down, h, across, w).transpose(0, 2, 1, 3).reshape(down, across, h * w)
    largest = np.abs(parts).argmax(-1)
    return np.take_along_axis(parts, largest[..., None], -1)[..., 0]


def _photo(cells: Floats) -> Picture:
    """Return colours. Bytes are unchanged, other values are scaled from lowest to highest."""
    stride = int(np.ceil(np.sqrt(cells.shape[0] * cells.shape[1] / PHOTO)))
    cells = cells[::stride, ::stride]
    finite = np.isfinite(cells)
    known = cells[finite] if finite.any() else np.zeros(1)
    whole = known.min() >= 0 and known.max() > 1.5 and known.max() <= 255
    low, high = (0.0, 255.0) if whole else (float(known.min()), float(known.max()))
    scaled = np.where(finite, cells - low, 0.0) / ((high - low) or 1.0) * 255
    rgba = np.empty((*cells.shape[:2], 4), np.uint8)
    rgba[..., :3] = np.clip(np.rint(scaled), 0, 255)
    rgba[..., 3] = 255
    marks = np.asarray(~finite.all(-1))
    image = np.zeros(cells.shape[:2])
    return Picture(image, marks, 1.0, (stride, stride), rgba.view(np.uint32)[..., 0])
