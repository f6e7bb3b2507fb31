"""Numbers about the pictures of a record, which rules compare with their thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.subject import Drawn, Map

Floats = NDArray[np.float64]


def checked(drawn: Mapping[str, Drawn], mask: torch.Tensor | None) -> dict[str, Any]:
    """Return what rules read about the pictures of a probe: an entry of `records.PICTURE_CHECKS`.

    Args:
        drawn: the pictures by name.
        mask: 1 where attributions should lie, [..., height, width] or as many dimensions as the
            input has places; None if the probe declares none.
    """
    pictures: dict[str, dict[str, Any]] = {}
    compared: dict[str, tuple[object, Floats]] = {}
    for name, each in drawn.items():
        facts = each.facts
        entry: dict[str, Any] = {"method": facts.get("method")}
        if "gap" in facts and "difference" in facts:
            entry["gap"] = float(np.abs(facts["gap"]).mean())
            entry["difference"] = float(np.abs(facts["difference"]).mean())
        explains = [m for m in each.maps if m.per_sample and "target" in facts]
        if "positions" in facts:  # [samples, explained positions, ...]
            summed = [replace(m, values=m.values.detach().abs().sum(1)) for m in explains]
        else:
            summed = explains
        shares = [] if mask is None else [_outside(m, mask, facts["method"]) for m in summed]
        if known := [share for share in shares if share is not None]:
            entry["outside"] = max(known)
        if len(explains) == 1:
            compared[name] = facts["target"], explains[0].values.detach().double().cpu().numpy()
        pictures[name] = entry
    pairs = []
    for (a, (target, one)), (b, (other, two)) in combinations(compared.items(), 2):
        found = agreement(one, two) if target == other else None
        if found is not None:
            pairs.append([a, b, found])
    return {"pictures": pictures, "pairs": pairs}


def _outside(drawn: Map, mask: torch.Tensor, method: str) -> float | None:
    return outside(drawn, mask, resized=method == "grad_cam")


def outside(drawn: Map, mask: torch.Tensor, *, resized: bool = False) -> float | None:
    """Return the share of a map's magnitude outside a mask, as a mean over the samples.

    None if the map is 0 or has other dimensions. If it belongs to an embedding, the places come
    before the channels.

    Args:
        drawn: the map.
        mask: as in `checked`.
        resized: whether a mask of another size is averaged over the area of each place.
    """
    values = drawn.values.detach().double().cpu().abs()
    places = 1 if values.dim() == 2 else min(mask.dim(), 2)
    while values.dim() > 1 + places:
        values = values.sum(1 if drawn.node is None else -1)  # channels
    if values.dim() != 1 + places or (mask.dim() > places and len(mask) != len(values)):
        return None
    mask = mask.double().expand(len(values), *mask.shape[-places:])[:, None]
    if mask.shape[2:] != values.shape[1:]:
        if not resized:
            return None
        mask = F.interpolate(mask, values.shape[1:], mode="area")
    total = values.flatten(1).sum(1)
    beyond = (values * (1 - mask[:, 0])).flatten(1).sum(1)
    some = total > 0
    return float((beyond[some] / total[some]).mean()) if bool(some.any()) else None


def agreement(one: Floats, two: Floats) -> float | None:
    """Return the mean rank correlation of two maps' magnitudes over the samples (Spearman).

    Channels are added up if one of the maps has none. None if the maps have other shapes, or no
    sample has two different values in both.
    """
    one, two = np.abs(one), np.abs(two)
    while one.ndim > two.ndim:
        one = one.sum(1)
    while two.ndim > one.ndim:
        two = two.sum(1)
    if one.shape != two.shape:
        return None
    found = []
    for x, y in zip(one, two, strict=True):
        ranks = np.stack([_ranks(x.ravel()), _ranks(y.ravel())])
        ranks -= ranks.mean(1, keepdims=True)
        spread = float(np.sqrt((ranks**2).sum(1).prod()))
        if spread > 0:
            found.append(float(ranks.prod(0).sum()) / spread)
    return float(np.mean(found)) if found else None


def _ranks(values: Floats) -> Floats:
    """Return the rank of each value; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last: NDArray[np.int64] = np.cumsum(counts)
    ranks: Floats = last[place] - (counts[place] - 1) / 2
    return ranks


def declared_mask(mask: str | Sequence[Any] | None) -> torch.Tensor | None:
    """Return the mask that a probe declares: numbers, or a .npy file.

    Raises:
        ProbeError: it cannot be read, or is not a mask.
    """
    if mask is None:
        return None
    try:
        found = np.load(Path(mask), allow_pickle=False) if isinstance(mask, str) else mask
        values = np.asarray(found, np.float64)
    except (OSError, ValueError, TypeError) as error:
        raise ProbeError(f"mask: cannot be read as a regular array of numbers: {error}") from None
    if not 1 <= values.ndim <= 3 or not ((values == 0) | (values == 1)).all():
        raise ProbeError(
            f"mask: must contain only 0 and 1, with 1 to 3 dimensions, got {list(values.shape)}"
        )
    return torch.from_numpy(values)
