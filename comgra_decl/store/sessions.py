"""Sessions of a resumed run, and which of its records are superseded.

A session is one of the programs that write a run one after another. Every session but the first has
an entry in `head.sessions` with its writer and the size of the run when it started. The step from
which it resumed is known only after its first training step, and is stored in a note of type
`RESUMED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import RESUMED, Note


@dataclass(frozen=True)
class Session:
    """One program that wrote the run.

    Attributes:
        record: number of its first record.
        scalar: number of its first scalar.
        step: its first step; None while unknown.
        started: start in Unix seconds; None for the first session, which starts with the run.
    """

    record: int
    scalar: int
    step: int | None
    started: float | None


def read_sessions(lines: Sequence[Mapping[str, Any]], notes: Sequence[Note]) -> list[Session]:
    """Return the sessions of a run, given `head.sessions` and the notes."""
    sessions = [Session(0, 0, None, None)]
    for number, line in enumerate(lines):
        first = int(line["note"])
        last = int(lines[number + 1]["note"]) if number + 1 < len(lines) else len(notes)
        marks = [note.step for note in notes[first:last] if note.type == RESUMED]
        step = marks[0] if marks else None
        sessions.append(Session(int(line["record"]), int(line["scalar"]), step, line["time"]))
    return sessions


def superseded(
    steps: NDArray[np.float64],
    trained: NDArray[np.bool_],
    begins: Sequence[tuple[int, int | None]],
) -> NDArray[np.bool_]:
    """Return a mask of superseded lines; lines from the newest session take precedence.

    Args:
        steps: step of each line, in the order in which the lines were written.
        trained: whether each line belongs to a training step. An evaluation before the first
        repeated step remains valid unless it was repeated as well.
        begins: first line and first step of each session.
    """
    gone = np.zeros(len(steps), bool)
    for first, step in begins:
        if step is None:
            continue
        before = np.arange(len(steps)) < first
        again = (~trained & ~before & (steps == step)).any()
        gone |= before & ((steps > step) | ((steps == step) & (trained | again)))
    return gone
