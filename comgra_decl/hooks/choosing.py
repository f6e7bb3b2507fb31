"""Which record the call of a model belongs to: the step's, that of an evaluation, or none."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING

import torch

from comgra_decl.hooks import modes
from comgra_decl.hooks.closing import Closing
from comgra_decl.hooks.limits import CUDA_GRAPH
from comgra_decl.hooks.tree import trains_beside

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from comgra_decl.hooks.limits import Captures
    from comgra_decl.hooks.reading.capture import StepCapture
    from comgra_decl.hooks.tree import Top

_MAX_ROOT_CALLS = 2000
"""Model calls kept without an optimizer step before a record is given up (memory stays bounded)."""


class Choosing(Closing):
    """Tells training from evaluation, by the modes of modules and by the calls of models."""

    _captures: Captures
    _ready: Callable[[], None]
    _evaluating: bool  # as far as the program has said so

    def _on_mode(self, module: nn.Module, training: bool) -> None:
        """A module was switched to training or evaluation, as each of its children was before."""
        if training == (not self._evaluating) or self._stopped or torch.compiler.is_compiling():
            return
        if self._tracer.thread not in (0, get_ident()):  # another thread evaluates meanwhile
            return
        self._rest.end()
        modes.sweep()
        self._evaluating = not training and not self._is_frozen(module)
        if self._evaluating:
            self._begin_evaluation()

    def _is_frozen(self, module: nn.Module) -> bool:
        """Whether a module is only a part, kept in evaluation mode, of one that is trained."""
        top = self._owners.top_of(module)
        return top is not module and top.training and trains_beside(top, module)

    def _begin_evaluation(self) -> None:
        self._structures.pause()
        self._tracer.rest()
        if self._evaluation.begin(self._step, self._train.root_calls) and not self._armed:
            self._install()

    def _choose(self, root: nn.Module, top: Top) -> StepCapture | None:
        """Decides which record a root call belongs to."""
        if self._ending:
            self._stop_when_safe()
            return None
        if self._captures.active:
            self._reporter.warn(CUDA_GRAPH)
            return None
        training = root.training
        if not training and (top.trained or not torch.is_grad_enabled()):
            self._structures.pause()
            return self._evaluation.enter(self._step)
        if self._evaluation.capture.open and top.parametric:
            self._finish_evaluation()
        self._structures.resume()
        self._evaluating = False
        top.trained = top.trained or training
        capture = self._train
        if self._is_endless(capture):
            self._cut_step()
        if not capture.open or capture.root_calls >= _MAX_ROOT_CALLS:
            return None
        if not capture.root_calls:
            self._ready()
        capture.root_calls += top.parametric
        return capture

    def _is_endless(self, capture: StepCapture) -> bool:
        """Whether a step has no end that we could see: it is trained in, and goes on."""
        if not capture.open:
            return False
        trained = capture.root_calls >= _MAX_ROOT_CALLS and "loss" in capture.calls
        return self._unended.found == self._step or (trained and not self._stepped)

    def _left_root(self) -> None:
        if not self._evaluating and self._train.open and self._train.root_calls:
            self._structures.resume()  # the model that was left may be a teacher, not evaluated
        if self._evaluation.complete:
            self._finish_evaluation()
            if not self._armed:
                self._disarm()
