"""Steps that nobody ends: parameters change, and no hook of an optimizer says so.

No hook runs in an optimizer's step that is compiled, and there is none in an update written by
hand. Both change parameters in place, which torch counts for every tensor; so a thread that looks
at these counts now and then knows, at no cost for the training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

import torch
from torch.optim import optimizer as _torch_optimizer

from comgra_decl.hooks.other_threads import running

_LOOKED_AT = 64
"""Parameters whose changes are counted; all of a model's change together."""

_PATIENCE = 3
"""Looks, about a second apart, that find changes within one step before that is said."""

UNENDED = (
    "the parameters keep changing, but no step has ended since step {} began: a compiled optimizer "
    "step runs no hooks. From now on, a step ends when the parameters have changed since the last "
    "backward(); the steps until now cannot be separated. To record every step, call comgra.step() "
    "where a step ends, outside compiled code"
)


class UnendedSteps:
    """Counts the looks at a training that find its parameters changed and no step ended."""

    def __init__(self) -> None:
        self.found: int | None = None
        """The step that was found not to end."""
        self._at = (-1, 0)
        self._changes: int | None = None
        self._seen = 0

    def look(self, step: int, parameters: Iterable[torch.Tensor], *, signs: int = 0) -> bool:
        """Looks once; returns whether it turns out now that nobody says when a step ends.

        Args:
            step: the number of the step in progress.
            parameters: of the models that are trained.
            signs: how often something was seen to change parameters that did not end this step: an
                optimizer after which another one is waited for, a step of another thread.
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
    """Returns how often parameters were changed in place; None if there are none."""
    found = [*_versions(islice((p for p in parameters if p.requires_grad), _LOOKED_AT))]
    return sum(found) if found else None


def _versions(parameters: Iterable[torch.Tensor]) -> Iterator[int]:
    for parameter in parameters:
        with suppress(RuntimeError):  # a tensor of inference mode counts nothing
            yield parameter._version


def _is_stepping() -> bool:
    """Whether an optimizer is at work: one that calls a closure changes parameters for long."""
    return bool(running(lambda code: code.co_filename == _torch_optimizer.__file__))
