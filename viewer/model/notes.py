"""Notes logged by the program, by step."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from comgra_decl.viewer.model.runview import RunView

MOST = 1000
"""Maximum number of notes to show; the newest notes are shown."""


@dataclass(frozen=True, slots=True)
class Note:
    """A note: the step at which it was logged, the time of day, and its text."""

    step: int
    time: str
    text: str


def notes(view: RunView) -> tuple[Note, ...]:
    """Return the newest notes, oldest first."""
    return view.now("notes", lambda: _notes(view))


def _notes(view: RunView) -> tuple[Note, ...]:
    table = view.run.notes().tail(MOST)
    lines = zip(table["step"], table["time"], table["text"], strict=True)
    return tuple(Note(int(step), _time(float(time)), str(text)) for step, time, text in lines)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
