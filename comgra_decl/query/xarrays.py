"""A run as an `xarray.Dataset`, for those who have xarray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from comgra_decl.errors import MissingPackageError

from . import statistics
from .snapshot import Snapshot

if TYPE_CHECKING:
    import xarray


def dataset(
    snapshot: Snapshot, names: Sequence[str], pass_: str, over_batch: str, type_: str | None
) -> xarray.Dataset:
    """Returns statistics [slot, step] of all slots of a pass."""
    try:
        import xarray
    except ImportError as error:
        raise MissingPackageError(
            "this needs the package 'xarray', which is not installed: "
            "pip install 'comgra-decl[xarray]'"
        ) from error
    tables = {name: statistics.heat(snapshot, name, pass_, over_batch, type_) for name in names}
    first = next(iter(tables.values()))
    slots = [snapshot.view.slots[number] for number in first.index]
    coords: dict[str, Any] = {"slot": first.index.to_numpy(), "step": first.columns.to_numpy()}
    for field in ("node", "role"):
        coords[field] = ("slot", np.array([getattr(slot.key, field) for slot in slots], str))
    coords["iteration"] = ("slot", np.array([slot.key.iteration for slot in slots], np.int64))
    data = {name: (("slot", "step"), table.to_numpy()) for name, table in tables.items()}
    return xarray.Dataset(data, coords, attrs={"pass": pass_, "over_batch": over_batch})
