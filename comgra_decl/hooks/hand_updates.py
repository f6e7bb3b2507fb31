"""Detection of training steps in programs that update their parameters without a torch optimizer.

No event marks a manual update, but at the start of the next step, the parameters differ from their
values at the last `backward`. They are therefore compared at the next model call in recorded steps,
and at the next `backward` in other steps.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from comgra_decl.hooks.pytree import gradient_function, tensors_in
from comgra_decl.stats.quiet import quiet
from comgra_decl.stats.support import PLAIN, is_allocated, version_of

_WATCHED_PARAMETERS = 4
"""The number of parameters to compare, starting with those nearest to the loss. A few are enough,
because an update changes all parameters.
"""

_MOST_NODES = 400
"""The number of autograd nodes to search for these parameters."""

_ELEMENTS = 256
"""The number of elements to compare per parameter. Writes through `data` can be detected only by
comparing elements."""


BY_HAND = (
    "the program uses no torch optimizer: a step ends when the parameters have changed since the "
    "last backward()"
)


class Written(NamedTuple):
    """A snapshot of a parameter, to detect later writes."""

    parameter: weakref.ref[torch.Tensor]
    version: int
    elements: torch.Tensor | None  # a copy of the first elements; None on a device, to avoid a sync

    @classmethod
    def at(cls, parameter: torch.Tensor) -> Written:
        """Take a snapshot of a parameter whose storage is allocated (see `is_allocated`)."""
        return cls(weakref.ref(parameter), version_of(parameter), _elements(parameter))

    def is_written(self) -> bool:
        """Return whether the parameter has changed since the snapshot."""
        parameter = self.parameter()
        if parameter is None or not is_allocated(parameter):
            return False
        if version_of(parameter) != self.version:
            return True
        if self.elements is None:  # a cleared gradient has been used
            return parameter.grad is None
        now = _elements(parameter)
        return now is not None and not torch.equal(_bits(now), _bits(self.elements))


class HandUpdates:
    """Detects the end of a step that is not ended by an optimizer.

    Args:
        held: returns whether a torch optimizer holds any of the given tensors. This requires a slow
            scan of all objects, so it is called only at the first `backward` and once more when a
            write to parameters has been detected.

    Attributes:
        possible: whether manual updates may end steps, because no optimizer step has been observed.
        active: whether manual updates end steps.
        parameters: whether the first writes detected were to parameters. Other tensors may also be
            written to while an optimizer has not stepped yet.
    """

    def __init__(self, *, held: Callable[[list[torch.Tensor]], bool]) -> None:
        self._held = held
        self._looks: list[Written] = []
        self._asked = False
        self.possible = True
        self.active = False
        self.parameters = True

    def backward(self, tensors: Any) -> None:
        """Take snapshots before `backward` is called on the given losses."""
        if not self.possible:
            return
        leaves = list(_leaves([tensor for _, tensor in tensors_in(tensors)]))
        if leaves and not self._asked:
            self._asked = True
            self.possible = not self._held(leaves)
            if not self.possible:
                return
        with quiet():
            self._looks = [Written.at(leaf) for leaf in leaves if is_allocated(leaf)]

    @property
    def pending(self) -> bool:
        """Whether `backward` was called in this step, so that a manual update may end the step."""
        return bool(self._looks)

    def over(self) -> bool:
        """Return whether the parameters have changed since the step's last `backward`."""
        if not self._looks:
            return False
        with quiet():
            written = any(look.is_written() for look in self._looks)
        if not written or self.active:
            return written
        self.parameters = any(isinstance(x.parameter(), torch.nn.Parameter) for x in self._looks)
        found = [p for look in self._looks if (p := look.parameter()) is not None]
        if self._held(found):
            self.possible = False
            self._looks = []
        return self.possible

    def end_step(self) -> None:
        """Drop the snapshots when a step ends."""
        self._looks = []

    def give_way(self) -> None:
        """Stop detecting manual updates, because an optimizer or `comgra.step()` ends steps."""
        self.possible = self.active = False
        self._looks = []

    def unseen(self) -> None:
        """Treat optimizer steps that cannot be observed as manual updates."""
        self.possible = self.active = True


def _elements(parameter: torch.Tensor) -> torch.Tensor | None:
    plain = parameter.device.type == "cpu" and parameter.layout is torch.strided
    if not plain or type(parameter) not in PLAIN:
        return None
    return parameter.detach().reshape(-1)[:_ELEMENTS].clone()


def _bits(elements: torch.Tensor) -> torch.Tensor:
    return elements.view(torch.uint8)


def _leaves(losses: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the parameters nearest to the losses in the graph that `backward` will traverse."""
    functions = map(gradient_function, losses)
    waiting = deque(function for function in functions if function is not None)
    seen = set(waiting)
    found = 0
    for _ in range(_MOST_NODES):
        if not waiting or found >= _WATCHED_PARAMETERS:
            return
        node = waiting.popleft()
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad node
        if isinstance(leaf, torch.Tensor):
            found += 1
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
