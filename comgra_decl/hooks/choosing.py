"""Which record the call of a model belongs to: the step's, that of an evaluation, or none."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

import torch

from comgra_decl.hooks import modes
from comgra_decl.hooks.call_context import is_in_optimizer
from comgra_decl.hooks.closing import Closing
from comgra_decl.hooks.cross_thread import here
from comgra_decl.hooks.limits import CUDA_GRAPH
from comgra_decl.hooks.module_tree import in_training
from comgra_decl.hooks.root_calls import RootCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from comgra_decl.hooks.hand_updates import HandUpdates
    from comgra_decl.hooks.module_tree import Top
    from comgra_decl.hooks.optimizers import CalledModels
    from comgra_decl.hooks.step_clock import StepClock
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.training_threads import Lanes

_MAX_ROOT_CALLS = 2000
"""Calls of one model that a record has at most, and those of all after which, without an optimizer
step, it is given up (memory stays bounded)."""

_MOST_ASIDE = 8
"""Calls without gradient kept of a step, and two more for each call with."""

_MANY_ASIDE = (
    "{} is called more often without gradient than a step is expected to; the first {} such calls "
    "of each recorded step are recorded, as the pass 'no_grad'. If this is an evaluation, say so "
    "with model.eval(): it is then recorded as one"
)


class Choosing(Closing):
    """Tells training from evaluation, by the modes of modules and by the calls of models."""

    _called: CalledModels
    _end_by_hand: Callable[[], None]
    _end_step: Callable[[], None]
    _lanes: Lanes
    _ready: Callable[[], None]
    _turn_here: Callable[[], bool]

    @property
    def _clock(self) -> StepClock:
        return self._lanes.followed.clock

    @property
    def _hand(self) -> HandUpdates:
        return self._lanes.followed.hand

    def _on_mode(self, module: nn.Module, training: bool) -> None:
        """A module was switched to training or evaluation, as each of its children was before."""
        roots = self._roots
        settled = training and not (roots.evaluating or roots.maybe)
        if settled or self._stopped or torch.compiler.is_compiling():
            return
        with self._together:
            if self._tracer.thread not in (0, here()) and not self._turn_here():
                return  # another thread evaluates meanwhile
            self._idle.end()
            modes.sweep()
            evaluates = roots.switched(module, training)
            # before anything is trained this may be one, which else nobody would look at
            if evaluates or not (training or roots.training or self._armed):
                self._begin_evaluation()

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
        kind = self._roots.kind(root)
        if kind is RootCall.EVALUATION and self._is_in_closure(top):
            kind = RootCall.TRAINING
            self._roots.tunes(root)
            if not self._evaluation.capture.open:
                self._evaluation.forget()
        if kind is RootCall.UNDECIDED and not self._train.open:
            kind = RootCall.EVALUATION
        elif kind is RootCall.EVALUATION and self._may_train(top):
            kind = RootCall.UNDECIDED
            self._train.root_calls = 0  # of a network that is called while it is being built
        if kind is RootCall.EVALUATION:
            self._structures.pause()
            self._evaluation.begin(self._step, self._train.root_calls)
            self._note_evaluated(root, top)
            return self._evaluation.enter(self._step, counts=top.parametric)
        if kind is RootCall.TRAINING and top.parametric:
            self._begin_training(root)
        return self._in_step(root, top, kind)

    def _may_train(self, top: Top) -> bool:
        """Whether what looks like an evaluation may be a step of fine-tuning in that mode.

        Gradients can flow, and nothing else was called in this step, or `backward` never yet: it
        will tell.
        """
        may = torch.is_grad_enabled() and top.parametric and self._train.open
        never_trained = "loss" not in self._train.calls and not self._clock.running
        return may and (never_trained or not self._train.root_calls)

    def _is_in_closure(self, top: Top) -> bool:
        """Whether an optimizer calls this, as its closure: it trains what stays in this mode."""
        may = torch.is_grad_enabled() and top.parametric
        return may and is_in_optimizer(sys._getframe(1))

    def _note_evaluated(self, root: nn.Module, top: Top) -> None:
        """Remembers what is evaluated before anything is trained, or with gradients."""
        if top.parametric and (torch.is_grad_enabled() or not self._roots.training):
            self._evaluated.append(weakref.ref(root))

    def _begin_training(self, root: nn.Module) -> None:
        """A model is called in training: what came before it is now known for what it was."""
        if self._evaluation.capture.open:
            self._settle_evaluation(root)
        if self._undecided:
            self._settle_undecided(root)
        if self._hand.over():
            self._end_by_hand()
        elif self._clock.called(id(root)):
            self._end_step()
        self._roots.evaluating = False
        if in_training(root):
            self._in_training_mode = True
            self._roots.trains(root)

    def _in_step(self, root: nn.Module, top: Top, kind: RootCall) -> StepCapture | None:
        """Returns the record of the step in progress, if it has room for a call."""
        capture = self._train
        if self._armed:
            self._called.note(root)
        self._structures.resume()
        if self._is_endless(capture):
            self._cut_step()
        if not capture.open or _has_enough(capture, root):
            return None
        aside = kind is not RootCall.TRAINING
        if aside and not self._has_room_aside(root, top, kind):
            return None
        if not capture.root_calls and not self._asides:
            self._ready()
        if aside:
            self._asides += top.parametric
        else:
            capture.root_calls += top.parametric
        if kind is RootCall.UNDECIDED and top.parametric:
            self._undecided.append((weakref.ref(root), in_training(root)))
        capture.aside = aside and not torch.is_grad_enabled()
        return capture

    def _has_room_aside(self, root: nn.Module, top: Top, kind: RootCall) -> bool:
        if kind is RootCall.UNDECIDED:  # as many as of an evaluation, which it may be
            enough = self._evaluation.calls(max(1, self._usual))
            may_train = in_training(root) or (torch.is_grad_enabled() and not self._usual)
            return self._asides < max(enough, _MOST_ASIDE if may_train else 0)
        most = _MOST_ASIDE + 2 * self._train.root_calls
        if self._asides < most:
            return True
        if in_training(root) and top.parametric:
            self._reporter.warn(_MANY_ASIDE.format(top.label, _MOST_ASIDE))
        return False

    def _is_endless(self, capture: StepCapture) -> bool:
        """Whether a step has no end that we could see: it is trained in, and goes on."""
        if not capture.open:
            return False
        trained = capture.root_calls >= _MAX_ROOT_CALLS and "loss" in capture.calls
        return self._unended.found == self._step or (trained and not self._stepped)

    def _left_root(self) -> None:
        with self._together:
            self._leave_root()

    def _leave_root(self) -> None:
        self._train.aside = False
        if not self._roots.evaluating and self._train.open and self._train.root_calls:
            self._structures.resume()  # the model that was left may be a teacher, not evaluated
        undecided = self._evaluated and not self._roots.training
        if self._evaluation.complete and not undecided:
            self._finish_evaluation()
            if not self._armed:
                self._disarm()


def _has_enough(capture: StepCapture, root: nn.Module) -> bool:
    """Whether a model was called too often in this step; another one has room of its own."""
    key = ("calls", id(root))
    before = capture.calls.get(key, 0)
    capture.calls[key] = before + 1
    return before >= _MAX_ROOT_CALLS
