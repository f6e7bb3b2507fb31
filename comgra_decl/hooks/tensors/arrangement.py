"""Facts about the order of rows and codes in integer tensors, which statistics do not reveal."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.hooks.tensors.loss_calls import function_name, shape_of
from comgra_decl.stats.support import is_readable

_MOST_READ = 4096  # elements per tensor or column
_MOST_COLUMNS = 32
_LEAST_CODES = 6  # k codes are in the order of appearance by chance with probability 1 / k!
_LEAST_WIDTH = 8
_MOST_IMAGES = 16
_SPECIAL = 4  # codes such as padding and unknown, which may appear anywhere

_CHOOSING = ("Index", "IndexSelect")
_MOST_ROWS = 1 << 22
Integers = NDArray[np.int64]


def codes_in_order(tensor: torch.Tensor) -> list[int]:
    """Return how many codes appear in ascending order of their first use, for each such column.

    Codes that are numbered in the order in which they first appear in this very tensor have that
    property; codes that were assigned to other data do not.

    Args:
        tensor: integers [rows] or [rows, columns], whose numbers can be read.

    Returns:
        One number per column with this property; a single number if the whole tensor, read row by
        row, has it.
    """
    if tensor.dim() not in (1, 2) or tensor.shape[0] in (1, 2):
        return []
    part = tensor[:_MOST_READ] if tensor.dim() == 1 else tensor[:_MOST_READ, :_MOST_COLUMNS]
    values = part.to(torch.int64).cpu().numpy()
    columns = values[:, None] if values.ndim == 1 else values
    found = [count for column in columns.T if (count := _codes(column))]
    if found or len(columns[0]) < _SPECIAL:  # few columns are those of a table, not positions
        return found
    whole = _codes(tensor.reshape(-1)[:_MOST_READ].to(torch.int64).cpu().numpy())
    return [whole] if whole else []


def _codes(values: Integers) -> int:
    """Return the number of codes if they appear in ascending order, else 0.

    They must repeat before all have appeared, unlike those of a range or a cycle, and may not be
    sorted, unlike the number of the graph to which a node belongs.
    """
    codes, first = np.unique(values, return_index=True)
    falls = int((np.diff(values) < 0).sum())
    for special in range(_SPECIAL):
        rest, at = codes[special:], first[special:]
        if len(rest) < _LEAST_CODES or rest[0] > _SPECIAL:
            return 0
        repeats = int(at[-1] - at[0]) - int(len(rest) - 1) >= len(rest) // 2
        ascending = bool((np.diff(at) > 0).all() and (np.diff(rest) == 1).all())
        if ascending and repeats and falls >= len(rest) // 2:
            return len(rest)
    return 0


def paired_ends(tokens: torch.Tensor, target: torch.Tensor) -> dict[str, Any] | None:
    """Compare the ends of the rows of a padded input with those of its target.

    Args:
        tokens: integers [batch, positions].
        target: integers of the same shape.

    Returns:
        The number of "rows", of those whose target goes on beyond the end of the input ("beyond"),
        and whether the targets would fit in another order of the rows ("fits"): the lengths are the
        same, or the inputs are sorted by length and the targets could be. None if the input is not
        padded.
    """
    ends = _ends(tokens)
    own = _ends(target)
    if ends is None or own is None or len(np.unique(ends)) < 3:
        return None
    lengths, lengths_of_targets = np.sort(ends), np.sort(own)
    is_sorted = bool((np.diff(ends) <= 0).all() or (np.diff(ends) >= 0).all())
    could_be = is_sorted and bool((lengths_of_targets <= lengths).all())
    return {
        "rows": len(ends),
        "beyond": int((own > ends).sum()),
        "fits": could_be or bool((lengths_of_targets == lengths).all()),
    }


def other_rows(prediction: torch.Tensor, target: torch.Tensor) -> int | None:
    """Return how many rows of a prediction are compared with the target of another row.

    Both are parts of tensors with as many rows: the prediction consists of rows chosen by an index,
    `logits[train]`, and the target is a slice, `labels[:100]`.

    Returns:
        The number of such rows. None if this cannot be known, because the rows of one of them were
        chosen otherwise.
    """
    node, base = gradient_function(prediction), target._base
    if node is None or base is None or not len(target) or function_name(node) not in _CHOOSING:
        return None
    saved = getattr(node, "_raw_saved_indices", None) or (getattr(node, "_raw_saved_index", None),)
    chosen = None if len(saved) != 1 or saved[0] is None else saved[0].data
    before = shape_of(node.next_functions[0][0])
    if not isinstance(chosen, torch.Tensor) or not before or len(base) != before[0]:
        return None
    plain = base.is_contiguous() and target.shape[1:] == base.shape[1:]
    if not plain or chosen.numel() > _MOST_ROWS or not is_readable(chosen) or not base[0].numel():
        return None
    step = base.stride(0) or 1
    first, by = target.storage_offset() - base.storage_offset(), target.stride(0)
    if first % step or by % step:
        return None
    rows = chosen.nonzero()[:, 0] if chosen.dtype is torch.bool else chosen
    if rows.dim() != 1 or len(rows) != len(target):
        return None
    of_target = torch.arange(len(target), device=rows.device) * (by // step) + first // step
    return int((rows != of_target).sum())


def interleaving(images: torch.Tensor) -> float | None:
    """Return how much more similar elements are at a distance of one per channel than neighbours.

    An image [height, width, channels] that is viewed as [channels, height, width] has its colours
    side by side, so that the elements of one colour are `channels` elements apart.

    Args:
        images: floating-point numbers [batch, channels, height, width].

    Returns:
        The mean squared difference at the distance of the channels, divided by that of neighbours
        along the width; None if the images are too small, or do not vary.
    """
    if images.dim() != 4 or images.shape[1] not in (3, 4) or images.shape[-1] < _LEAST_WIDTH:
        return None
    part = images[:_MOST_IMAGES].detach().to(torch.float32)
    near, far = (
        float((part[..., apart:] - part[..., :-apart]).square().mean())
        for apart in (1, images.shape[1])
    )
    return far / near if near > 0 else None


def _ends(tensor: torch.Tensor) -> Integers | None:
    """Return the length of each row without the padding at its end; None if nothing is padded."""
    last = tensor[:, -1]
    padding = last.mode().values
    kept = (tensor != padding).to(torch.int64)
    lengths = (kept * torch.arange(1, tensor.shape[1] + 1, device=kept.device)).amax(1)
    found = lengths.cpu().numpy()
    return found if (found < tensor.shape[1]).any() else None
