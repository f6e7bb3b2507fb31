"""Exports: numbers as files, and as text for spreadsheets."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from comgra_decl.viewer.model.drawing import numbers
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.sheet import Tensor, Window, listing_of
from comgra_decl.viewer.model.slicing import Slicing, taken


def csv_of(tensor: Tensor, slicing: Slicing, order: str) -> bytes:
    """Return the whole slice with row and column numbers, or the whole list, as CSV.

    Each number is written as the shortest decimal that identifies it in its dtype.
    """
    if order:
        listing = listing_of(tensor, order, "0", whole=True)
        lines = (
            [*map(str, index), text]
            for index, text in zip(listing.indices.tolist(), _texts(listing.values), strict=True)
        )
        return written([*(dim.name for dim in tensor.dims), "value"], lines)
    cells = taken(tensor.values, slicing)
    flat = cells.reshape(len(cells), -1)  # put three channels side by side
    lines = ([str(row), *_texts(part)] for row, part in enumerate(flat))
    return written(["", *map(str, range(flat.shape[1]))], lines)


def npy_of(tensor: Tensor) -> bytes:
    """Return the values of the selected sample, or of all samples, as a `.npy` file.

    Keeps the dtype, except that dtypes unknown to numpy (bfloat16, float8) are converted to float32
    without loss.
    """
    values = tensor.chosen
    own = values.dtype.kind in "biufc"
    file = io.BytesIO()
    np.save(file, values if own else numbers(values).astype(np.float32), allow_pickle=False)
    return file.getvalue()


def tabbed(window: Window) -> bytes:
    """Return the cells of a table window as tab-separated text."""
    return "\n".join("\t".join(_texts(row)) for row in window.cells).encode()


CSV = "text/csv"
"""MIME type."""


def clean_name(*parts: str, ending: str) -> str:
    """Return a file name that is valid on every system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(filter(None, parts)))[:150] + ending


def file_name(at: Selection, tensor: Tensor, ending: str) -> str:
    """Return a file name that contains the tensor, the step and the sample."""
    pass_ = "forward" if tensor.slot is None else tensor.slot.pass_
    parts = [at.node, at.role, pass_, f"step{at.step}"]
    parts += [] if tensor.fixed is None else [f"sample{tensor.fixed}"]
    return clean_name(*parts, ending=ending)


def _texts(values: NDArray[np.generic]) -> list[str]:
    return [str(value) for value in values]


def written(head: list[str], lines: Iterable[list[str]]) -> bytes:
    """Return a table as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(lines)
    return out.getvalue().encode()
