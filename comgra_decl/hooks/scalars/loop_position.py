"""Whether the program has passed the place where it ends its steps.

A loop says much about a step after `optimizer.step()`: by the count of steps the next one is then
in progress, though nobody would say that it has begun. The place in the code tells: what is said
further down in the same loop than the step's end is about the step that ended there.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

_DEPTH = 40  # calls between the loop and the end of a step


class LoopPosition:
    """Remembers where the last step ended, as instructions of the functions that were running."""

    def __init__(self) -> None:
        self._places: dict[CodeType, int] = {}

    def note(self) -> None:
        """A step ends in a call that is under way; its frames are looked at, never kept."""
        frame: FrameType | None = sys._getframe(1)
        self._places = {}
        while frame is not None and len(self._places) < _DEPTH:
            self._places.setdefault(frame.f_code, frame.f_lasti)
            frame = frame.f_back

    def passed(self) -> bool:
        """Whether whoever calls is further down than the end of the last step."""
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_DEPTH):
            if frame is None:
                break
            place = self._places.get(frame.f_code)
            if place is not None and place != frame.f_lasti:
                return frame.f_lasti > place
            frame = frame.f_back
        return False
