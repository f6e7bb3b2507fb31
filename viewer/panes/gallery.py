"""The samples of a probe as tiles: what went in, and what came out."""

from __future__ import annotations

from collections.abc import Collection

from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.gallery import Tile
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.model.pictures import Album

CSS = """
.gallery { align-items: flex-start; display: flex; flex-wrap: wrap; gap: 12px; margin: 8px 0 14px;
  max-height: 392px; overflow: auto; }
.tile { background: none; border: 2px solid var(--line); border-radius: 8px; color: inherit;
  cursor: pointer; font: inherit; overflow-wrap: anywhere; padding: 6px; text-align: left;
  width: 108px; }
.tile[aria-pressed="true"] { border-color: #3f6fd8; }
.tile.brushed { background: color-mix(in srgb, #3f6fd8 16%, transparent); }
.tile img { display: block; image-rendering: pixelated; object-fit: contain; }
.tile img { height: 88px; width: 88px; }
.tile .text { display: block; font-size: 11px; line-height: 1.3; max-height: 72px;
  margin-bottom: 4px; overflow: hidden; overflow-wrap: anywhere; }
.wave { display: block; margin-bottom: 4px; }
.tile .wave path { fill: none; stroke: #3f6fd8; stroke-width: 1; }
"""


def gallery(found: Album, brushed: Collection[int] = ()) -> str:
    """Return a button for each sample, of which one is pressed; brushed ones stand out."""
    tiles = "".join(
        sample_tile(tile, tile.sample == found.sample, brushed=tile.sample in brushed)
        for tile in found.tiles
    )
    return f'<div class="gallery" role="group" aria-label="Samples">{tiles}</div>'


def sample_tile(tile: Tile, chosen: bool, *, send: str = "", brushed: bool = False) -> str:
    """Return the button of a sample.

    Args:
        tile: the sample.
        chosen: whether the button is pressed.
        send: what the button sends; by default, the number of the sample.
        brushed: whether the sample is brushed.
    """
    image = f'<img src="{tile.image}" alt="">' if tile.image else ""
    image += f'<span class="text">{_e(tile.text)}</span>' if tile.text else ""
    image += _waves(tile) if tile.waves else ""
    lines = [f"sample {tile.sample}"]
    if tile.label:
        lines.append(f"label {_e(tile.label)}")
    if tile.prediction:
        lines.append(f"predicted {_e(tile.prediction)}")
    if tile.loss is not None:
        lines.append(f"{tile.measure} {number(tile.loss, digits=3)}")
    return (
        f'<button type="button" class="tile{" brushed" * brushed}" '
        f'data-send="{send or f"sample:{tile.sample}"}" '
        f'aria-pressed="{str(chosen).lower()}">{image}{"<br>".join(lines)}</button>'
    )


_ACROSS, _HIGH = 88, 44
"""Pixels of a waveform: its width, and the height of one channel."""


def _waves(tile: Tile) -> str:
    """Return the channels of a waveform below one another."""
    paths = []
    for row, outline in enumerate(tile.waves):
        pieces, pen = [], "M"
        for i, (low, high) in enumerate(outline.tolist()):
            if low != low:  # NaN
                pen = "M"
                continue
            x = (i + 0.5) * _ACROSS / len(outline)
            top, bottom = (row * _HIGH + 2 + (_HIGH - 4) * (1 - y) for y in (high, low))
            pieces.append(f"{pen}{x:.1f} {top:.1f}L{x:.1f} {bottom:.1f}")
            pen = "L"
        paths.append(f'<path d="{"".join(pieces)}"/>')
    height = _HIGH * len(tile.waves)
    return (
        f'<svg class="curve wave" width="{_ACROSS}" height="{height}" role="img" '
        f'aria-label="Waveform of sample {tile.sample}">{"".join(paths)}</svg>'
    )
