"""A run as an `xarray.Dataset`, for those who have xarray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from comgra_decl.errors import (
    MissingPackageError,
    UnknownNameError,
    did_you_mean,
    is_one_of,
    shown,
)

from . import arrays
from .snapshot import Snapshot

if TYPE_CHECKING:
    import xarray


def dataset(
    snapshot: Snapshot, names: Sequence[str], of: str | None, over_batch: str, type_: str | None
) -> xarray.Dataset:
    """Returns statistics [step, slot] of all slots, or of those of a pass."""
    try:
        import xarray
    except ImportError as error:
        raise MissingPackageError(
            "this needs the package 'xarray', which is not installed: "
            "pip install 'comgra-decl[xarray]'"
        ) from error
    passes = list(dict.fromkeys(slot.key.pass_ for slot in snapshot.view.slots))
    if of is not None and not is_one_of(of, passes):
        hint = did_you_mean(of, passes) or "."
        raise UnknownNameError(f"{shown(of)} is not a pass of this run{hint} It has {passes}.")
    slots = [slot for slot in snapshot.view.slots if of in (None, slot.key.pass_)]
    ids = np.array([slot.id for slot in slots], np.int64)
    records = snapshot.records(type_)
    coords: dict[str, Any] = {"step": snapshot.steps[records]}
    for name, field in (("node", "node"), ("role", "role"), ("pass", "pass_")):
        coords[name] = ("slot", np.array([getattr(slot.key, field) for slot in slots], str))
    coords["iteration"] = ("slot", np.array([slot.key.iteration for slot in slots], np.int64))
    tables = {name: arrays.table(snapshot, name, over_batch)[records][:, ids] for name in names}
    data = {name: (("step", "slot"), table) for name, table in tables.items()}
    return xarray.Dataset(data, coords, attrs={"over_batch": over_batch})
