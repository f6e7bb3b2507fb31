"""TensorBoard: a log folder with one run, and recorded values for its projector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError, needed
from comgra_decl.pictures.tiles import tiled
from comgra_decl.query import Run
from comgra_decl.records import SlotKey
from comgra_decl.sinks import naming
from comgra_decl.sinks.tensorboard import TensorBoardSink

from .content import Content
from .forwarding import forward

_MOST_TENSORS = 20
_MOST_DIMS = 4096
_SIDE = 64  # of a sample's picture in the sprite


def write(content: Content, to: Path) -> None:
    """Write the folder `to`, which `tensorboard --logdir` reads."""
    sink = TensorBoardSink(to)
    try:
        chosen = forward(content, sink)
    finally:
        sink.end("stopped")
    _write_projector(content.run, chosen, to)


def _write_projector(run: Run, chosen: list[SlotKey], to: Path) -> None:
    """Add the values of the last step to a log folder, with one point per recorded sample.

    Tensors without a batch dimension, with fewer than three samples or with more than 4,096 values
    per sample are left out, and so are all tensors beyond the first 20.
    """
    if not len(run.steps):
        return
    step = int(run.steps[-1])
    found: dict[SlotKey, NDArray[Any]] = {}
    for key in chosen:
        points = _points(run, key, step)
        if points is not None:
            found[key] = points
        if len(found) == _MOST_TENSORS:
            break
    if not found:
        return
    config = needed("tensorboard.plugins.projector.projector_config_pb2", "tensorboard")
    listed = config.ProjectorConfig()
    folder = to / "projector"
    folder.mkdir()
    _write_labels(run, step, folder / "samples.tsv")
    sprite = _sprite(run, step)
    if sprite is not None:
        needed("PIL.Image", "tensorboard").fromarray(sprite[0]).save(folder / "samples.png")
    for number, (key, points) in enumerate(found.items()):
        np.savetxt(folder / f"{number}.tsv", points, "%.9g", delimiter="\t")
        entry = listed.embeddings.add()
        entry.tensor_name = f"{naming.of_tensor(key, naming.TRAIN)} at step {step}"
        entry.tensor_path = f"projector/{number}.tsv"
        entry.metadata_path = "projector/samples.tsv"
        if sprite is not None and len(points) == sprite[1]:
            entry.sprite.image_path = "projector/samples.png"
            entry.sprite.single_image_dim.extend([_SIDE, _SIDE])
    (to / "projector_config.pbtxt").write_text(str(listed), encoding="utf-8")


def _points(run: Run, key: SlotKey, step: int) -> NDArray[Any] | None:
    slot = run.slot(key.node, role=key.role, of=key.pass_, iteration=key.iteration)
    if slot.batch_dim is None or slot.kind in ("target", "loss"):
        return None
    try:
        values = slot.value(step)
    except UnknownNameError:
        return None
    points = values.reshape(len(values), -1)
    usable = len(points) > 2 and 1 < points.shape[1] <= _MOST_DIMS and points.dtype.kind != "c"
    return points.astype(np.float32) if usable else None


def _write_labels(run: Run, step: int, path: Path) -> None:
    samples = run.samples(step)
    lines = ["sample\tplace\tlabel"]
    for number, place, label in samples.itertuples():
        text = "" if label is None else " ".join(str(label).split())
        lines.append(f"{number}\t{place}\t{text}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sprite(run: Run, step: int) -> tuple[NDArray[np.uint8], int] | None:
    """Return the inputs of all samples in a square of tiles, and their number."""
    for node, role in run.slots.query("kind == 'input'")[["node", "role"]].itertuples(index=False):
        try:
            values = np.asarray(run.slot(node, role=role).value(step), np.float64)
        except UnknownNameError:
            continue
        if values.ndim == 4 and len(values) > 2:
            across = int(np.ceil(np.sqrt(len(values))))
            sheet = np.zeros((across * _SIDE, across * _SIDE, 3), np.uint8)
            for number, value in enumerate(values):
                image = tiled(value[:1])
                rows = np.arange(_SIDE) * image.shape[0] // _SIDE
                columns = np.arange(_SIDE) * image.shape[1] // _SIDE
                top, left = number // across * _SIDE, number % across * _SIDE
                sheet[top : top + _SIDE, left : left + _SIDE] = image[rows][:, columns]
            return sheet, len(values)
    return None
