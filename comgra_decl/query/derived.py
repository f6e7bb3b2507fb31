"""Statistics made of stored ones when a run is read; nothing is stored twice.

    update_ratio  l2(update) / l2(parameter), the parameter as the step's forward pass used it

About 1e-3 is usual; far less learns nothing, far more is unstable. It belongs to the parameter
(pass `forward`, where it is that of the step's first update) and to each of its updates. A
parameter of zeros that was changed has inf, one that was not NaN. It takes the statistic `l2`, and
`parameter` and `update` among what is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError

if TYPE_CHECKING:
    from comgra_decl.records import SlotInfo

    from .snapshot import Snapshot

UPDATE_RATIO = "update_ratio"
NAMES = (UPDATE_RATIO,)

_BASE = "l2"


class Pair(NamedTuple):
    """The slots of a parameter's update and of the parameter."""

    update: int
    parameter: int


def pairs(slots: list[SlotInfo]) -> dict[int, Pair]:
    """Returns what the update ratio of each slot is made of, for those that have one."""
    parameters = {
        (s.key.node, s.key.role): s.id
        for s in slots
        if s.kind == "parameter" and s.key.pass_ == "forward"
    }
    found: dict[int, Pair] = {}
    for slot in slots:
        parameter = parameters.get((slot.key.node, slot.key.role))
        if parameter is not None and slot.key.pass_.partition(":")[0] == "update":
            found[slot.id] = Pair(slot.id, parameter)
            if slot.key.pass_ == "update" and slot.key.iteration == 0:
                found[parameter] = found[slot.id]
    return found


def offered(snapshot: Snapshot) -> list[str]:
    """Returns the derived statistics that something in the run has."""
    if _BASE not in snapshot.view.meta.statistics or not snapshot.update_pairs:
        return []
    return list(NAMES)


def base(snapshot: Snapshot) -> int:
    """Returns the rank of the stored statistic that the derived ones are made of.

    Raises:
        UnknownNameError: the run does not have what it takes.
    """
    if not offered(snapshot):
        raise UnknownNameError(
            f"this run has no {UPDATE_RATIO!r}: it takes the statistic {_BASE!r}, and 'parameter' "
            "and 'update' among what is captured"
        )
    return snapshot.statistic(_BASE)


def ratio(
    update: NDArray[np.float32], parameter: NDArray[np.float32], over_batch: str
) -> NDArray[np.float32]:
    """Returns update / parameter; its deviation over a batch, which there is none of, is 0."""
    with np.errstate(all="ignore"):
        quotient = np.divide(update, parameter, dtype=np.float32)
    if over_batch == "std":
        return np.where(np.isnan(quotient), np.float32(np.nan), np.float32(0.0))
    return quotient
