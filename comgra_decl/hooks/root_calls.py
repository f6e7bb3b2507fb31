"""Classify model calls as training, evaluation, or calls without gradients during training."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from comgra_decl.hooks.module_tree import Owners, in_training, trains_beside
from comgra_decl.hooks.step_state import RootCall

if TYPE_CHECKING:
    from torch import nn


class RootCalls:
    """Classifies model calls by earlier calls and by the modes of modules.

    If a model remains in evaluation mode and is called in every step, like a teacher or a target
    network, its calls are part of the steps. The calls of a trained model that was switched to
    evaluation mode are not.

    Args:
        owners: the parent of each module.
        held_in: given a model, returns the ids of the parameters held by optimizers.

    Attributes:
        evaluating: whether a model in training was switched to evaluation mode.
        maybe: whether a model was switched to evaluation mode before any training.
        only_evaluated: whether all calls are an evaluation, whatever the modes of the modules.
    """

    def __init__(self, owners: Owners, *, held_in: Callable[[nn.Module], Collection[int]]) -> None:
        self._owners = owners
        self._held_in = held_in
        self._trained: dict[int, weakref.ref[nn.Module]] = {}
        self._tuned: dict[int, weakref.ref[nn.Module]] = {}  # trained in evaluation mode
        self.evaluating = False
        self.maybe = False
        self.only_evaluated = False

    @property
    def labels(self) -> tuple[str, ...]:
        """The type of every step if all calls are an evaluation; empty otherwise."""
        return ("eval",) if self.only_evaluated else ()

    @property
    def training(self) -> bool:
        """Whether anything has been trained so far."""
        return bool(self._trained)

    def trains(self, root: nn.Module) -> None:
        """Register that `root` is trained, in training or evaluation mode."""
        self.maybe = False
        if id(root) not in self._trained:
            self._trained[id(root)] = weakref.ref(root)

    def tunes(self, root: nn.Module) -> None:
        """Register that `root` is trained in evaluation mode."""
        self._tuned[id(root)] = weakref.ref(root)
        self.trains(root)
        self.evaluating = False

    def switched(self, module: nn.Module, training: bool) -> bool:
        """Handle a module's mode switch; return whether an evaluation begins.

        All parts of a model have switched before this is called for the model.
        """
        self.maybe = not (training or self._trained)
        if training:
            self.evaluating = False
            return False
        if self.evaluating or not self._is_evaluated(module):
            return False
        self.evaluating = True
        return True

    def _is_evaluated(self, module: nn.Module) -> bool:
        """Return whether a module in evaluation mode is, contains or is part of a trained model.

        A part in evaluation mode within a model in training mode counts as frozen, unless that
        model only wraps the part, for example to add a loss or to adapt it to a task or another
        framework.
        """
        for owner in self._owners.and_above(module):
            if self._is_trained(owner):
                return owner is module or not self._only_freezes(owner, module)
        trained = (root for ref in self._trained.values() if (root := ref()) is not None)
        return any(owner is module for root in trained for owner in self._owners.and_above(root))

    def _only_freezes(self, owner: nn.Module, part: nn.Module) -> bool:
        return in_training(owner) and trains_beside(owner, part, self._held_in(owner))

    def _is_trained(self, module: nn.Module) -> bool:
        return _has(self._trained, module)

    def kind(self, root: nn.Module, *, training_mode: bool, gradient: bool) -> RootCall:
        """Return the kind of a call that begins now.

        Args:
            root: the called module.
            training_mode: whether it is in training mode.
            gradient: whether gradients are enabled.
        """
        if training_mode:
            if gradient:
                return RootCall.TRAINING
            if self.evaluating:
                return RootCall.EVALUATION
            return RootCall.WITHOUT_GRADIENT if self._trained else RootCall.UNDECIDED
        if gradient and _has(self._tuned, root):
            return RootCall.TRAINING
        if self._trained and self._is_evaluated(root):
            return RootCall.EVALUATION
        if gradient and self._trained:
            return RootCall.TRAINING  # such as a perceptual loss
        if self.evaluating:
            return RootCall.EVALUATION
        return RootCall.WITHOUT_GRADIENT if self._trained else RootCall.UNDECIDED

    def related(self, root: nn.Module, others: Iterable[nn.Module]) -> bool:
        """Return whether `root` is, contains or is part of one of the other modules."""
        above = [*self._owners.and_above(root)]
        return any(
            any(other is owner for owner in above)
            or any(owner is root for owner in self._owners.and_above(other))
            for other in others
        )


def _has(known: dict[int, weakref.ref[nn.Module]], module: nn.Module) -> bool:
    found = known.get(id(module))
    return found is not None and found() is module
