"""Evaluation phases, which begin when the program switches a model to evaluation mode."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from comgra_decl.hooks.schedule.countdown import Countdown

if TYPE_CHECKING:
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.spec.schedule import EvalSpec

_MAX_CALLS = 2000
"""Limit on the recorded model calls in a phase with `batches: all`, to bound memory use."""


class EvaluationPhases:
    """Tracks evaluation phases and decides which of their model calls are recorded.

    A phase begins with `eval()` or `train(False)`. By default, its record contains as many model
    calls as the last training step made. For most programs, that is one call: the first batch.
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
        self.tags: dict[str, None] = {}  # labels that the program gave to the current phase
        self.step = -1  # optimizer steps completed when the phase began
        self.recorded = -1  # `step` of the last phase with a record
        self._clock = clock
        self._phase = -1
        self._limit = 1
        self._pending = False
        self.follow(spec, factor=factor)

    def follow(self, spec: EvalSpec | None, *, factor: Callable[[], float]) -> None:
        """Apply `spec` from the next phase on; with None, no phase is recorded."""
        self._spec = spec
        self._factor = factor
        self._countdown: Countdown | None = None
        if spec is not None:
            self._countdown = Countdown(spec, clock=self._clock, factor=self._factor)
        if self._countdown is not None and self._phase >= 0:
            self._countdown.recorded(self._phase)

    @property
    def open(self) -> bool:
        """Whether the recorded calls in a phase are still expected or in progress."""
        return self._pending or self.capture.open

    @property
    def complete(self) -> bool:
        """Whether all recorded calls in this phase have returned."""
        return self.capture.open and self.capture.root_calls >= self._limit

    def begin(self, step: int, training_calls: int) -> bool:
        """Begin a phase when a model is switched; return whether the phase is to be recorded.

        Further switches before the next training step (per submodule, per split) belong to the same
        phase.
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
        """Return how many model calls to record in a phase, given the number in a step."""
        batches = None if self._spec is None else self._spec.batches
        return _MAX_CALLS if batches == "all" else batches or training_calls

    def enter(self, step: int, *, counts: bool = True) -> StepCapture | None:
        """Return the capture for a model call of this phase, or None if enough are recorded.

        Args:
            step: optimizer steps completed.
            counts: whether a model is called, rather than a loss.
        """
        if self._phase < 0:  # the model was switched before tracing was attached
            self.begin(step, 1)
        if self.start() is None or self.capture.root_calls >= self._limit:
            return None
        self.capture.root_calls += counts
        return self.capture

    def forget(self) -> None:
        """Discard the current phase, which turned out not to be an evaluation."""
        self.capture.drop()
        self.close()
        if self.step < 0:
            return
        self._phase -= 1
        self.step = -1
        if self._spec is not None and self._phase < 0:
            self._countdown = Countdown(self._spec, clock=self._clock, factor=self._factor)

    def start(self) -> StepCapture | None:
        """Open the record of this phase if it is due; return it while it is open."""
        if self._pending:
            self.taken()
            self.capture.begin()
        return self.capture if self.capture.open else None

    def taken(self) -> None:
        """Mark this phase as recorded."""
        self._pending = False
        self.recorded = self.step
        if self._countdown is not None:
            self._countdown.recorded(self._phase)

    def close(self) -> None:
        """End a phase, recorded or not."""
        self._pending = False
        self.capture.open = False
