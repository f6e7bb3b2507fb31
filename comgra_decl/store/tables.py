"""The append-only JSON tables of a run, as far as they have been read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import Note, SlotInfo

from .layout import LOGS, SYSTEM_COLUMNS, ArrayForm
from .logs import read_slot
from .plausible import check_form, check_shape, check_slot

WRONG = (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError)
"""Exceptions raised for malformed JSON."""


@dataclass
class Tables:
    """The logs read so far, and the numeric facts of all records [n, SYSTEM_COLUMNS]."""

    slots: list[SlotInfo] = field(default_factory=list)
    names: dict[str, list[str]] = field(default_factory=dict)
    forms: dict[str, ArrayForm] = field(default_factory=dict)
    lanes: dict[str, dict[int, int]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    records: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, SYSTEM_COLUMNS)))
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOGS, 0))
    damage: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    intact: set[tuple[str, int]] = field(default_factory=set)
    """Keys of intact documents, with revisions; shared by all snapshots."""

    def snapshot(self) -> Tables:
        """Return a copy that later rows do not affect."""
        return replace(
            self,
            slots=list(self.slots),
            names={table: list(rows) for table, rows in self.names.items()},
            forms=dict(self.forms),
            lanes={name: dict(lanes) for name, lanes in self.lanes.items()},
            notes=list(self.notes),
            damage=list(self.damage),
            shapes=list(self.shapes),
        )

    def take(self, log: str, number: int, row: Any) -> None:
        """Add a row of a log; raise one of `WRONG` if it is malformed."""
        if log == "slots":
            self.slots.append(check_slot(read_slot(number, row)))
        elif log == "names":
            self.names.setdefault(str(row[0]), []).append(str(row[1]))
            if row[0] == "shape":
                self.shapes.append(check_shape(tuple(map(int, filter(None, row[1].split("x"))))))
        elif log == "arrays":
            form = check_form(ArrayForm.from_json(row))
            self.forms[form.name] = form
        elif log == "notes":
            self.notes.append(Note(int(row[0]), str(row[1]), float(row[2]), str(row[3])))
        else:
            lanes = self.lanes.setdefault(str(row[0]), {})
            lanes[int(row[1])] = len(lanes)
