"""Find sampled actions that are used only for log-probabilities.

A policy gradient needs the log-probability of the action that was executed. An action that is
sampled for the loss alone was never executed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from comgra_decl.hooks.graph.calls import tensors_of

_PASSING = frozenset(
    "T t reshape view long unsqueeze squeeze expand broadcast_tensors detach clone __getitem__ to "
    "flatten contiguous cpu".split()
)
"""Functions that return the same actions in another form."""

_COMPARING = frozenset(
    "eq ne le lt ge gt __eq__ __ne__ __le__ __lt__ __ge__ __gt__ remainder __mod__ __and__ all "
    "size dim numel".split()
)
"""Functions by which torch.distributions checks actions."""


@dataclass
class Choice:
    """Sampled actions: their shape, and the line of the program.

    Attributes:
        scored: whether a log-probability with a gradient is selected by them.
        used: whether anything else receives them, such as an environment.
    """

    shape: list[int]
    where: str
    scored: bool = False
    used: bool = False


@dataclass
class Choices:
    """Collects what the actions sampled in a step are used for."""

    _known: dict[int, tuple[weakref.ref[torch.Tensor], Choice]] = field(default_factory=dict)

    def release(self) -> None:
        """Forget all actions."""
        self._known = {}

    def sample(self, actions: torch.Tensor, where: str) -> None:
        """Add actions that were just sampled."""
        self._known[id(actions)] = weakref.ref(actions), Choice([*actions.shape], where)

    def follow(self, name: str, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Determine what a call does with actions."""
        for tensor in tensors_of((*args, *kwargs.values())) if self._known else ():
            choice = self._choice(tensor)
            if choice is None or (name in _COMPARING and not self._meets(choice, args)):
                continue
            if name in _PASSING and (name != "__getitem__" or args[0] is tensor):
                for each in tensors_of((result,)):
                    if not each.is_floating_point():
                        self._known[id(each)] = weakref.ref(each), choice
            elif (
                name in ("gather", "__getitem__")
                and isinstance(result, torch.Tensor)
                and result.requires_grad
            ):
                choice.scored = True
            else:
                choice.used = True

    def _choice(self, tensor: torch.Tensor) -> Choice | None:
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _meets(self, choice: Choice, args: tuple[Any, ...]) -> bool:
        """Whether the actions are compared with others, such as the best ones."""
        return any(
            tensor.numel() > 1 and self._choice(tensor) is not choice for tensor in tensors_of(args)
        )

    @property
    def fresh(self) -> list[Choice]:
        """The actions that only select log-probabilities.

        Not those of a shape of which others select log-probabilities and are executed: further
        ones may estimate an entropy.
        """
        choices = {id(choice): choice for _, choice in self._known.values()}.values()
        executed = [choice.shape for choice in choices if choice.scored and choice.used]
        return [
            choice
            for choice in choices
            if choice.scored and not choice.used and choice.shape not in executed
        ]
