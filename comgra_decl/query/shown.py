"""What the program has shown with `comgra.image`, `comgra.figure` and `comgra.text`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError, UnknownNameError, did_you_mean, shown
from comgra_decl.records import SHOWN, SlotInfo

if TYPE_CHECKING:
    from .snapshot import Snapshot


def shown_table(snapshot: Snapshot) -> pd.DataFrame:
    """Return what the program has shown, in the order of the steps; see `Run.shown`."""
    rows = sorted((step, i, slot.key) for i, (step, _, slot) in enumerate(_each(snapshot)))
    return pd.DataFrame(
        [(step, key.node, key.role) for step, _, key in rows], columns=["step", "name", "kind"]
    )


def shown_value(snapshot: Snapshot, name: str, step: int | None) -> NDArray[np.uint8] | str:
    """Return an image or a text; see `Run.shown_value`."""
    found = [each for each in _each(snapshot) if each[2].key.node == name]
    if not found:
        known = list(dict.fromkeys(slot.key.node for _, _, slot in _each(snapshot)))
        names = ", ".join(map(repr, known)) or "nothing"
        raise UnknownNameError(
            f"the program has shown nothing called {shown(name)}{did_you_mean(name, known) or '.'} "
            f"It has shown {names}."
        )
    at = [each for each in found if step in (None, each[0])]
    if not at:
        steps = ", ".join(map(str, sorted({each[0] for each in found})))
        raise UnknownNameError(f"{name!r} was not shown at step {shown(step)}, only at {steps}.")
    number, record, slot = max(at, key=lambda each: each[:2])
    value = snapshot.view.value(record, slot.id, 0)
    if value is None:
        raise DamagedRunError(f"{name!r} is missing from step {number}")
    if slot.key.role != "text":
        return np.asarray(value)
    return bytes(np.asarray(value)).rstrip(b"\0").decode("utf-8", "replace")


def _each(snapshot: Snapshot) -> Iterator[tuple[int, int, SlotInfo]]:
    """Yield the step, record and slot of everything that the program has shown."""
    if SHOWN not in snapshot.types:
        return
    slots: dict[Any, SlotInfo] = {
        slot.id: slot for slot in snapshot.view.slots if slot.key.pass_ == SHOWN
    }
    for record in snapshot.records(SHOWN).tolist():
        for number in snapshot.view.value_slots(record):
            if number in slots:
                yield int(snapshot.steps[record]), record, slots[number]
