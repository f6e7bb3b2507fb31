"""Detect steps that never end, in which parameters change but no optimizer hook runs.

No hooks run in a compiled optimizer step or in a manual update. Both change parameters in place,
and torch counts in-place changes to every tensor, so a thread that reads these counters
periodically can detect them at no cost to training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

import torch
from torch.optim import optimizer as _torch_optimizer

from comgra_decl.hooks.other_threads import running

_LOOKED_AT = 64
"""Number of parameters whose changes are counted. A few are enough, because all parameters of a
model change together."""

_PATIENCE = 3
"""Number of checks, one second apart, that must detect changes within the same step before a
warning is issued."""

UNENDED = (
    "the parameters keep changing, but no step has ended since step {} began, because a compiled "
    "optimizer step runs no hooks. From now on, a step ends when the parameters have changed since "
    "the last backward(); the earlier steps cannot be separated. To record every step, call "
    "comgra.step() "
    "where a step ends, outside compiled code"
)


class UnendedSteps:
    """Counts the checks that find changed parameters although no step has ended."""

    def __init__(self) -> None:
        self.found: int | None = None
        """The step whose end was not observed."""
        self._at = (-1, 0)
        self._changes: int | None = None
        self._seen = 0

    def look(self, step: int, parameters: Iterable[torch.Tensor], *, signs: int = 0) -> bool:
        """Check once; return whether the check proves that the ends of steps are not observed.

        Args:
            step: the number of the current step.
            parameters: the parameters of the models being trained.
            signs: the number of observed parameter changes that did not end this step, such as an
                optimizer step that is followed by another one within the training step, or a step
                of another thread.
        """
        changes = _changes(parameters)
        if (step, signs) != self._at or changes is None:
            self._at, self._seen = (step, signs), 0
        elif changes != self._changes and not _is_stepping():
            self._seen += 1
        self._changes = changes
        if self._seen < _PATIENCE or self.found == step:
            return False
        self.found = step
        return True


def _changes(parameters: Iterable[torch.Tensor]) -> int | None:
    """Return how often parameters were changed in place; None if there are none."""
    found = [*_versions(islice((p for p in parameters if p.requires_grad), _LOOKED_AT))]
    return sum(found) if found else None


def _versions(parameters: Iterable[torch.Tensor]) -> Iterator[int]:
    for parameter in parameters:
        with suppress(RuntimeError):  # inference tensors have no version counter
            yield parameter._version


def _is_stepping() -> bool:
    """Whether an optimizer is running; with a closure, its step may take a long time."""
    return bool(running(lambda code: code.co_filename == _torch_optimizer.__file__))
