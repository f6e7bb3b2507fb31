"""Statistics that are not stored, but computed from stored statistics when a run is read.

    update_ratio  l2(update) / l2(parameter), the parameter as used in the forward pass of the step

A ratio of about 1e-3 is usual. Much smaller ratios mean that the model hardly learns; much larger
ones mean that training is unstable. The ratio is available for each update to a parameter, and for
the parameter itself (pass `forward`), where it is that of the step's first update. If a parameter
contains only zeros, the ratio is inf if the parameter was changed, and NaN otherwise. Requires the
`l2` statistic, and `parameter` and `update` among the captures.
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
    """Slot ids of a parameter's update and of the parameter."""

    update: int
    parameter: int


def pairs(slots: list[SlotInfo]) -> dict[int, Pair]:
    """Return the pair of slots that defines each slot's update ratio, for slots that have one."""
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
    """Return the derived statistics that are available for at least one slot of the run."""
    if _BASE not in snapshot.view.meta.statistics or not snapshot.update_pairs:
        return []
    return list(NAMES)


def base(snapshot: Snapshot) -> int:
    """Return the index of the stored statistic from which the derived ones are computed.

    Raises:
        UnknownNameError: the run lacks a required statistic or capture.
    """
    if not offered(snapshot):
        raise UnknownNameError(
            f"this run has no {UPDATE_RATIO!r}: it requires the {_BASE!r} statistic and the "
            "captures 'parameter' and 'update'"
        )
    return snapshot.statistic(_BASE)


def ratio(
    update: NDArray[np.float32], parameter: NDArray[np.float32], over_batch: str
) -> NDArray[np.float32]:
    """Return update / parameter, or 0 for the std, because there is a single value per batch."""
    with np.errstate(all="ignore"):
        quotient = np.divide(update, parameter, dtype=np.float32)
    if over_batch == "std":
        return np.where(np.isnan(quotient), np.float32(np.nan), np.float32(0.0))
    return quotient
