"""Detect whether the program has passed the code position at which it ends its steps.

Many training loops log the values of a step after `optimizer.step()`. By then, the next step has
started, but the values belong to the previous one. The position in the code resolves this
ambiguity: values logged below the optimizer step, in the code of the same loop, belong to the step
that ended there.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

_DEPTH = 40  # maximum number of calls between the loop and the end of a step


class LoopPosition:
    """Stores where the last step ended: the current instruction of each running function."""

    def __init__(self) -> None:
        self._places: dict[CodeType, int] = {}

    def note(self) -> None:
        """Store the position of the current call, which ends a step; keeps no frames alive."""
        frame: FrameType | None = sys._getframe(1)
        self._places = {}
        while frame is not None and len(self._places) < _DEPTH:
            self._places.setdefault(frame.f_code, frame.f_lasti)
            frame = frame.f_back

    def passed(self) -> bool:
        """Whether the caller is further down in the code than the end of the last step."""
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_DEPTH):
            if frame is None:
                break
            place = self._places.get(frame.f_code)
            if place is not None and place != frame.f_lasti:
                return frame.f_lasti > place
            frame = frame.f_back
        return False
