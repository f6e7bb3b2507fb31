"""Detects whether the program has passed the place where it ends its steps.

A loop logs many values of a step after `optimizer.step()`. By the step count, the next step has
then started, but the values still belong to the previous one. The position in the code resolves
this: values logged after the end of a step in the code of the same loop belong to the step that
ended there.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

_DEPTH = 40  # calls between the loop and the end of a step


class LoopPosition:
    """Stores where the last step ended: the current instruction of each running function."""

    def __init__(self) -> None:
        self._places: dict[CodeType, int] = {}

    def note(self) -> None:
        """Stores the position of the current call, which ends a step; frames are not kept."""
        frame: FrameType | None = sys._getframe(1)
        self._places = {}
        while frame is not None and len(self._places) < _DEPTH:
            self._places.setdefault(frame.f_code, frame.f_lasti)
            frame = frame.f_back

    def passed(self) -> bool:
        """Whether the caller is at a later place in the code than the end of the last step."""
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_DEPTH):
            if frame is None:
                break
            place = self._places.get(frame.f_code)
            if place is not None and place != frame.f_lasti:
                return frame.f_lasti > place
            frame = frame.f_back
        return False
