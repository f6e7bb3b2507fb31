"""Evaluation passes: recorded when the program switches to `eval()`, once per phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comgra_decl.hooks.capture import StepCapture
    from comgra_decl.spec import Scheduler


class EvaluationPhases:
    """Follows evaluation phases and decides which model calls of them are recorded.

    A phase begins with `eval()`. Its record holds as many model calls as the last training step
    had (one, for most programs): the first batch.
    """

    def __init__(self, capture: StepCapture, scheduler: Scheduler) -> None:
        self.capture = capture
        self.step = -1  # optimizer steps completed when the phase began
        self._scheduler = scheduler
        self._phase = -1
        self._limit = 1
        self._pending = False

    @property
    def open(self) -> bool:
        """Whether a phase is waiting for, or in the middle of, its recorded calls."""
        return self._pending or self.capture.open

    @property
    def complete(self) -> bool:
        """Whether the recorded calls of this phase have all returned."""
        return self.capture.open and self.capture.root_calls >= self._limit

    def begin(self, step: int, training_calls: int) -> bool:
        """Notes an `eval()` call; returns whether its phase is to be recorded.

        `eval()` called again before any training step (per submodule, per split) belongs to the
        same phase.
        """
        if step == self.step:
            return self.open
        self.step = step
        self._phase += 1
        self._limit = max(1, training_calls)
        self._pending = self._scheduler.eval_due(self._phase)
        return self._pending

    def enter(self, step: int) -> StepCapture | None:
        """Returns the capture for a model call of this phase, or None when it has enough."""
        if self._phase < 0:  # `eval()` was called before we attached
            self.begin(step, 1)
        if self._pending:
            self._pending = False
            self.capture.begin()
        if not self.capture.open or self.capture.root_calls >= self._limit:
            return None
        self.capture.root_calls += 1
        return self.capture

    def close(self) -> None:
        """Ends a phase, recorded or not."""
        self._pending = False
        self.capture.open = False
