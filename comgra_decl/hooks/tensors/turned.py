"""Count the images of a batch that fit their target maps only if the maps are flipped or turned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, one_hot

from comgra_decl.stats.support import is_readable

SMALLEST = 8  # height and width of images and maps
RELATED = 0.4  # least correlation of an image with its map
CLEARLY = 1.5  # how many times the correlation with any other position
_MOST_SAMPLES = 64
_MOST_ELEMENTS = 1 << 22
_SIDE = 32  # of the averages that are compared
_CHANNELS, _CLASSES = 4, 8

_TRANSPOSED = "transposed"
TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "flipped from left to right": lambda maps: maps.flip(-1),
    "flipped upside down": lambda maps: maps.flip(-2),
    "rotated by 180 degrees": lambda maps: maps.flip(-1, -2),
    _TRANSPOSED: lambda maps: maps.mT,  # of square maps
}


def turned_maps(images: Tensor, target: Tensor) -> dict[str, Any] | None:
    """Compare images with their target maps, as they are and turned.

    A channel of an image is correlated with a channel of its map, or with where the map has one
    class, both averaged to at most 32 x 32 cells. The first 64 samples are compared.

    Args:
        images: floating-point numbers [batch, channels, height, width].
        target: [batch, height, width] or [batch, channels, height, width], as large as the images
            or smaller.

    Returns:
        "aligned", the number of samples whose map fits as it is, and "turned", the number that
        fits in each other position. None if the tensors are no such images and maps.
    """
    if images.dim() != 4 or target.dim() not in (3, 4) or len(images) != len(target):
        return None
    height, width = target.shape[-2:]
    if min(height, width) < SMALLEST or height > images.shape[-2] or width > images.shape[-1]:
        return None
    if not is_readable(images) or not is_readable(target) or target.is_complex():
        return None
    count = min(_MOST_SAMPLES, max(1, _MOST_ELEMENTS // max(images[0].numel(), target[0].numel())))
    size = min(height, _SIDE), min(width, _SIDE)
    x = adaptive_avg_pool2d(images.detach()[:count, :_CHANNELS].to(torch.float32), size)
    y = adaptive_avg_pool2d(_parts(target.detach()[:count]), size)
    names = [name for name in TURNS if size[0] == size[1] or name != _TRANSPOSED]
    found = [_related(x, y), *(_related(x, TURNS[name](y)) for name in names)]
    aligned, turned = 0, dict.fromkeys(names, 0)
    for own, *others in torch.stack(found, 1).tolist():
        best = max(others)
        if own >= RELATED and own >= CLEARLY * best:
            aligned += 1
        elif best >= RELATED and best >= CLEARLY * own:
            turned[names[others.index(best)]] += 1
    return {"aligned": aligned, "turned": turned}


def _parts(target: Tensor) -> Tensor:
    """Return the channels of maps, or where each class is, as [batch, parts, height, width]."""
    if target.dim() == 4 and target.shape[1] > 1:
        return target[:, :_CLASSES].to(torch.float32)
    maps = target if target.dim() == 3 else target[:, 0]
    classes = maps.unique() if not maps.is_floating_point() else maps[:0].flatten()
    if not 1 < len(classes) <= _CLASSES:
        return maps[:, None].to(torch.float32)
    places = torch.bucketize(maps.to(torch.int64), classes.to(torch.int64))
    return one_hot(places, len(classes)).movedim(-1, 1).to(torch.float32)


def _related(x: Tensor, y: Tensor) -> Tensor:
    """Return the largest correlation of a channel of each sample with a part of its map."""
    left, right = x.flatten(2), y.flatten(2)
    left, right = left - left.mean(2, keepdim=True), right - right.mean(2, keepdim=True)
    sizes = left.norm(dim=2)[:, :, None] * right.norm(dim=2)[:, None]
    related = (left @ right.mT).abs() / sizes
    return torch.nan_to_num(related, 0.0, 0.0, 0.0).flatten(1).amax(1)
