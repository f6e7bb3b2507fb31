"""Determine the step at which a resumed run continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Resumption:
    """Finds the number of the first step after training is resumed from a checkpoint.

    If the spec sets the number, that setting is used. Otherwise, the number is the optimizer's own
    step count, which Adam and similar optimizers store in a checkpoint. If there is no such count,
    training continues with the step after the last recorded one.

    Args:
        declared: the spec's `run.resume_step`.
        last: the last step in the run; None if there is none.
    """

    def __init__(self, declared: int | None, last: int | None) -> None:
        self._declared = declared
        self.expected = declared if declared is not None else 0 if last is None else last + 1
        self._last = last
        self._counted: int | None = None

    def stepped(self, optimizer: Optimizer) -> None:
        """Read an optimizer's step count after its first step in the resumed run."""
        if self._declared is None:
            self._counted = steps_taken(optimizer)

    def settle(self) -> tuple[int, str]:
        """Return the number of the first step when that step ends, and a note on its origin."""
        if self._declared is not None:
            return self._declared, self._noted(self._declared, "as set by run.resume_step")
        counted = self._counted
        # a count of 1 after earlier steps: the checkpoint did not restore the optimizer's state
        if counted is not None and (counted > 1 or self._last is None):
            step = max(0, counted - 1)
            return step, self._noted(step, "by the optimizer's own step count")
        why = "after the last recorded step (the actual one is unknown; set run.resume_step)"
        return self.expected, self._noted(self.expected, why)

    def _noted(self, step: int, why: str) -> str:
        text = f"training resumes at step {step}, {why}"
        if self._last is not None and step <= self._last:
            text += f"; it replaces the earlier records of steps {step} to {self._last}"
        return text


def steps_taken(optimizer: Optimizer) -> int | None:
    """Return the step count of an optimizer; None if it does not count steps."""
    counts = [_number(state.get("step")) for state in optimizer.state.values()]
    return max((count for count in counts if count is not None), default=None)


def _number(count: Any) -> int | None:
    if isinstance(count, torch.Tensor):
        local: Any = count.to_local() if hasattr(count, "to_local") else count
        return int(local.item()) if local.numel() == 1 else None
    return int(count) if isinstance(count, (int, float)) else None
