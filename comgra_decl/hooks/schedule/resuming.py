"""With which step a resumed training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Resumption:
    """Finds the number of the first step of a training that goes on from a checkpoint.

    What the spec says counts; else the optimizer's own count of its steps, which Adam and its kin
    keep and a checkpoint brings back; else it is the step after the last one that was recorded.

    Args:
        declared: the spec's `run.resume_step`.
        last: the last step that the run knows of; None if it has none.
    """

    def __init__(self, declared: int | None, last: int | None) -> None:
        self._declared = declared
        self.expected = declared if declared is not None else 0 if last is None else last + 1
        self._last = last
        self._counted: int | None = None

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has made its first step since the training goes on."""
        if self._declared is None:
            self._counted = steps_taken(optimizer)

    def settle(self) -> tuple[int, str]:
        """Returns the number of the first step, now that it ends, and what to note of it."""
        if self._declared is not None:
            return self._declared, self._noted(self._declared, "as run.resume_step says")
        counted = self._counted
        # a first step after others: the checkpoint did not bring the optimizer's state back
        if counted is not None and (counted > 1 or self._last is None):
            step = max(0, counted - 1)
            return step, self._noted(step, "by the optimizer's own count")
        why = "after the last step recorded, since nothing says which it is (run.resume_step does)"
        return self.expected, self._noted(self.expected, why)

    def _noted(self, step: int, why: str) -> str:
        text = f"the training goes on with step {step}, {why}"
        if self._last is not None and step <= self._last:
            text += f"; steps {step} to {self._last} of before give way to the new ones"
        return text


def steps_taken(optimizer: Optimizer) -> int | None:
    """Returns how many steps an optimizer has counted; None if it does not count."""
    counts = [_number(state.get("step")) for state in optimizer.state.values()]
    return max((count for count in counts if count is not None), default=None)


def _number(count: Any) -> int | None:
    if isinstance(count, torch.Tensor):
        local: Any = count.to_local() if hasattr(count, "to_local") else count
        return int(local.item()) if local.numel() == 1 else None
    return int(count) if isinstance(count, (int, float)) else None
