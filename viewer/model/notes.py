"""What the program said about its own training, by step."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from comgra_decl.viewer.model.runview import RunView

MOST = 1000
"""Notes shown; of more, the newest."""


@dataclass(frozen=True, slots=True)
class Note:
    """One note: the step during which it was written, the time of day, and its text."""

    step: int
    time: str
    text: str


def notes(view: RunView) -> tuple[Note, ...]:
    """Returns the newest notes, in the order in which they were written."""
    return view.now("notes", lambda: _notes(view))


def _notes(view: RunView) -> tuple[Note, ...]:
    table = view.run.notes().tail(MOST)
    lines = zip(table["step"], table["time"], table["text"], strict=True)
    return tuple(Note(int(step), _time(float(time)), str(text)) for step, time, text in lines)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
