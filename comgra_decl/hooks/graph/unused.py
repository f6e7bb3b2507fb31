"""Find results of activations, masks and normalizations that nothing uses.

A call such as `scores.masked_fill(mask, -inf)` changes nothing unless its result is assigned.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from comgra_decl.hooks.graph.calls import tensors_of
from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.hooks.tensors.loss_calls import nodes_behind

_KEPT = frozenset(
    "relu gelu silu leaky_relu elu selu mish sigmoid tanh softmax log_softmax dropout layer_norm "
    "batch_norm group_norm instance_norm rms_norm masked_fill clamp clip".split()
)
_MOST = 2_000


@dataclass(frozen=True)
class Unused:
    """A result that nothing uses: the function, the shape, and the line of the program."""

    function: str
    shape: tuple[int, ...]
    where: str


@dataclass
class _Result:
    tensor: weakref.ref[torch.Tensor]
    node: Any
    unused: Unused


@dataclass
class Results:
    """Collects the results of a step that no call has received."""

    _left: dict[int, _Result] = field(default_factory=dict)
    _gone: list[_Result] = field(default_factory=list)  # those that no longer exist
    _used: set[str] = field(default_factory=set)  # lines of which some result is used

    def release(self) -> None:
        """Forget all results."""
        self._left, self._gone, self._used = {}, [], set()

    def receive(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Remove the arguments of a call."""
        if self._left:
            for tensor in tensors_of((*args, *kwargs.values())):
                known = self._left.get(id(tensor))
                if known is not None and known.tensor() is tensor:
                    self._used.add(known.unused.where)
                    del self._left[id(tensor)]

    def wants(self, name: str, args: tuple[Any, ...], result: Any) -> bool:
        """Whether a result is to be added."""
        if name not in _KEPT or len(self._left) + len(self._gone) >= _MOST:
            return False
        return isinstance(result, torch.Tensor) and result.requires_grad and result is not args[0]

    def add(self, name: str, result: torch.Tensor, where: str) -> None:
        """Add a result."""
        known = self._left.get(id(result))
        if known is not None:
            self._gone.append(known)
        unused = Unused(name, tuple(result.shape), where)
        self._left[id(result)] = _Result(weakref.ref(result), gradient_function(result), unused)

    def unused(self, loss: torch.Tensor) -> list[Unused]:
        """Return the results that no longer exist and on which the loss does not depend.

        Lines of which another result is used are left out: a loop over time steps often computes a
        last state that nothing needs.
        """
        gone = [*self._gone, *(r for r in self._left.values() if r.tensor() is None)]
        gone = [result for result in gone if result.unused.where not in self._used]
        if not gone:
            return []
        behind = {*nodes_behind(loss)}
        used = {result.unused.where for result in gone if result.node in behind}
        return [result.unused for result in gone if result.unused.where not in used]
