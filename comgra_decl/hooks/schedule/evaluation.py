"""Evaluation passes: recorded when the program switches a model to evaluation, once per phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from comgra_decl.hooks.schedule.countdown import Countdown

if TYPE_CHECKING:
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.spec.schedule import EvalSpec

_MAX_CALLS = 2000
"""Model calls kept of a phase that is recorded whole; memory stays bounded."""


class EvaluationPhases:
    """Follows evaluation phases and decides which model calls of them are recorded.

    A phase begins with `eval()` or `train(False)`. Unless the spec says otherwise its record holds
    as many model calls as the last training step had (one, for most programs): the first batch.
    """

    def __init__(
        self,
        capture: StepCapture,
        spec: EvalSpec | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        factor: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.capture = capture
        self.tags: dict[str, None] = {}  # what the program called the phase in progress
        self.step = -1  # optimizer steps completed when the phase began
        self.recorded = -1  # likewise, of the last phase that has a record
        self._clock = clock
        self._phase = -1
        self._limit = 1
        self._pending = False
        self.follow(spec, factor=factor)

    def follow(self, spec: EvalSpec | None, *, factor: Callable[[], float]) -> None:
        """Goes by `spec` from the next phase on; None: no phase is recorded."""
        self._spec = spec
        self._factor = factor
        self._countdown: Countdown | None = None
        if spec is not None:
            self._countdown = Countdown(spec, clock=self._clock, factor=self._factor)
        if self._countdown is not None and self._phase >= 0:
            self._countdown.recorded(self._phase)

    @property
    def open(self) -> bool:
        """Whether a phase is waiting for, or in the middle of, its recorded calls."""
        return self._pending or self.capture.open

    @property
    def complete(self) -> bool:
        """Whether the recorded calls of this phase have all returned."""
        return self.capture.open and self.capture.root_calls >= self._limit

    def begin(self, step: int, training_calls: int) -> bool:
        """Notes that a model was switched; returns whether its phase is to be recorded.

        Switched again before any training step (per submodule, per split), it is the same phase.
        """
        if step == self.step:
            return self.open
        self.step = step
        self.tags.clear()
        self._phase += 1
        self._limit = self.calls(max(1, training_calls))
        self._pending = self._countdown is not None and self._countdown.due(self._phase)
        return self._pending

    def calls(self, training_calls: int) -> int:
        """Returns how many model calls of a phase are recorded, by those of a training step."""
        batches = None if self._spec is None else self._spec.batches
        return _MAX_CALLS if batches == "all" else batches or training_calls

    def enter(self, step: int, *, counts: bool = True) -> StepCapture | None:
        """Returns the capture for a model call of this phase, or None when it has enough.

        Args:
            step: optimizer steps completed.
            counts: whether it is the call of a model; not, if it is that of a loss.
        """
        if self._phase < 0:  # the model was switched before we attached
            self.begin(step, 1)
        if self.start() is None or self.capture.root_calls >= self._limit:
            return None
        self.capture.root_calls += counts
        return self.capture

    def forget(self) -> None:
        """What was taken for a phase is none."""
        self.capture.drop()
        self.close()
        if self.step < 0:
            return
        self._phase -= 1
        self.step = -1
        if self._spec is not None and self._phase < 0:
            self._countdown = Countdown(self._spec, clock=self._clock, factor=self._factor)

    def start(self) -> StepCapture | None:
        """Opens the record of this phase if it is due; returns it while it is open."""
        if self._pending:
            self.taken()
            self.capture.begin()
        return self.capture if self.capture.open else None

    def taken(self) -> None:
        """There is a record of this phase."""
        self._pending = False
        self.recorded = self.step
        if self._countdown is not None:
            self._countdown.recorded(self._phase)

    def close(self) -> None:
        """Ends a phase, recorded or not."""
        self._pending = False
        self.capture.open = False
