"""The norms of language models, recomputed from their weights and checked with their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Norm = Callable[[NDArray[np.floating]], Floats]
"""Normalises the last dim of a tensor."""

_EPS = (1e-5, 1e-6, 1e-8, 1e-12, float(np.finfo(np.float32).eps), 0.0)
"""Values of eps that are tried if the module's own is unknown."""

_CLOSE = {"bfloat16": 1e-2, "float16": 2e-3}
"""Largest deviation from the recorded output, relative to its largest magnitude, by its dtype; for
others, 1e-3. An output in bfloat16 is rounded by up to 4e-3; in float32, 1e-6 is usual."""


def fitted(
    given: NDArray[np.floating],
    returned: NDArray[np.floating],
    *,
    weight: NDArray[np.floating] | None,
    bias: NDArray[np.floating] | None,
    eps: Sequence[float] = (),
) -> Norm | None:
    """Return the norm that makes one recorded tensor of another; None if there is none.

    Tries layer norm (Ba et al. 2016), RMS norm (Zhang and Sennrich 2019), and the latter with a
    weight that counts from 1, as in Gemma. The last dim is normalised.

    Args:
        given: the input of the norm, [..., features].
        returned: its output, of the same shape.
        weight: [features]; None if it has none.
        bias: the same.
        eps: its eps, if it is known.
    """
    scale = float(np.abs(returned).max(initial=0.0))
    size = given.shape[-1]
    own = np.ones(size) if weight is None else weight.astype(np.float64)
    offset = np.zeros(size) if bias is None else bias.astype(np.float64)
    if own.shape != (size,) or offset.shape != (size,) or not scale:
        return None

    def norm(centred: bool, factor: Floats, small: float) -> Norm:
        def apply(values: NDArray[np.floating]) -> Floats:
            wide = values.astype(np.float64)
            wide = wide - wide.mean(-1, keepdims=True) if centred else wide
            spread = np.sqrt((wide**2).mean(-1, keepdims=True) + small)
            found: Floats = wide / spread * factor + offset
            return found

        return apply

    tried = [
        norm(centred, factor, small)
        for centred, factor in ((True, own), (False, own), (False, 1 + own))
        for small in eps or _EPS
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = [np.abs(each(given) - returned).max() / scale for each in tried]
    best = int(np.argmin(np.where(np.isfinite(apart), apart, np.inf)))
    return tried[best] if apart[best] <= _close(returned) else None


def follows(given: NDArray[np.floating], returned: NDArray[np.floating]) -> bool:
    """Return whether a computed tensor is the recorded one, up to rounding."""
    if given.shape != returned.shape:
        return False
    scale = float(np.abs(returned).max(initial=0.0))
    return bool(np.abs(given - returned).max(initial=0.0) <= _close(returned) * scale)


def _close(returned: NDArray[np.floating]) -> float:
    return _CLOSE.get(returned.dtype.name, 1e-3)
