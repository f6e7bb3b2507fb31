"""Pictures of token inputs as tables: one number for each token, or for each span of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError, did_you_mean, shown

if TYPE_CHECKING:
    from .picture import Picture

REDUCTIONS = ("sum", "l2", "abs")
"""How the numbers of a token's embedding become one: their sum, Euclidean norm, or the sum of their
magnitudes."""

EXPLAINED = "explained"
"""The axis of the positions that a picture explains, if there are several."""

Spans = Mapping[str, tuple[int, int]]
"""Names of spans, and their first and last position plus 1, as in a slice."""


def by_token(values: NDArray[np.floating], by: str) -> NDArray[np.float64]:
    """Return [..., positions] for a picture of shape [..., positions, width].

    Raises:
        UnknownNameError: there is no such reduction.
    """
    wide = np.asarray(values, np.float64)
    if by == "sum":
        return np.asarray(wide.sum(-1))
    if by == "l2":
        return np.asarray(np.sqrt((wide**2).sum(-1)))
    if by == "abs":
        return np.asarray(np.abs(wide).sum(-1))
    raise UnknownNameError(
        f"by={shown(by)} is not one of {', '.join(REDUCTIONS)}{did_you_mean(by, REDUCTIONS)}."
    )


def attribution_table(
    picture: Picture,
    tokens: NDArray[np.integer] | None,
    words: Sequence[str],
    *,
    by: str,
    spans: Spans | None,
) -> pd.DataFrame:
    """Return the table of a picture; see `Run.token_attributions`."""
    values = np.asarray(picture.values, np.float64)
    if EXPLAINED in picture.labels:
        return _by_explained(picture, tokens, words, by=by, spans=spans)
    of_tokens = tokens is not None or picture.axes[1:2] == ("position",)
    if not of_tokens or values.ndim not in (2, 3):
        raise UnknownNameError(
            f"the picture {picture.name!r} has the axes {', '.join(picture.axes)}, and no number "
            "for each token."
        )
    summed = by_token(values if values.ndim == 3 else values[..., None], by)
    values = summed if values.ndim == 3 else values
    samples, size = values.shape
    if spans is not None:
        return _by_span(picture, values, spans)
    index = pd.MultiIndex.from_product([range(samples), range(size)], names=["sample", "position"])
    found = pd.DataFrame({"value": values.ravel()}, index=index)
    if tokens is not None:
        ids = [int(token) for token in tokens[:samples].ravel()]
        named = [words[i] if 0 <= i < len(words) and words[i] else i for i in ids]
        found.insert(0, "token", pd.Series(named, index=index, dtype=object))
    return found


def _by_explained(
    picture: Picture,
    tokens: NDArray[np.integer] | None,
    words: Sequence[str],
    *,
    by: str,
    spans: Spans | None,
) -> pd.DataFrame:
    """Return the tables of all explained positions as one, by sample and explained position."""
    axes = tuple(axis for axis in picture.axes if axis != EXPLAINED)
    tables = {
        position: attribution_table(
            replace(picture, values=picture.values[:, i], axes=axes, labels={}),
            tokens,
            words,
            by=by,
            spans=spans,
        )
        for i, position in enumerate(picture.labels[EXPLAINED])
    }
    whole = pd.concat(tables, names=[EXPLAINED])
    order = [*tables[picture.labels[EXPLAINED][0]].index.names]
    ordered: pd.DataFrame = whole.reorder_levels([order[0], EXPLAINED, *order[1:]])
    return ordered.sort_index()


def _by_span(picture: Picture, values: NDArray[np.float64], spans: Spans) -> pd.DataFrame:
    """Return the sum of each span, with the samples as rows."""
    size = values.shape[1]
    for name, (start, stop) in spans.items():
        if not 0 <= start < stop <= size:
            raise UnknownNameError(
                f"the span {name!r}, {start} to {stop}, does not lie in the {size} positions of "
                f"{picture.name!r}."
            )
    sums = {name: values[:, start:stop].sum(1) for name, (start, stop) in spans.items()}
    return pd.DataFrame(sums, index=pd.RangeIndex(len(values), name="sample"))
