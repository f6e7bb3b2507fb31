"""Recorded values as points for TensorBoard's projector."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError, needed
from comgra_decl.query import Run
from comgra_decl.records import PROBE_PREFIX, SlotKey
from comgra_decl.sinks import naming

_MOST_TENSORS = 20  # of a record
_MOST_DIMS = 4096
_SIDE = 64  # of a sample's picture in the sprite
_IN_FILES = re.compile(r"[A-Za-z0-9_-]")  # characters of names of files on every system


class _Record(NamedTuple):
    """The last record of a type of execution."""

    type: str
    step: int

    @property
    def file(self) -> str:
        """The first part of the names of its files."""
        return naming.encoded(self.type, _IN_FILES)


def write_projector(run: Run, chosen: list[SlotKey], to: Path) -> None:
    """Add the values of the last record of training and of each probe to a log folder.

    There is one point per sample. Tensors without a batch dimension, with fewer than three samples
    or with more than 4,096 values per sample are left out, and so are all tensors of a record
    beyond the first 20.

    Args:
        run: the run.
        chosen: the tensors, in order.
        to: the log folder; nothing is added if there are no values.
    """
    tensors = {
        record: dict(islice(_all_points(run, chosen, record), _MOST_TENSORS))
        for record in _records(run)
    }
    if not any(tensors.values()):
        return
    config = needed("tensorboard.plugins.projector.projector_config_pb2", "tensorboard")
    listed = config.ProjectorConfig()
    (to / "projector").mkdir()
    for record, found in tensors.items():
        if not found:
            continue
        labels, sprite = f"projector/{record.file}.tsv", f"projector/{record.file}.png"
        _write_labels(run, record, to / labels)
        pictured = _write_sprite(run, record, to / sprite)
        for number, (key, points) in enumerate(found.items()):
            path = f"projector/{record.file}-{number}.tsv"
            np.savetxt(to / path, points, "%.9g", delimiter="\t")
            entry = listed.embeddings.add()
            entry.tensor_name = f"{naming.of_tensor(key, record.type)} at step {record.step}"
            entry.tensor_path = path
            entry.metadata_path = labels
            if pictured == len(points):
                entry.sprite.image_path = sprite
                entry.sprite.single_image_dim.extend([_SIDE, _SIDE])
    (to / "projector_config.pbtxt").write_text(str(listed), encoding="utf-8")


def _records(run: Run) -> Iterator[_Record]:
    """Yield the last record of each probe and of training.

    Probes come first, because TensorBoard opens the first tensor, and a probe has the same samples
    at every step.
    """
    last = run.records.groupby("type", sort=False, observed=True)["step"].max()
    for type_ in sorted(last.index, key=lambda name: not name.startswith(PROBE_PREFIX)):
        if type_.startswith(PROBE_PREFIX) or type_ == naming.TRAIN:
            yield _Record(type_, int(last[type_]))


def _all_points(
    run: Run, chosen: list[SlotKey], record: _Record
) -> Iterator[tuple[SlotKey, NDArray[np.float32]]]:
    for key in chosen:
        points = _points(run, key, record)
        if points is not None:
            yield key, points


def _points(run: Run, key: SlotKey, record: _Record) -> NDArray[np.float32] | None:
    """Return the values of a tensor, [samples, values]; None if they make no points."""
    slot = run.slot(key.node, role=key.role, of=key.pass_, iteration=key.iteration)
    if slot.batch_dim is None or slot.kind in ("target", "loss"):
        return None
    try:
        values = slot.value(record.step, type=record.type)
    except UnknownNameError:
        return None
    points = values.reshape(len(values), -1)
    usable = len(points) > 2 and 1 < points.shape[1] <= _MOST_DIMS and points.dtype.kind != "c"
    return points.astype(np.float32) if usable else None


def _write_labels(run: Run, record: _Record, path: Path) -> None:
    samples = run.samples(record.step, type=record.type)
    lines = ["sample\tplace\tlabel"]
    for number, place, label in samples.itertuples():
        text = "" if label is None else " ".join(str(label).split())
        lines.append(f"{number}\t{place}\t{text}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_sprite(run: Run, record: _Record, path: Path) -> int | None:
    """Write the first input that is an image as a square of tiles, one for each sample.

    Returns:
        The number of samples; None if no input is an image, and there is no file.
    """
    images = _images(run, record)
    if images is None:
        return None
    across = int(np.ceil(np.sqrt(len(images))))
    sheet = np.zeros((across * _SIDE, across * _SIDE, 3), np.uint8)
    for number, value in enumerate(images):
        image = _picture(value)
        rows = np.arange(_SIDE) * image.shape[0] // _SIDE
        columns = np.arange(_SIDE) * image.shape[1] // _SIDE
        top, left = number // across * _SIDE, number % across * _SIDE
        sheet[top : top + _SIDE, left : left + _SIDE] = image[rows][:, columns]
    needed("PIL.Image", "tensorboard").fromarray(sheet).save(path)
    return len(images)


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


def _images(run: Run, record: _Record) -> NDArray[Any] | None:
    """Return the first input with the shape [samples, channels, height, width]."""
    inputs = run.slots.query("kind == 'input' and `pass` == 'forward'")
    for node, role in inputs[["node", "role"]].itertuples(index=False):
        try:
            values = run.slot(node, role=role).value(record.step, type=record.type)
        except UnknownNameError:
            continue
        if values.ndim == 4 and len(values) > 2:
            return np.asarray(values, np.float64)
    return None
