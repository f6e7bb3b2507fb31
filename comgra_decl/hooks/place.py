"""Where a program is when it fails: the step in progress, and the names of its modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ProgramPlace:
    """Where a program is.

    Attributes:
        step: the number of the step in progress.
        recorded: whether this step is being recorded.
        naming: returns a module's node and the outermost module that contains it; None if the run
            does not know the module.
        models: returns the models that were called.
    """

    step: int
    recorded: bool
    naming: Callable[[nn.Module], tuple[str, nn.Module] | None]
    models: Callable[[], list[nn.Module]]
