"""Steps of a training that no optimizer of torch ends: the program writes its parameters itself.

There is no event for that. But a step is over when the next one begins, and by then the parameters
have been written since the last `backward`. So they are looked at when the model is called again,
in recorded steps, and otherwise when `backward` is.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from comgra_decl.hooks.pytree import gradient_function, tensors_in
from comgra_decl.stats.quiet import quiet

_LOOKED_AT = 4
"""Parameters that are looked at: those nearest to the loss. All of a model are written together."""

_MOST_NODES = 400
"""Functions of the graph of a loss among which they are looked for."""

_ELEMENTS = 256
"""Elements of each that are compared; writing through `data` leaves no other trace."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

BY_HAND = (
    "the program uses no torch optimizer: a step ends when the parameters have changed since the "
    "last backward()"
)


class Written(NamedTuple):
    """A parameter as it was at some moment, to tell whether it was written since."""

    parameter: weakref.ref[torch.Tensor]
    version: int
    elements: torch.Tensor | None  # a copy of the first ones; None on a device, where it would wait

    @classmethod
    def at(cls, parameter: torch.Tensor) -> Written:
        """Looks at a parameter, which must have its numbers."""
        return cls(weakref.ref(parameter), _version(parameter), _elements(parameter))

    def is_written(self) -> bool:
        """Whether the parameter has been changed since."""
        parameter = self.parameter()
        if parameter is None or not is_there(parameter):
            return False
        if _version(parameter) != self.version:
            return True
        if self.elements is None:  # cleared gradients have been used
            return parameter.grad is None
        now = _elements(parameter)
        return now is not None and not torch.equal(_bits(now), _bits(self.elements))


class HandUpdates:
    """Knows when a step is over though no optimizer has stepped.

    Args:
        held: whether an optimizer of torch holds one of some parameters. All objects are looked
            at for it, which takes a while: it is asked at the first `backward`, and once more when
            parameters have been written.

    Attributes:
        possible: whether steps may end so: no optimizer has been seen to step.
        active: whether they do.
        parameters: whether parameters were written when that was seen first; other tensors may be
            moved beside an optimizer that is yet to step.
    """

    def __init__(self, *, held: Callable[[list[torch.Tensor]], bool]) -> None:
        self._held = held
        self._looks: list[Written] = []
        self._asked = False
        self.possible = True
        self.active = False
        self.parameters = True

    def backward(self, tensors: Any) -> None:
        """`backward` is about to be called on the losses of the step in progress."""
        if not self.possible:
            return
        leaves = list(_leaves([tensor for _, tensor in tensors_in(tensors)]))
        if leaves and not self._asked:
            self._asked = True
            self.possible = not self._held(leaves)
            if not self.possible:
                return
        with quiet():
            self._looks = [Written.at(leaf) for leaf in leaves if is_there(leaf)]

    @property
    def pending(self) -> bool:
        """Whether a step that ends so is in progress, and `backward` was called in it."""
        return bool(self._looks)

    def over(self) -> bool:
        """Whether the parameters have been written since the last `backward` of the step."""
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
        """A step has ended, however it did."""
        self._looks = []

    def give_way(self) -> None:
        """An optimizer of torch has stepped, or the program says where steps end."""
        self.possible = self.active = False
        self._looks = []

    def unseen(self) -> None:
        """There are steps of optimizers that cannot be seen, as if they were written by hand."""
        self.possible = self.active = True


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def is_there(parameter: torch.Tensor) -> bool:
    """Whether a parameter has its numbers: FSDP frees those of a gathered one between its uses."""
    if parameter.layout is not torch.strided or type(parameter) not in _PLAIN:
        return True
    return parameter.numel() == 0 or parameter.untyped_storage().size() > 0


def _elements(parameter: torch.Tensor) -> torch.Tensor | None:
    plain = parameter.device.type == "cpu" and parameter.layout is torch.strided
    if not plain or type(parameter) not in _PLAIN:
        return None
    return parameter.detach().reshape(-1)[:_ELEMENTS].clone()


def _bits(elements: torch.Tensor) -> torch.Tensor:
    return elements.view(torch.uint8)


def _leaves(losses: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the parameters nearest to losses, from the graph that `backward` will walk."""
    functions = map(gradient_function, losses)
    waiting = deque(function for function in functions if function is not None)
    seen = set(waiting)
    found = 0
    for _ in range(_MOST_NODES):
        if not waiting or found >= _LOOKED_AT:
            return
        node = waiting.popleft()
        leaf = getattr(node, "variable", None)  # of what accumulates a gradient
        if isinstance(leaf, torch.Tensor):
            found += 1
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
