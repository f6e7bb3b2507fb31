"""Find terms of losses whose gradients no optimizer uses, although others of the loss are used.

An example is an actor's loss in which the critic evaluates stored actions instead of the actor's
own: the term depends only on the critic, whose optimizer steps after another loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.hooks.tensors.objective import leaves_behind, terms_behind

_MOST_TERMS = 16
_LEAST = 2  # losses of different records


@dataclass
class _Loss:
    """A loss: shapes of the parameters behind each of its terms, and the optimizers that used it.

    Parameters and optimizers are known by their ids.
    """

    terms: list[dict[int, list[int]]]
    record: int
    used: set[int] = field(default_factory=set)

    def behind(self) -> set[int]:
        return {number for term in self.terms for number in term}


class IdleTerms:
    """The losses of the first records, and the optimizers that step after each."""

    def __init__(self) -> None:
        self._losses: list[_Loss] = []
        self._held: dict[int, frozenset[int]] = {}  # parameters of optimizers, by id

    def loss(self, loss: torch.Tensor, *, record: int) -> None:
        """Add a loss that is about to be backpropagated."""
        start = gradient_function(loss)
        nodes = [] if start is None else terms_behind(start)
        if len(nodes) > _MOST_TERMS:
            nodes = [start]
        terms = [_parameters_behind(node) for node in nodes]
        self._losses.append(_Loss([term for term in terms if term], record))

    def step(self, optimizer: Any) -> None:
        """Add the step of an optimizer."""
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        self._held[id(optimizer)] = frozenset(held)
        if self._losses:
            self._losses[-1].used.add(id(optimizer))

    def found(self) -> dict[str, Any] | None:
        """Return the fact "idle term" of `records.TELLING` if there is one, and forget all losses.

        The parameters of the term belong to an optimizer that steps after losses that depend on
        its own parameters only. If all losses have the same terms and the optimizers alternate,
        each term is used in its turn.
        """
        losses, self._losses = self._losses, []
        held, self._held = self._held, {}
        for number, own in held.items():
            alone = any(number in loss.used and loss.behind() <= own for loss in losses)
            idle = [term for loss in losses for term in _idle(loss, number, held)] if alone else []
            records = {loss.record for loss in losses if any(_idle(loss, number, held))}
            if idle and len(records) >= _LEAST:
                shapes = [*idle[0].values()]
                return {"kind": "idle term", "count": len(shapes), "shapes": shapes[:3]}
        return None


def _idle(
    loss: _Loss, number: int, held: dict[int, frozenset[int]]
) -> Iterator[dict[int, list[int]]]:
    """Yield the terms that only the optimizer of this number could use, but does not."""
    own = held[number]
    used: frozenset[int] = frozenset().union(*(held[each] for each in loss.used))
    its = [term for term in loss.terms if term.keys() <= own]
    others = [term for term in loss.terms if not term.keys() <= own]
    apart = all(own.isdisjoint(term) for term in others)
    if apart and any(not used.isdisjoint(term) for term in others):
        yield from (term for term in its if used.isdisjoint(term))


def _parameters_behind(node: Any) -> dict[int, list[int]]:
    leaves = leaves_behind(node)
    return {id(leaf): [*leaf.shape] for leaf in leaves if isinstance(leaf, torch.nn.Parameter)}
