"""The files from which TensorBoard's projector reads points, their labels and their pictures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import needed
from comgra_decl.records import PROBE_PREFIX

from . import naming
from .points import Points

FOLDER = "projector"
"""Folder in a log folder that contains points, labels and pictures."""

_EXTRA = "tensorboard"
_SIDE = 64  # of a sample's picture in the sprite
_IN_FILES = re.compile(r"[A-Za-z0-9_-]")  # characters of names of files on every system


def write_points(records: Sequence[Points], folder: str | os.PathLike[str]) -> None:
    """Write points to a log folder, and replace those that were written before.

    Probes come first, because TensorBoard opens the first tensor, and a probe has the same samples
    at every step. The names of tensors and files do not contain the step, which is in the column
    `step` of the labels: TensorBoard lists tensors once, but reads their points again.

    Args:
        records: at most one record of each type of execution; those without tensors are left out.
        folder: the log folder.
    """
    config = needed("tensorboard.plugins.projector.projector_config_pb2", _EXTRA)
    to, listed = Path(folder), config.ProjectorConfig()
    (to / FOLDER).mkdir(parents=True, exist_ok=True)
    for record in sorted(records, key=lambda each: not each.type.startswith(PROBE_PREFIX)):
        if not record.tensors:
            continue
        file = naming.encoded(record.type, _IN_FILES)
        labels, sprite = f"{FOLDER}/{file}.tsv", f"{FOLDER}/{file}.png"
        most = max(len(points) for points in record.tensors.values())
        with _replaced(to / labels) as opened:
            opened.write(_labels(record, most).encode())
        if record.images is not None:
            with _replaced(to / sprite) as opened:
                needed("PIL.Image", _EXTRA).fromarray(_sprite(record.images)).save(opened, "PNG")
        for number, (key, points) in enumerate(record.tensors.items()):
            path = f"{FOLDER}/{file}-{number}.tsv"
            with _replaced(to / path) as opened:
                np.savetxt(opened, points, "%.9g", delimiter="\t")
            entry = listed.embeddings.add()
            entry.tensor_name = naming.of_tensor(key, record.type)
            entry.tensor_path = path
            entry.metadata_path = labels
            if record.images is not None and len(record.images) == len(points):
                entry.sprite.image_path = sprite
                entry.sprite.single_image_dim.extend([_SIDE, _SIDE])
    with _replaced(to / "projector_config.pbtxt") as opened:
        opened.write(str(listed).encode())


@contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of another one when it is complete."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as opened:
        yield opened
    new.replace(path)


def _labels(record: Points, most: int) -> str:
    """Return a table with a line for each of the first `most` samples."""
    lines = ["sample\tplace\tlabel\tstep"]
    pairs = zip(record.places[:most], record.labels[:most], strict=True)
    for number, (place, label) in enumerate(pairs):
        text = "" if label is None else " ".join(str(label).split())
        lines.append(f"{number}\t{place}\t{text}\t{record.step}")
    return "\n".join(lines) + "\n"


def _sprite(images: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the images as a square of tiles, one for each sample."""
    across = int(np.ceil(np.sqrt(len(images))))
    sheet = np.zeros((across * _SIDE, across * _SIDE, 3), np.uint8)
    for number, value in enumerate(images):
        image = _picture(np.asarray(value, np.float64))
        rows = np.arange(_SIDE) * image.shape[0] // _SIDE
        columns = np.arange(_SIDE) * image.shape[1] // _SIDE
        top, left = number // across * _SIDE, number % across * _SIDE
        sheet[top : top + _SIDE, left : left + _SIDE] = image[rows][:, columns]
    return sheet


def _picture(value: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the colours [height, width, 3] of a sample, [channels, height, width].

    Three channels are red, green and blue; otherwise, the first one is grey, because TensorBoard
    tints pictures with the colour of the category. From black for the smallest value of the sample
    to white for the largest; NaN and infinite values are black.
    """
    shown = np.moveaxis(value if len(value) == 3 else value[:1], 0, -1)
    known = np.isfinite(shown)
    low, high = (shown[known].min(), shown[known].max()) if known.any() else (0.0, 0.0)
    share = np.where(known, shown - low, 0) / (high - low or 1.0)
    grey: NDArray[np.uint8] = np.rint(share * 255).astype(np.uint8)
    return np.broadcast_to(grey, (*grey.shape[:2], 3))
