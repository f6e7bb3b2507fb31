"""A self-contained HTML page that shows drawn batches, with their images."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from comgra_decl.experiments.data import Drawn
from comgra_decl.query.batches import Array, channel_axis, summary

_MOST_IMAGES = 64
_LEAST_PIXELS = 4
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;max-width:70em}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #ddd}figure{display:inline-"
    "block;margin:.4em;text-align:center}img{width:96px;image-rendering:pixelated}"
)


def page(drawn: Drawn, *, mean: Sequence[float] = (), std: Sequence[float] = ()) -> str:
    """Return the page.

    Args:
        drawn: the batches.
        mean: the mean of each channel that the program subtracts from its images.
        std: the standard deviation of each channel by which it divides them.
    """
    parts = ["<!doctype html><meta charset=utf-8><title>Data</title>", f"<style>{_STYLE}</style>"]
    parts.append(f"<h1>The first {drawn.batches} batches, as the model receives them</h1>")
    parts += _table(drawn)
    labels = drawn.tensors.get(drawn.target or "", [])
    for label, batches in drawn.tensors.items():
        axis = channel_axis(batches[0].shape, convolved=label in drawn.convolved)
        if label.startswith("input") and axis is not None and _shows_images(batches[0], axis):
            images = np.moveaxis(batches[0], axis, -1)
            parts += _images(label, images, labels[0] if labels else None, (mean, std))
    return "\n".join(parts) + "\n"


def _table(drawn: Drawn) -> Iterator[str]:
    yield "<table><tr><th>tensor<th>shapes<th>dtype<th>range<th>mean \u00b1 std<th>channels</tr>"
    for label, batches in drawn.tensors.items():
        found = summary(label, batches, convolved=label in drawn.convolved)
        shapes = ", ".join("\u00d7".join(map(str, shape)) for shape in found.shapes)
        numbers = "", ""
        if found.mean is not None and found.low is not None:
            numbers = (
                f"{found.low:.4g} to {found.high:.4g}",
                f"{found.mean:.4g} \u00b1 {found.std:.4g}",
            )
        if found.nonfinite:
            count = "all" if found.mean is None else f"{found.nonfinite:,}"
            numbers = (f"{numbers[0]}, {count} NaN or infinite".removeprefix(", "), numbers[1])
        channels = ", ".join(f"{mean:.3g} \u00b1 {std:.3g}" for mean, std in found.channels)
        cells = (label, shapes, found.dtype, *numbers, channels)
        yield "<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in cells) + "</tr>"
    yield "</table>"


def _shows_images(batch: Array, axis: int) -> bool:
    """Return whether a batch, with its channels on the given axis, contains images."""
    if batch.ndim != 4 or batch.dtype.kind not in "fu" or batch.shape[axis] not in (1, 3):
        return False
    return all(n >= _LEAST_PIXELS for i, n in enumerate(batch.shape) if i not in (0, axis))


Scale = tuple[Sequence[float], Sequence[float]]


def _images(label: str, batch: Array, classes: Array | None, scale: Scale) -> Iterator[str]:
    """Yield the images of a batch [samples, height, width, channels], with their classes."""
    images = batch[:_MOST_IMAGES].astype(np.float64)
    if len(scale[0]) == len(scale[1]) == images.shape[-1]:
        images = images * np.array(scale[1]) + np.array(scale[0])
        how = "with the given mean and standard deviation undone; values outside 0 to 1 are cut off"
    elif batch.dtype == np.uint8:
        images, how = images / 255, "as they are"
    else:
        low, high = np.nanmin(images), np.nanmax(images)
        images = (images - low) / (high - low if high > low else 1.0)
        how = f"scaled from the range {low:.3g} to {high:.3g}, because "
        if scale[0]:
            how += f"the images have {images.shape[-1]} channels and the mean {len(scale[0])}"
        else:
            how += "no mean and standard deviation were given"
    yield f"<h2>{html.escape(label)}</h2><p>The first batch, {html.escape(how)}.</p>"
    known = classes is not None and classes.shape == (len(batch),)
    for number, image in enumerate(images):
        pixels = (np.nan_to_num(image).clip(0, 1) * 255).round().astype(np.uint8)
        source = base64.b64encode(png(pixels)).decode()
        caption = str(classes[number]) if known and classes is not None else str(number)
        text = html.escape(caption)
        yield f"<figure><img src='data:image/png;base64,{source}'><br>{text}</figure>"


def png(pixels: Array) -> bytes:
    """Return an image of uint8 [height, width, 1 or 3] as a PNG file."""
    height, width, channels = pixels.shape
    header = struct.pack(">2I5B", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(pixels))
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )
