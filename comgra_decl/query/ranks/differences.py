"""Find tensors that should be identical on all ranks of a run but differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import SlotInfo, SlotKey

from .joining import TOLERANCE

if TYPE_CHECKING:
    import pandas as pd


class Difference(NamedTuple):
    """A tensor that should be identical on all ranks, and the first step at which it is not.

    `size` is the largest relative difference of any of its statistics.
    """

    key: SlotKey
    step: int
    size: float


def differing(
    copies: Sequence[SlotInfo],
    steps: NDArray[np.int64],
    rows: Callable[[int], NDArray[Any]],
    columns: Sequence[str],
) -> list[Difference]:
    """Return the tensors that differ between ranks, checking up to 16 records.

    Args:
        copies: tensors that should be identical; one may occur several times, with other ranks.
        steps: step of each common record.
        rows: returns the statistics [ranks, copies, columns] of a record.
        columns: names of the columns.
    """
    looked = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 16)).astype(np.int64))
    found: dict[SlotKey, Difference] = {}
    for record in looked.tolist():
        step = int(steps[record])
        for at, size in unequal(rows(record), columns):
            key = copies[at].key
            if key not in found or (found[key].step == step and found[key].size < size):
                found[key] = Difference(key, step, size)
    return list(found.values())


def unequal(rows: NDArray[np.float32], columns: Sequence[str]) -> Iterator[tuple[int, float]]:
    """Yield (index, relative difference) of the tensors whose statistics differ between ranks.

    Args:
        rows: [ranks, tensors, columns]; NaN where a rank lacks the record.
        columns: names of the columns.
    """
    at = [i for i, name in enumerate(columns) if name.endswith(".mean")]
    there = ~np.isnan(rows[..., columns.index("nonfinite.mean")])
    values = rows[..., at].astype(np.float64)
    scale = np.nanmax(np.where(np.isfinite(values), np.abs(values), 0.0), (0, 2))
    for place in np.flatnonzero(there.sum(0) > 1).tolist():
        mine = values[there[:, place], place]
        with np.errstate(all="ignore"):
            spread = np.abs(mine - mine[0]) / max(float(scale[place]), np.finfo(np.float32).tiny)
        same = (mine == mine[0]) | (np.isnan(mine) & np.isnan(mine[0]))
        size = float(np.where(same, 0.0, np.nan_to_num(spread, nan=np.inf)).max())
        if size > TOLERANCE:
            yield place, size


def differences_table(differences: Sequence[Difference]) -> pd.DataFrame:
    """Return one row per tensor; see `Run.rank_differences`."""
    import pandas as pd

    keys = [difference.key for difference in differences]
    return pd.DataFrame(
        {
            "node": np.array([key.node for key in keys], object),
            "role": np.array([key.role for key in keys], object),
            "iteration": np.array([key.iteration for key in keys], np.int64),
            "pass": np.array([key.pass_ for key in keys], object),
            "first_step": np.array([d.step for d in differences], np.int64),
            "difference": np.array([d.size for d in differences], np.float64),
        }
    )


def differences_warning(differences: Sequence[Difference]) -> str:
    """Return a warning that lists the tensors that differ."""
    first = min(differences, key=lambda difference: difference.step)
    names = [f"{d.key.node} {d.key.role} ({d.key.pass_})" for d in differences]
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return (
        f"{len(differences)} tensors that should be identical on all ranks differ, first "
        f"at step {first.step}: {shown}; the data from the first rank is shown"
    )
